//! The connection over which this side writes and reads: requests that wait, requests that are not answered, and its end.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::frame::{ANSWER, Answer, HEAD, Head, Refused, greeting};
use super::sys::{Part, Room, is_patient, receive, send};
use crate::error::NetworkError;
use crate::memory::region::Region;
use crate::providers::interface::{Event, MayLand};

/// Requests that are not answered, on one connection.
pub(super) const DEPTH: usize = 128;
/// Bytes of reads that may be under way on one connection: what is asked for comes before whatever else the other side is told.
const MOST_ASKED: u64 = 32 << 20;
/// Bytes that one look takes from a connection, so that no peer keeps the others waiting.
const SIP: u64 = 2 << 20;
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
    /// There is none: bytes come back to here, of which so many are still to come. None: they are thrown away.
    Back {
        into: Option<Arc<Region>>,
        at: u64,
        left: u64,
    },
}

impl Payload {
    /// Bytes that go out.
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory { len, .. } => *len as usize,
            Self::Back { .. } => 0,
        }
    }

    /// All of it but the first bytes.
    fn after(&self, skip: usize) -> Part<'_> {
        match self {
            Self::Bytes(bytes) => Part::bytes(bytes.get(skip..).unwrap_or_default()),
            Self::Memory { src, offset, len } => Part::region(src, offset + skip as u64, len - skip as u64),
            Self::Back { .. } => Part::none(),
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

    /// Where bytes that come back go, and how many are to come, if it is a read that waits for some.
    fn back(&mut self) -> Option<(Option<&Arc<Region>>, &mut u64, &mut u64)> {
        match &mut self.payload {
            Payload::Back { into, at, left } if *left > 0 && self.refused.is_none() => Some((into.as_ref(), at, left)),
            _ => None,
        }
    }

    /// A read that has been reported, whose bytes go nowhere.
    fn is_told(&self) -> bool {
        matches!(self.payload, Payload::Back { into: None, .. })
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
    /// The greeting that is sent before the first request, and how much of it has gone.
    greeting: Vec<u8>,
    greeted: usize,
    /// All requests that are not over, the oldest first; so many of them have been sent, and so much of the next one.
    requests: VecDeque<Request>,
    sent: usize,
    begun: usize,
    /// The number of the oldest request.
    first: u32,
    answers: Vec<u8>,
    /// Bytes of the oldest read that come before the next answer.
    data: u64,
    /// Bytes that were asked for and have not come.
    asked: u64,
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
            data: 0,
            asked: 0,
            blocked: true,
            closing: None,
        }
    }

    pub fn has_room(&self) -> bool {
        self.requests.len() < DEPTH && self.asked < MOST_ASKED
    }

    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Says whether something waits to be sent.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.requests.len() || self.greeted < self.greeting.len()
    }

    pub fn push(&mut self, request: Request) {
        if let Payload::Back { left, .. } = &request.payload {
            self.asked += left;
        }
        self.requests.push_back(request);
    }

    /// Sends what waits, as far as it goes. Says whether that was anything.
    pub fn flush(&mut self) -> bool {
        let mut any = false;
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
                    (self.blocked, any) = (false, true);
                    self.advance(sent);
                }
                Err(error) if is_patient(&error) => {
                    self.blocked = true;
                    break;
                }
                Err(error) => self.fail(&error),
            }
        }
        any
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

    /// Takes the answers that have come, and bytes of reads: those go from the socket to where they belong, apart from what comes
    /// with an answer. Says whether anything has come.
    pub fn receive(&mut self, over: &mut impl FnMut(Event)) -> bool {
        let mut taken = 0;
        while self.state == State::Open && taken < SIP {
            let mut room = [0_u8; ANSWERS];
            let data = self.data;
            let into = self.oldest_back().and_then(|(into, at, _)| Some((Arc::clone(into?), *at)));
            let direct = into.as_ref().map_or_else(Room::none, |(into, at)| Room::region(into, *at, data));
            let len = direct.len();
            match receive(&self.socket, &[direct, Room::bytes(&mut room)]) {
                Ok(0) => self.state = State::Closed,
                Ok(got) => {
                    taken += got as u64;
                    let landed = got.min(len);
                    self.advance_back(landed as u64);
                    self.answers.extend_from_slice(room.get(..got - landed).unwrap_or_default());
                    self.read_answers(over);
                    if got < len + room.len() {
                        break;
                    }
                }
                Err(error) if is_patient(&error) => break,
                // The memory that the bytes belong in is not there or not writable any more.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && self.throw_away(over) => {}
                Err(error) => self.fail(&error),
            }
        }
        taken > 0
    }

    /// Reports the oldest read as failed; what still comes of it is thrown away. False: there is none.
    fn throw_away(&mut self, over: &mut impl FnMut(Event)) -> bool {
        let at_work = |request: &&mut Request| {
            request.refused.is_none() && matches!(request.payload, Payload::Back { left, .. } if left > 0)
        };
        let Some(request) = self.requests.iter_mut().find(at_work) else { return false };
        let Payload::Back { into, at, left } = &mut request.payload else { return false };
        let Some(region) = into.take() else { return false };
        region.check_fault(*at, *left);
        let error = NetworkError::Other("the memory that the bytes were to go to cannot be written to".into());
        over(Event::Completed { token: request.token, result: Err((error, false)) });
        true
    }

    /// So many bytes of the oldest read have come.
    fn advance_back(&mut self, count: u64) {
        if let Some((_, at, left)) = self.oldest_back() {
            *at += count;
            *left = left.saturating_sub(count);
        }
        self.data = self.data.saturating_sub(count);
        self.asked = self.asked.saturating_sub(count);
    }

    /// The read that bytes come for, if any do.
    fn oldest_back(&mut self) -> Option<(Option<&Arc<Region>>, &mut u64, &mut u64)> {
        if self.data == 0 { None } else { self.requests.iter_mut().find_map(Request::back) }
    }

    fn read_answers(&mut self, over: &mut impl FnMut(Event)) {
        let mut known = std::mem::take(&mut self.answers);
        let mut rest = known.as_slice();
        loop {
            let bytes = rest.get(..rest.len().min(self.data as usize)).unwrap_or_default();
            if let Some((Some(into), at, _)) = self.oldest_back() {
                // It was checked to lie inside when the read was submitted.
                let _ = into.write(*at, bytes);
            }
            self.advance_back(bytes.len() as u64);
            rest = rest.get(bytes.len()..).unwrap_or_default();
            let Some((answer, later)) = rest.split_first_chunk::<ANSWER>().filter(|_| self.data == 0) else { break };
            rest = later;
            let right = match Answer::decode(answer) {
                Ok(Answer::Done(number)) => self.done(number, over),
                Ok(Answer::Refused(number, why)) => self.refused(number, why),
                Ok(Answer::Data(len)) => self.begin_data(u64::from(len)),
                Err(_) => false,
            };
            if !right {
                // A peer that breaks the rules says nothing that can be relied on.
                self.state = State::Failed;
                return;
            }
        }
        let used = known.len() - rest.len();
        known.drain(..used);
        self.answers = known;
    }

    /// Bytes of the oldest read follow. It must have been sent, and have asked for so many.
    fn begin_data(&mut self, len: u64) -> bool {
        let left = self.requests.iter_mut().take(self.sent).find_map(Request::back).map(|(_, _, left)| *left);
        self.data = len;
        left.is_some_and(|left| len <= left)
    }

    fn refused(&mut self, number: u32, why: Refused) -> bool {
        let index = number.wrapping_sub(self.first) as usize;
        // The first bytes are enough to be refused.
        match self.requests.get_mut(index).filter(|_| index <= self.sent) {
            Some(request) => {
                if let Some((_, _, left)) = request.back() {
                    self.asked = self.asked.saturating_sub(*left);
                }
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
        if self.asked > 0 && self.requests.iter_mut().take(count).any(|request| request.back().is_some()) {
            // A read is over when all of its bytes have come.
            return false;
        }
        for request in self.requests.drain(..count).filter(|request| !request.is_told()) {
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

    /// Takes back the requests with this token of which nothing has been sent, and what its reads still bring, which nobody but this
    /// side writes. Returns how many are over by that.
    pub fn withdraw(&mut self, token: u64) -> usize {
        let begun = self.sent + usize::from(self.begun > 0);
        let (mut index, mut over, mut unasked) = (0, 0, 0);
        self.requests.retain_mut(|request| {
            index += 1;
            let (is_wanted, is_sent) = (request.token == token && !request.is_told(), index <= begun);
            if !is_wanted {
                return true;
            }
            match &mut request.payload {
                Payload::Back { into, left, .. } => {
                    // The bytes that were asked for come, and are thrown away.
                    *into = None;
                    unasked += if is_sent { 0 } else { *left };
                }
                Payload::Bytes(_) | Payload::Memory { .. } if is_sent => return true,
                Payload::Bytes(_) | Payload::Memory { .. } => {}
            }
            over += 1;
            is_sent
        });
        self.asked = self.asked.saturating_sub(unasked);
        over
    }

    /// The engine drops the link. What has not been sent never is. The other side says that it has read to the end by closing.
    pub fn part(&mut self, over: &mut impl FnMut(Event)) {
        let begun = self.sent + usize::from(self.begun > 0);
        for request in self.requests.drain(begun.min(self.requests.len())..) {
            let result = Err((NetworkError::Disconnected, false));
            over(Event::Completed { token: request.token, result });
        }
        // Nobody but this side writes what its reads bring: what still comes of them is thrown away.
        for request in &mut self.requests {
            if let Payload::Back { into, .. } = &mut request.payload
                && into.take().is_some()
            {
                let result = Err((NetworkError::Disconnected, false));
                over(Event::Completed { token: request.token, result });
            }
        }
        self.closing = Some(Instant::now());
        // Where there is nobody, nobody has to be told.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Nothing more is heard of it.
    pub fn end(self, may_land: MayLand, over: &mut impl FnMut(Event)) {
        for request in self.requests.into_iter().filter(|request| !request.is_told()) {
            let may_land = may_land && !matches!(request.payload, Payload::Back { .. });
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
