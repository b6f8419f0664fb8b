//! Streams to one peer, and what is under way on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Device, Stream};
use super::pages::{Lists, Pages};
use super::pop_if;
use super::ring::RingWriter;
use crate::error::Error;
use crate::region::Region;

/// Streams per peer: one copy's beginning hides behind another's end.
const LANES: usize = 2;
/// Words of pinned memory in which streams say how far they are.
const MARKS: usize = 4096;
/// From this length on, each of several pieces goes to the copy engine: it takes no multiprocessor, and its microseconds for
/// each copy do not count any more. Several shorter ones are copied by one kernel. A piece alone goes to the copy engine:
/// a kernel is not faster then.
const LARGE: u64 = 4 << 20;
/// Copies that wait for a stream follow each other in one order, up to so many bytes and writes: enough to hide what an order
/// costs, few enough that the first of them is not told much later than it could be.
const BATCH_BYTES: u64 = 64 << 20;
const BATCH_WRITES: usize = 64;
/// After so long without an end the stream is asked whether something is wrong.
const SUSPICION: Duration = Duration::from_millis(20);

/// Bytes to copy: addresses as this process's device sees them.
#[derive(Debug)]
pub(super) struct Stretch {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

impl Stretch {
    /// As the kernel reads it.
    pub fn to_bytes(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        for (into, word) in bytes.chunks_exact_mut(8).zip([self.src, self.dst, self.len]) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// How the end of some work shows.
enum Mark {
    /// The peer's immediate is in the ring: number of its slot, and what stands there then.
    Immediate(u64, u64),
    /// The stream's own word has reached this.
    Word(u64),
}

/// Work that a stream has taken.
pub(super) struct Flight {
    pub token: u64,
    pub rkey: u64,
    mark: Mark,
    list: Option<usize>,
    /// The copy engine has it.
    copying: bool,
    _src: Arc<Region>,
    since: Instant,
}

struct Lane {
    stream: Stream,
    flights: VecDeque<Flight>,
    marked: u64,
    /// Writes that the copy engine has.
    copying: usize,
}

/// The streams to one peer.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    next: usize,
    marks: Arc<Region>,
    lists: Lists,
    under_way: usize,
    /// For the copy engine, while every stream has something for it.
    held: VecDeque<Order>,
}

/// One order for the streams: addresses as this process's device sees them.
pub(super) struct Order {
    pub token: u64,
    pub rkey: u64,
    pub src: Arc<Region>,
    pub copies: Vec<Stretch>,
    pub imm: Option<u32>,
}

impl Order {
    fn bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.len).sum()
    }
}

impl Lane {
    /// Has the end of what was ordered shown.
    ///
    /// # Safety
    /// The ring and the mark are pinned until it has been seen.
    unsafe fn mark(
        &mut self,
        order: Order,
        list: Option<usize>,
        copying: bool,
        ring: &mut RingWriter,
        own: usize,
    ) -> Result<(), Error> {
        let (address, word, mark) = match order.imm {
            Some(imm) => {
                let (sequence, slot, word) = ring.reserve(imm);
                (slot, word, Mark::Immediate(sequence, word))
            }
            None => {
                self.marked += 1;
                (own, self.marked, Mark::Word(self.marked))
            }
        };
        let Order { token, rkey, src, .. } = order;
        self.copying += usize::from(copying);
        self.flights.push_back(Flight { token, rkey, mark, list, copying, _src: src, since: Instant::now() });
        // SAFETY: the caller promises that both are pinned, and words are aligned.
        unsafe { self.stream.store(address as u64, word) }
    }
}

impl Lanes {
    /// Makes the streams and pins what they write to.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let lane = |_| Ok(Lane { stream: device.stream()?, flights: VecDeque::new(), marked: 0, copying: 0 });
        let lanes = (0..LANES).map(lane).collect::<Result<Vec<_>, Error>>()?;
        let marks = Arc::new(Region::allocate(MARKS)?);
        let lists = Lists::new(device)?;
        // SAFETY: the region lives until `release`, which unpins it.
        unsafe { device.pin(marks.address(), MARKS)? };
        Ok(Self { lanes, next: 0, marks, lists, under_way: 0, held: VecDeque::new() })
    }

    /// Says whether another order can be taken.
    pub fn has_room(&self) -> bool {
        self.lists.has_room()
    }

    /// Orders that are not over, those that wait for a stream among them.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Orders that wait for a stream.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Where a stream says how far it is.
    fn own_mark(&self, index: usize) -> usize {
        self.marks.address() + index * 64
    }

    /// Orders copies, and after them the immediate, if there is one.
    ///
    /// # Safety
    /// All ranges stay valid and mapped until the order's end has been seen in `poll`; the ring is pinned until then.
    pub unsafe fn order(&mut self, order: Order, ring: &mut RingWriter, pages: &Pages) -> Result<(), Error> {
        let largest = order.copies.iter().map(|copy| copy.len).max().unwrap_or(0);
        if order.copies.len() == 1 || largest >= LARGE {
            self.held.push_back(order);
            self.under_way += 1;
            // SAFETY: as the caller promises, for this order and those before it.
            return unsafe { self.pump(ring) };
        }
        let (index, own) = (self.next, self.own_mark(self.next));
        self.next = (self.next + 1) % LANES;
        let Some(lane) = self.lanes.get_mut(index) else { return Ok(()) };
        // SAFETY: the caller promises valid ranges; the list is given back after the order's end only.
        let list = unsafe { pages.copy(&lane.stream, &order.copies, &mut self.lists)? };
        self.under_way += 1;
        // SAFETY: ring and marks are pinned.
        unsafe { lane.mark(order, list, false, ring, own) }
    }

    /// Hands what waits to streams that have nothing for the copy engine: several writes at a time.
    ///
    /// # Safety
    /// As for `order`.
    pub unsafe fn pump(&mut self, ring: &mut RingWriter) -> Result<(), Error> {
        while !self.held.is_empty() {
            let free = |index: &usize| self.lanes.get(*index).is_some_and(|lane| lane.copying == 0);
            let Some(index) = (0..LANES).map(|turn| (self.next + turn) % LANES).find(free) else { break };
            self.next = (index + 1) % LANES;
            let (own, mut bytes, mut count) = (self.own_mark(index), 0, 0);
            for order in self.held.iter().take(BATCH_WRITES) {
                bytes += order.bytes();
                if count > 0 && bytes > BATCH_BYTES {
                    break;
                }
                count += 1;
            }
            let copies: Vec<_> = self.held.iter().take(count).flat_map(|order| &order.copies).collect();
            let Some(lane) = self.lanes.get_mut(index) else { break };
            // SAFETY: the caller promises valid ranges.
            unsafe { lane.stream.copy_all(&copies)? };
            for _ in 0..count {
                let Some(order) = self.held.pop_front() else { break };
                // SAFETY: ring and marks are pinned.
                unsafe { lane.mark(order, None, true, ring, own)? };
            }
        }
        Ok(())
    }

    /// Hands out what has ended.
    pub fn poll(&mut self, ring: &RingWriter, mut ended: impl FnMut(Flight)) -> Result<(), Error> {
        if self.under_way == 0 {
            return Ok(());
        }
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            let Some(oldest) = lane.flights.front() else { continue };
            let word = self.marks.load_word(index as u64 * 64)?;
            let is_over = |flight: &Flight| match flight.mark {
                Mark::Immediate(sequence, word) => ring.is_stored(sequence, word),
                Mark::Word(at) => word >= at,
            };
            if !is_over(oldest) {
                // An error of the device would otherwise never show.
                if oldest.since.elapsed() > SUSPICION {
                    lane.stream.is_idle()?;
                }
                continue;
            }
            while let Some(flight) = pop_if(&mut lane.flights, |flight| is_over(flight)) {
                self.under_way -= 1;
                lane.copying -= usize::from(flight.copying);
                self.lists.give_back(flight.list);
                ended(flight);
            }
        }
        Ok(())
    }

    /// Takes back what no stream has.
    pub fn take_held(&mut self) -> VecDeque<Order> {
        self.under_way -= self.held.len();
        std::mem::take(&mut self.held)
    }

    /// The device has failed: hands out the tokens of everything.
    pub fn abandon(&mut self, mut ended: impl FnMut(u64)) {
        self.under_way = 0;
        self.held.drain(..).for_each(|order| ended(order.token));
        for lane in &mut self.lanes {
            lane.copying = 0;
            lane.flights.drain(..).for_each(|flight| ended(flight.token));
        }
    }

    /// Unpins. Nothing is under way any more.
    pub fn release(self, device: &Device) {
        drop(self.lanes);
        // A failure has nobody left to go to.
        let _ = device.unpin(self.marks.address());
        self.lists.release(device);
    }
}
