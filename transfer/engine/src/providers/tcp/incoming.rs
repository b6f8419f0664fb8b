//! A connection over which a peer writes and reads here. Payloads go from the socket into the region without a copy between, apart from what
//! came with the head. So once a connection is closed, or a region's registration has ended, nothing lands any more: there is
//! nobody but this thread who could write.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::frame::{Answer, GREETING, HEAD, Head, Kind, Refused, read_greeting};
use super::sys::{Part, Room, is_patient, receive, send};
use crate::memory::region::Region;
use crate::providers::interface::{Event, Link, MAX_GREETING};

/// Bytes that are read ahead of what is known of them.
const AHEAD: usize = 16 << 10;
/// Bytes that one look takes from a connection, so that no peer keeps the others waiting.
const SIP: usize = 2 << 20;
/// Bytes of a read that are announced at a time. When a registration ends, what was announced is filled up with zeros.
const STRETCH: usize = 256 << 10;
static ZEROS: [u8; STRETCH] = [0; STRETCH];
/// Refusals that may wait to be sent. Who asks for more does not read the answers.
const MAX_REFUSALS: usize = 4096;
/// Messages that one stranger has over one connection. Whoever needs more comes back.
const MAX_GREETINGS: u32 = 64;
/// Bytes of what a stranger says, and of what waits to be answered.
const MAX_WAITING: usize = 4 * (MAX_GREETING + 2);

/// A writer's request to the memory that is registered here.
pub(super) trait Memory {
    fn find(&self, rkey: u64) -> Option<&Arc<Region>>;
}

/// The owner of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// It has not said so yet.
    Unknown,
    /// Somebody who is not a peer. It leads back to him.
    Way,
    /// It presents a pass that stands for nothing, so far.
    Waiting(u64),
    Peer(Link),
}

/// Where the payload of the present request goes.
enum Sink {
    Message(Vec<u8>),
    Region {
        region: Arc<Region>,
        rkey: u64,
        at: u64,
    },
    /// It was refused.
    Nowhere,
}

struct Present {
    sink: Sink,
    left: usize,
    imm: Option<u32>,
}

/// The part of a region that the peer is being sent.
struct Serving {
    /// None: its registration has ended, and the rest of what was announced is zeros.
    region: Option<Arc<Region>>,
    rkey: u64,
    at: u64,
    left: u64,
    /// So many bytes were announced and have not been sent.
    announced: u64,
}

pub(super) struct Incoming {
    pub socket: TcpStream,
    pub admission: Admission,
    pub since: Instant,
    /// It has the last file that this process may open.
    pub on_spare: bool,
    pub closed: bool,
    pub max_message: usize,
    /// Bytes that were read ahead: `start..end` of them are not used yet.
    ahead: Vec<u8>,
    start: usize,
    present: Option<Present>,
    /// The present request is a read: until it is over, nothing more is taken.
    serving: Option<Serving>,
    /// Requests that are over, and as many of them as the writer knows of.
    over: u32,
    told: u32,
    refusals: VecDeque<(u32, Refused)>,
    /// Answers that the socket had no room for.
    unsent: Vec<u8>,
    /// A stranger's words.
    greetings: u32,
}

impl Incoming {
    pub fn new(socket: TcpStream, max_message: usize) -> Self {
        Self {
            socket,
            admission: Admission::Unknown,
            since: Instant::now(),
            on_spare: false,
            closed: false,
            max_message,
            ahead: Vec::new(),
            start: 0,
            present: None,
            serving: None,
            over: 0,
            told: 0,
            refusals: VecDeque::new(),
            unsent: Vec::new(),
            greetings: 0,
        }
    }

    pub fn is_stranger(&self) -> bool {
        !matches!(self.admission, Admission::Peer(_))
    }

    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Says whether a read waits for room in the socket.
    pub fn is_serving(&self) -> bool {
        self.serving.is_some() && !self.closed
    }

    fn known(&self) -> usize {
        self.ahead.len() - self.start
    }

    /// Reads more: the present payload where it belongs, and what follows it ahead. False: there is nothing more now.
    fn fill(&mut self) -> bool {
        if self.start > 0 {
            self.ahead.drain(..std::mem::take(&mut self.start));
        }
        let known = self.ahead.len();
        let most = if self.is_stranger() { MAX_WAITING } else { AHEAD };
        if known >= most {
            return false;
        }
        self.drop_moved_sink();
        let direct = match &self.present {
            // The known part comes first.
            Some(Present { sink: Sink::Region { region, at, .. }, left, .. }) if known == 0 => {
                Room::region(region, *at, *left as u64)
            }
            _ => Room::none(),
        };
        self.ahead.resize(most, 0);
        let rest = self.ahead.get_mut(known..).unwrap_or_default();
        let got = receive(&self.socket, &[direct, Room::bytes(rest)]);
        let mut got = match got {
            Ok(0) => {
                self.closed = true;
                0
            }
            Ok(got) => got,
            // The memory is not there or not writable any more.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) && self.lose_sink() => {
                self.ahead.truncate(known);
                return true;
            }
            Err(error) => {
                self.closed = !is_patient(&error);
                0
            }
        };
        let more = got > 0;
        if let Some(Present { sink: Sink::Region { at, .. }, left, .. }) = &mut self.present
            && known == 0
        {
            let direct = got.min(*left);
            *at += direct as u64;
            *left -= direct;
            got -= direct;
        }
        self.ahead.truncate(known + got);
        more
    }

    /// The kernel could not write where the present payload goes: says whether it goes nowhere from now on.
    fn lose_sink(&mut self) -> bool {
        let Some(Present { sink: Sink::Region { region, at, .. }, left, .. }) = &self.present else { return false };
        region.check_fault(*at, *left as u64) && self.drop_moved_sink()
    }

    /// The rest of the present payload goes nowhere if its memory is not what was registered.
    fn drop_moved_sink(&mut self) -> bool {
        match &self.present {
            Some(Present { sink: Sink::Region { region, rkey, .. }, .. }) if !region.is_here() => {
                let rkey = *rkey;
                self.revoke(rkey);
                true
            }
            _ => false,
        }
    }

    /// Takes the greeting. None: it has not all come yet.
    pub fn greet(&mut self) -> Option<u64> {
        if self.known() < GREETING {
            self.fill();
        }
        let bytes = self.ahead.get(self.start..self.start + GREETING)?;
        match read_greeting(bytes) {
            Ok(pass) => {
                self.start += GREETING;
                Some(pass)
            }
            Err(_) => {
                self.closed = true;
                None
            }
        }
    }

    /// A stranger's words: messages of bounded length, each after its length.
    pub fn listen(&mut self, way: Link, events: &mut Vec<Event>) {
        // Once: if there is more, the socket is ready again.
        self.fill();
        while let Some(len) = self.ahead.get(self.start..self.start + 2) {
            let len = usize::from(u16::from_le_bytes(len.try_into().unwrap_or_default()));
            if len > MAX_GREETING {
                self.closed = true;
                return;
            }
            let Some(bytes) = self.ahead.get(self.start + 2..self.start + 2 + len) else { return };
            events.push(Event::Greeted { way, bytes: bytes.to_vec() });
            self.start += 2 + len;
            self.greetings += 1;
            if self.greetings >= MAX_GREETINGS {
                self.closed = true;
                return;
            }
        }
    }

    /// Answers a stranger. False: he does not read.
    pub fn answer(&mut self, bytes: &[u8]) -> bool {
        if self.unsent.len() > MAX_WAITING {
            return false;
        }
        self.unsent.extend((bytes.len() as u16).to_le_bytes());
        self.unsent.extend_from_slice(bytes);
        self.flush();
        true
    }

    /// Carries out what the peer asks for. Says whether anything has come.
    pub fn receive(&mut self, link: Link, memory: &impl Memory, events: &mut Vec<Event>) -> bool {
        let (mut taken, mut came) = (0, false);
        while !self.closed && self.serving.is_none() && taken < SIP {
            let before = self.present.as_ref().map_or(0, |present| present.left);
            let more = self.fill();
            came |= more;
            taken += before.saturating_sub(self.present.as_ref().map_or(0, |present| present.left)) + self.known();
            while self.step(link, memory, events) || self.serve() {}
            if !more {
                break;
            }
        }
        self.tell();
        came
    }

    /// Sends what the peer reads, as far as it goes. True: a read is over.
    pub fn serve(&mut self) -> bool {
        let mut sent = 0;
        while let Some(serving) = self.serving.as_mut().filter(|_| !self.closed && sent < SIP) {
            if serving.announced == 0 {
                let ended = serving.region.is_none();
                if ended || serving.left == 0 {
                    if ended {
                        self.refusals.push_back((self.over, Refused::BadKey));
                    }
                    self.serving = None;
                    self.over = self.over.wrapping_add(1);
                    return true;
                }
                serving.announced = serving.left.min(STRETCH as u64);
                // The peer takes them for the oldest read of which it has not heard the end.
                for (number, why) in self.refusals.drain(..) {
                    self.unsent.extend(Answer::Refused(number, why).encode());
                }
                self.unsent.extend(Answer::Data(serving.announced as u32).encode());
            }
            let bytes = match &serving.region {
                Some(region) => Part::region(region, serving.at, serving.announced),
                None => Part::bytes(ZEROS.get(..serving.announced as usize).unwrap_or(&ZEROS)),
            };
            match send(&self.socket, &[Part::bytes(&self.unsent), bytes]) {
                Ok(count) => {
                    sent += count;
                    let answers = count.min(self.unsent.len());
                    self.unsent.drain(..answers);
                    let count = (count - answers) as u64;
                    serving.at += count;
                    serving.announced -= count;
                    serving.left -= count;
                }
                Err(error) if is_patient(&error) => return false,
                // The announced bytes are filled up, and the read is refused.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && serving.region.is_some() => {
                    serving.region.take().iter().for_each(|region| region.lose("is not there any more"));
                }
                Err(_) => self.closed = true,
            }
        }
        false
    }

    /// Uses what is known. False: more is needed.
    fn step(&mut self, link: Link, memory: &impl Memory, events: &mut Vec<Event>) -> bool {
        if self.serving.is_some() {
            return false;
        }
        let known = self.ahead.get(self.start..).unwrap_or_default();
        let Some(present) = &mut self.present else {
            let Some(head) = known.get(..HEAD) else { return false };
            let head = Head::decode(head);
            self.start += HEAD;
            match head {
                Ok(head) => self.begin(head, memory),
                Err(_) => self.closed = true,
            }
            return !self.closed;
        };
        let (count, mut refused) = (present.left.min(known.len()), false);
        let bytes = known.get(..count).unwrap_or_default();
        match &mut present.sink {
            Sink::Message(message) => message.extend_from_slice(bytes),
            Sink::Region { region, at, .. } => {
                // It was checked to lie inside, but may not be what was registered any more.
                if region.write(*at, bytes).is_err() {
                    refused = true;
                }
                *at += count as u64;
            }
            Sink::Nowhere => {}
        }
        if refused {
            present.sink = Sink::Nowhere;
            present.imm = None;
            self.refusals.push_back((self.over, Refused::BadKey));
        }
        present.left -= count;
        self.start += count;
        if present.left > 0 {
            return false;
        }
        if let Some(Present { sink, imm, .. }) = self.present.take() {
            match sink {
                Sink::Message(bytes) => events.push(Event::Received { link, bytes }),
                Sink::Region { .. } => events.extend(imm.map(|imm| Event::Immediate { link, imm })),
                Sink::Nowhere => {}
            }
        }
        self.over = self.over.wrapping_add(1);
        true
    }

    fn begin(&mut self, head: Head, memory: &impl Memory) {
        let Ok(left) = usize::try_from(head.len) else {
            self.closed = true;
            return;
        };
        let (sink, imm) = match head.kind {
            Kind::Message if left > self.max_message => {
                self.closed = true;
                return;
            }
            Kind::Message => (Sink::Message(Vec::with_capacity(left)), None),
            Kind::Write { rkey, dst, imm } => match memory.find(rkey) {
                Some(region) if !region.takes_writes() => (self.refuse(Refused::BadKey), None),
                None => (self.refuse(Refused::BadKey), None),
                Some(region) if !region.contains(dst, head.len) => (self.refuse(Refused::OutOfBounds), None),
                Some(region) => (Sink::Region { region: Arc::clone(region), rkey, at: dst }, imm),
            },
            Kind::Read { rkey, from } => match memory.find(rkey) {
                Some(region) if !region.is_here() => return self.present_refused(Refused::BadKey),
                None => return self.present_refused(Refused::BadKey),
                Some(region) if !region.contains(from, head.len) => return self.present_refused(Refused::OutOfBounds),
                Some(region) => {
                    let region = Some(Arc::clone(region));
                    self.serving = Some(Serving { region, rkey, at: from, left: head.len, announced: 0 });
                    return;
                }
            },
        };
        self.present = Some(Present { sink, left, imm });
    }

    /// Refuses a read, which has no payload.
    fn present_refused(&mut self, why: Refused) {
        let sink = self.refuse(why);
        self.present = Some(Present { sink, left: 0, imm: None });
    }

    fn refuse(&mut self, why: Refused) -> Sink {
        self.refusals.push_back((self.over, why));
        self.closed |= self.refusals.len() > MAX_REFUSALS;
        Sink::Nowhere
    }

    /// The registration of a key ends: what is half done is refused.
    pub fn revoke(&mut self, key: u64) {
        if let Some(Present { sink, imm, .. }) = &mut self.present
            && matches!(sink, Sink::Region { rkey, .. } if *rkey == key)
        {
            *sink = Sink::Nowhere;
            *imm = None;
            self.refusals.push_back((self.over, Refused::BadKey));
        }
        if let Some(serving) = self.serving.as_mut().filter(|serving| serving.rkey == key) {
            serving.region = None;
        }
    }

    /// Tells the writer what became of its requests.
    pub fn tell(&mut self) {
        if !self.unsent.is_empty() {
            self.flush();
        }
        let announced = self.serving.as_ref().is_some_and(|serving| serving.announced > 0);
        if announced || !self.unsent.is_empty() || (self.told == self.over && self.refusals.is_empty()) {
            return;
        }
        for (number, why) in self.refusals.drain(..) {
            self.unsent.extend(Answer::Refused(number, why).encode());
        }
        if self.told != self.over {
            self.unsent.extend(Answer::Done(self.over).encode());
            self.told = self.over;
        }
        self.flush();
    }

    fn flush(&mut self) {
        // Also to one that will say nothing more.
        while !self.unsent.is_empty() {
            match send(&self.socket, &[Part::bytes(&self.unsent)]) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if is_patient(&error) => return,
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }
}
