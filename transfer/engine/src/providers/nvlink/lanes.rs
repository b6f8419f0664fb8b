//! Streams to one peer, and what is under way on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Device, Stream};
use super::pages::{Lists, Pages};
use super::pop_if;
use super::ring::RingWriter;
use super::write::Stretch;
use crate::error::Error;
use crate::memory::region::Region;

/// Streams per peer: one copy's beginning hides behind another's end.
const LANES: usize = 2;
/// Words of pinned memory in which streams say how far they are.
const MARKS: usize = 4096;
/// From this length on, each of several pieces goes to the copy engine: it takes no multiprocessor, and its microseconds for
/// each copy do not count any more. Several shorter ones are copied by one kernel. A piece alone goes to the copy engine:
/// a kernel is not faster then.
const LARGE: u64 = 4 << 20;
/// After so long without an end the stream is asked whether something is wrong.
const SUSPICION: Duration = Duration::from_millis(20);

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
    _src: Arc<Region>,
    since: Instant,
}

struct Lane {
    stream: Stream,
    flights: VecDeque<Flight>,
    marked: u64,
}

/// The streams to one peer.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    next: usize,
    marks: Arc<Region>,
    lists: Lists,
    under_way: usize,
}

/// One order for the streams.
pub(super) struct Order<'a> {
    pub token: u64,
    pub rkey: u64,
    pub src: &'a Arc<Region>,
    pub copies: &'a [Stretch],
    pub imm: Option<u32>,
}

impl Lanes {
    /// Makes the streams and pins what they write to.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let lane = |_| Ok(Lane { stream: device.stream()?, flights: VecDeque::new(), marked: 0 });
        let lanes = (0..LANES).map(lane).collect::<Result<Vec<_>, Error>>()?;
        let marks = Arc::new(Region::allocate(MARKS)?);
        let lists = Lists::new(device)?;
        // SAFETY: the region lives until `release`, which unpins it.
        unsafe { device.pin(marks.address(), MARKS)? };
        Ok(Self { lanes, next: 0, marks, lists, under_way: 0 })
    }

    /// Says whether another order can be taken.
    pub fn has_room(&self) -> bool {
        self.lists.has_room()
    }

    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Orders copies, and after them the immediate, if there is one.
    ///
    /// # Safety
    /// All ranges stay valid and mapped until the order's end has been seen in `poll`; the ring is pinned until then.
    pub unsafe fn order(&mut self, order: &Order<'_>, ring: &mut RingWriter, pages: &Pages) -> Result<(), Error> {
        let index = self.next;
        self.next = (self.next + 1) % LANES;
        let address = self.marks.address() + index * 64;
        let Some(lane) = self.lanes.get_mut(index) else { return Ok(()) };
        let largest = order.copies.iter().map(|copy| copy.len).max().unwrap_or(0);
        let mut list = None;
        if order.copies.len() > 1 && largest < LARGE {
            // SAFETY: the caller promises valid ranges; the list is given back after the order's end only.
            list = unsafe { pages.copy(&lane.stream, order.copies, &mut self.lists)? };
        } else {
            for copy in order.copies {
                // SAFETY: the caller promises valid ranges.
                unsafe { lane.stream.copy(copy.dst, copy.src, copy.len)? };
            }
        }
        let (address, word, mark) = match order.imm {
            Some(imm) => {
                let (sequence, slot, word) = ring.reserve(imm);
                (slot, word, Mark::Immediate(sequence, word))
            }
            None => {
                lane.marked += 1;
                (address, lane.marked, Mark::Word(lane.marked))
            }
        };
        let (token, rkey, src) = (order.token, order.rkey, Arc::clone(order.src));
        lane.flights.push_back(Flight { token, rkey, mark, list, _src: src, since: Instant::now() });
        self.under_way += 1;
        // SAFETY: ring and marks are pinned, and words are aligned.
        unsafe { lane.stream.store(address as u64, word) }
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
                self.lists.give_back(flight.list);
                ended(flight);
            }
        }
        Ok(())
    }

    /// The device has failed: hands out everything.
    pub fn abandon(&mut self, ended: impl FnMut(Flight)) {
        self.under_way = 0;
        self.lanes.iter_mut().flat_map(|lane| lane.flights.drain(..)).for_each(ended);
    }

    /// Unpins. Nothing is under way any more.
    pub fn release(self, device: &Device) {
        drop(self.lanes);
        // A failure has nobody left to go to.
        let _ = device.unpin(self.marks.address());
        self.lists.release(device);
    }
}
