//! The connection over which this side writes: requests that wait, requests that are not answered, and its end.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::frame::{ANSWER, Answer, HEAD, Head, Refused, greeting};
use super::sys::{Part, Room, is_patient, receive, send};
use crate::error::NetworkError;
use crate::provider::{Event, MayLand};
use crate::region::Region;

/// Requests that are not answered, on one connection.
pub(super) const DEPTH: usize = 128;
/// Stretches that one system call sends from.
const PARTS: usize = 64;
/// Bytes of answers that one system call takes.
const ANSWERS: usize = 64 * ANSWER;

/// Where the payload of a request is.
pub(super) enum Payload {
    Bytes(Vec<u8>),
    /// Registered memory, from this offset on.
    Memory {
        src: Arc<Region>,
        offset: u64,
        len: u64,
    },
}

impl Payload {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory { len, .. } => *len as usize,
        }
    }

    /// All of it but the first bytes.
    fn after(&self, skip: usize) -> Part<'_> {
        match self {
            Self::Bytes(bytes) => Part::bytes(bytes.get(skip..).unwrap_or_default()),
            Self::Memory { src, offset, len } => Part::region(src, offset + skip as u64, len - skip as u64),
        }
    }
}

pub(super) struct Request {
    pub token: u64,
    head: [u8; HEAD],
    payload: Payload,
    refused: Option<Refused>,
}

impl Request {
    pub fn new(token: u64, head: Head, payload: Payload) -> Self {
        Self { token, head: head.encode(), payload, refused: None }
    }

    fn len(&self) -> usize {
        HEAD + self.payload.len()
    }
}

/// How a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Open,
    /// The other side has closed it, so nothing more of it lands.
    Closed,
    /// It has failed: nobody knows what the other side does.
    Failed,
}

pub(super) struct Outgoing {
    pub socket: TcpStream,
    pub state: State,
    /// What is sent before the first request, and how much of it has gone.
    greeting: Vec<u8>,
    greeted: usize,
    /// All requests that are not over, the oldest first; so many of them have been sent, and so much of the next one.
    requests: VecDeque<Request>,
    sent: usize,
    begun: usize,
    /// The number of the oldest request.
    first: u32,
    answers: Vec<u8>,
    /// The socket has no room: the selector says when it has.
    pub blocked: bool,
    /// The engine has dropped the link, then.
    pub closing: Option<Instant>,
}

fn add<'a>(parts: &mut [Part<'a>; PARTS], count: &mut usize, part: Part<'a>) {
    if !part.is_empty()
        && let Some(place) = parts.get_mut(*count)
    {
        *place = part;
        *count += 1;
    }
}

impl Outgoing {
    /// A connection that presents a pass once it stands.
    pub fn new(socket: TcpStream, pass: u64) -> Self {
        Self {
            socket,
            state: State::Open,
            greeting: greeting(pass),
            greeted: 0,
            requests: VecDeque::new(),
            sent: 0,
            begun: 0,
            first: 0,
            answers: Vec::new(),
            blocked: true,
            closing: None,
        }
    }

    pub fn has_room(&self) -> bool {
        self.requests.len() < DEPTH
    }

    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Says whether something waits to be sent.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.requests.len() || self.greeted < self.greeting.len()
    }

    pub fn push(&mut self, request: Request) {
        self.requests.push_back(request);
    }

    /// Sends what waits, as far as it goes.
    pub fn flush(&mut self) {
        while self.state == State::Open && self.has_unsent() && self.closing.is_none() {
            let mut parts = [Part::none(); PARTS];
            let mut count = 0;
            add(&mut parts, &mut count, Part::bytes(self.greeting.get(self.greeted..).unwrap_or_default()));
            let mut skip = self.begun;
            for request in self.requests.iter().skip(self.sent).take(PARTS / 2 - 1) {
                let head = request.head.get(skip.min(HEAD)..).unwrap_or_default();
                add(&mut parts, &mut count, Part::bytes(head));
                add(&mut parts, &mut count, request.payload.after(skip.saturating_sub(HEAD)));
                skip = 0;
            }
            match send(&self.socket, parts.get(..count).unwrap_or_default()) {
                Ok(sent) => {
                    self.blocked = false;
                    self.advance(sent);
                }
                Err(error) if is_patient(&error) => {
                    self.blocked = true;
                    return;
                }
                Err(error) => return self.fail(&error),
            }
        }
    }

    fn advance(&mut self, mut sent: usize) {
        let greeting = sent.min(self.greeting.len() - self.greeted);
        self.greeted += greeting;
        sent -= greeting;
        while sent > 0
            && let Some(request) = self.requests.get(self.sent)
        {
            let left = request.len() - self.begun;
            if sent < left {
                self.begun += sent;
                return;
            }
            sent -= left;
            self.begun = 0;
            self.sent += 1;
        }
    }

    /// A connection that the other side has closed or reset leads nowhere; of one that was lost on the way nobody knows.
    fn fail(&mut self, error: &std::io::Error) {
        let gone = matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNREFUSED));
        self.state = if gone { State::Closed } else { State::Failed };
    }

    /// Takes the answers that have come.
    pub fn receive(&mut self, over: &mut impl FnMut(Event)) {
        while self.state == State::Open {
            let mut room = [0_u8; ANSWERS];
            match receive(&self.socket, &[Room::bytes(&mut room), Room::none()]) {
                Ok(0) => self.state = State::Closed,
                Ok(got) => {
                    self.answers.extend_from_slice(room.get(..got).unwrap_or_default());
                    self.read_answers(over);
                    if got < room.len() {
                        return;
                    }
                }
                Err(error) if is_patient(&error) => return,
                Err(error) => self.fail(&error),
            }
        }
    }

    fn read_answers(&mut self, over: &mut impl FnMut(Event)) {
        let whole = self.answers.len() - self.answers.len() % ANSWER;
        for bytes in self.answers.drain(..whole).collect::<Vec<_>>().chunks_exact(ANSWER) {
            let right = match Answer::decode(bytes) {
                Ok(Answer::Done(number)) => self.done(number, over),
                Ok(Answer::Refused(number, why)) => self.refused(number, why),
                Err(_) => false,
            };
            if !right {
                // Whoever does not keep to the rules says nothing that can be relied on.
                self.state = State::Failed;
            }
        }
    }

    fn refused(&mut self, number: u32, why: Refused) -> bool {
        let index = number.wrapping_sub(self.first) as usize;
        // The first bytes are enough to be refused.
        match self.requests.get_mut(index).filter(|_| index <= self.sent) {
            Some(request) => {
                request.refused = Some(why);
                true
            }
            None => false,
        }
    }

    fn done(&mut self, number: u32, over: &mut impl FnMut(Event)) -> bool {
        let count = number.wrapping_sub(self.first) as usize;
        if count > self.sent {
            return false;
        }
        for request in self.requests.drain(..count) {
            let result = match request.refused {
                None => Ok(()),
                Some(Refused::BadKey) => Err((NetworkError::BadKey, false)),
                Some(Refused::OutOfBounds) => Err((NetworkError::OutOfBounds, false)),
            };
            over(Event::Completed { token: request.token, result });
        }
        self.sent -= count;
        self.first = number;
        true
    }

    /// The engine drops the link. What has not been sent never is. The other side says that it has read to the end by closing.
    pub fn part(&mut self, over: &mut impl FnMut(Event)) {
        let begun = self.sent + usize::from(self.begun > 0);
        for request in self.requests.drain(begun.min(self.requests.len())..) {
            let result = Err((NetworkError::Disconnected, false));
            over(Event::Completed { token: request.token, result });
        }
        self.closing = Some(Instant::now());
        // Where there is nobody, nobody has to be told.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Nothing more is heard of it.
    pub fn end(self, may_land: MayLand, over: &mut impl FnMut(Event)) {
        for request in self.requests {
            // A refusal that has come is the last word.
            let result = match request.refused {
                Some(Refused::BadKey) => (NetworkError::BadKey, false),
                Some(Refused::OutOfBounds) => (NetworkError::OutOfBounds, false),
                None => (NetworkError::Disconnected, may_land),
            };
            over(Event::Completed { token: request.token, result: Err(result) });
        }
    }
}
