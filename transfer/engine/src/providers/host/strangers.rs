//! Those who have presented no pass that is known: ways, which carry handshakes, and links that nobody waits for yet. They are
//! few, and the oldest ones go.

use std::os::fd::{AsRawFd, OwnedFd};

use super::HostNic;
use super::connection::{Connection, Side, Stage, token, unwatch};
use super::incoming::Incoming;
use super::packet::{Mark, Packet, decode};
use super::sys::{Socket, no_connection};
use crate::error::NetworkError;
use crate::providers::interface::{Event, Link};

/// Connections of strangers.
pub(super) const MOST_STRANGERS: usize = 256;

/// A connection without a known pass: a way, or a link that nobody waits for yet.
pub(super) struct Stranger {
    pub number: usize,
    /// None: the greeted one was not there when it was tried.
    pub socket: Option<Socket>,
    /// Where this NIC greets; empty for those who came here.
    pub name: Vec<u8>,
    pub presented: Option<(u64, Mark, OwnedFd)>,
    /// It has the last file that this process may open.
    pub on_spare: bool,
}

impl Stranger {
    pub fn presents(&self, pass: u64) -> bool {
        self.presented.as_ref().is_some_and(|(presented, ..)| *presented == pass)
    }
}

impl HostNic {
    pub(super) fn accept(&mut self, events: &mut Vec<Event>) {
        loop {
            self.spare.renew();
            let accepted = match self.listener.accept() {
                Err(error) if self.spare.lend(&error) => self.listener.accept(),
                accepted => accepted,
            };
            let Ok(socket) = accepted else { return };
            let number = self.number();
            if self.selector.add(&socket, token(number, Side::Stranger)).is_ok() {
                let (socket, on_spare) = (Some(socket), self.spare.is_lent());
                self.strangers.push(Stranger { number, socket, name: Vec::new(), presented: None, on_spare });
            }
            let came = self.strangers.iter().filter(|stranger| stranger.name.is_empty());
            if came.count() > MOST_STRANGERS
                && let Some(oldest) = self.strangers.iter().position(|stranger| stranger.name.is_empty())
            {
                self.forget_stranger(oldest);
            }
            // At once: among many strangers a peer is none for longer than this.
            self.hear_stranger(number, events);
        }
    }

    pub(super) fn forget_stranger(&mut self, place: usize) -> Stranger {
        let stranger = self.strangers.remove(place);
        unwatch(&self.selector, stranger.socket.iter().map(AsRawFd::as_raw_fd));
        stranger
    }

    pub(super) fn hear_stranger(&mut self, number: usize, events: &mut Vec<Event>) {
        loop {
            let Some(place) = self.strangers.iter().position(|stranger| stranger.number == number) else { return };
            let Some(stranger) = self.strangers.get_mut(place) else { return };
            let Some(socket) = &stranger.socket else { return };
            let heard = socket.receive();
            let Ok(Some((bytes, file))) = heard else {
                if heard.is_err() {
                    let stranger = self.forget_stranger(place);
                    if !stranger.name.is_empty() {
                        // The engine still has this way; it connects anew if it is used.
                        self.strangers.push(Stranger { socket: None, ..stranger });
                    }
                }
                return;
            };
            match (decode(&bytes), file) {
                (Ok(Packet::Greeting(bytes)), None) if stranger.presented.is_none() => {
                    events.push(Event::Greeted { way: Link(number), bytes: bytes.to_vec() });
                }
                (Ok(Packet::Present { pass, mark }), Some(file)) if stranger.name.is_empty() && !stranger.on_spare => {
                    stranger.presented = Some((pass, mark, file));
                    self.let_in(place);
                    return;
                }
                _ => {
                    self.forget_stranger(place);
                    return;
                }
            }
        }
    }

    /// Makes somebody who has presented a pass the incoming side of the link that waits for it. If none does, there he waits.
    pub(super) fn let_in(&mut self, place: usize) {
        let Some((pass, ..)) = self.strangers.get(place).and_then(|stranger| stranger.presented.as_ref()) else {
            return;
        };
        let waits = |connection: &&mut Connection| {
            connection.stage == Stage::Open && connection.incoming.is_none() && connection.passes.own == *pass
        };
        let Some(connection) = self.connections.iter_mut().find(waits) else {
            if self.ended.contain(*pass) {
                self.forget_stranger(place);
            }
            return;
        };
        let (number, selector) = (connection.number, &self.selector);
        let stranger = self.strangers.remove(place);
        unwatch(selector, stranger.socket.iter().map(AsRawFd::as_raw_fd));
        if let Stranger { socket: Some(socket), presented: Some((_, mark, file)), .. } = stranger
            && let Ok(incoming) = Incoming::new(socket, mark, &file)
            && incoming.watched().all(|file| selector.add(&file, token(number, Side::Incoming)).is_ok())
        {
            connection.incoming = Some(incoming);
        }
    }

    /// Sends bytes over a way. They may get lost, so all that can be done has been done then.
    pub(super) fn send_on_way(&mut self, way: Link, bytes: &[u8]) {
        let Some(stranger) = self.strangers.iter_mut().find(|stranger| stranger.number == way.0) else { return };
        if stranger.socket.is_none()
            && !stranger.name.is_empty()
            && let Ok(socket) = Socket::connect(&stranger.name)
            && self.selector.add(&socket, token(stranger.number, Side::Stranger)).is_ok()
        {
            stranger.socket = Some(socket);
        }
        if let Some(socket) = &stranger.socket {
            let _ = socket.send(&Packet::Greeting(bytes), None);
        }
    }

    /// Opens a way to somebody who listens there.
    pub(super) fn open_way(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        let number = self.number();
        let socket = match Socket::connect(endpoint) {
            Ok(socket) => Some(socket),
            // Its queue of new connections is full.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(error) => return Err(no_connection(endpoint, &error)),
        };
        if let Some(socket) = &socket
            && let Err(error) = self.selector.add(socket, token(number, Side::Stranger))
        {
            return Err(no_connection(endpoint, &error));
        }
        self.strangers.push(Stranger { number, socket, name: endpoint.to_vec(), presented: None, on_spare: false });
        Ok(Link(number))
    }
}
