//! The words that two processes of one host share, and the order in which they change. No word is a lock: whoever dies leaves nothing
//! behind that anybody waits for.
//!
//! | word | writer | counts |
//! | --- | --- | --- |
//! | number of a slot | the posting side | which request of the link the slot holds, from 1 on |
//! | head | the target; either side ends it | requests that were carried out; the top bit says that the link has ended |
//! | asleep | its owner sets it, whoever wakes the owner clears it | 1 while its owner sleeps |

use crate::sys::sync::{AtomicU64, Ordering, fence};

/// In a head: nothing more is carried out, for ever.
const ENDED: u64 = 1 << 63;

/// Makes a slot visible that holds request `number` (from 0 on).
pub fn publish(slot: &AtomicU64, number: u64) {
    slot.store(number + 1, Ordering::Release);
}

/// Says whether a slot holds request `number`. Then all else in the slot, and what it points to, is there.
pub fn is_published(slot: &AtomicU64, number: u64) -> bool {
    slot.load(Ordering::Acquire) == number + 1
}

/// Counts further requests as carried out. False: the link has ended, and they do not count.
pub fn commit(head: &AtomicU64, done: u64, more: u64) -> bool {
    head.compare_exchange(done, done + more, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// Ends a link. Nothing is committed from now on. Returns how many requests were carried out.
pub fn end(head: &AtomicU64) -> u64 {
    head.fetch_or(ENDED, Ordering::AcqRel) & !ENDED
}

/// How many requests were carried out, and whether the link has ended.
pub fn look(head: &AtomicU64) -> (u64, bool) {
    let head = head.load(Ordering::Acquire);
    (head & !ENDED, head & ENDED != 0)
}

/// Says that its owner is about to sleep. After all such words are set and `lie_down` was called, the owner looks once more.
pub fn announce_sleep(asleep: &AtomicU64) {
    asleep.store(1, Ordering::Relaxed);
}

/// Orders the announcements before the last look.
pub fn lie_down() {
    fence(Ordering::SeqCst);
}

/// The owner is awake.
pub fn rise(asleep: &AtomicU64) {
    asleep.store(0, Ordering::Relaxed);
}

/// Says whether the owner has to be woken, after something was published or committed for it. One of those who ask learns it.
pub fn must_wake(asleep: &AtomicU64) -> bool {
    fence(Ordering::SeqCst);
    asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0
}
