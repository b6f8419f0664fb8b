//! The rotating buffers of `submit_recvs`: each message takes one until its callback has returned.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::counters::callbacks::{Job, Jobs, Next, Side, guarded};
use crate::counters::jobs::Turns;
use crate::counters::metrics::Metrics;
use crate::error::Error;
use crate::peers::message::Rejection;
use crate::wire::descriptor::NetAddr;

/// Longer buffers are made when a message needs one, as long as the message, and given back behind it: most messages are short.
const LONGEST_KEPT: usize = 64 << 10;

pub(crate) type RecvCallback = Box<dyn FnMut(&NetAddr, &[u8]) + Send>;

/// Options of receives.
#[derive(Debug, Clone, Copy, Default)]
pub struct RecvOptions {
    /// The number that senders name.
    pub pool: u32,
    /// How many buffers one engine's messages may hold at a time. Three quarters of them, rounded up, if None.
    pub per_peer: Option<usize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Buffers {
    free: Vec<Vec<u8>>,
    /// How many each engine holds.
    held: HashMap<u64, usize>,
}

/// Buffers of one length, with the callback that borrows them.
pub(crate) struct RecvPool {
    /// Longest message in bytes.
    len: usize,
    per_peer: usize,
    side: Side,
    buffers: Mutex<Buffers>,
    callback: Mutex<RecvCallback>,
    turns: Turns<(NetAddr, Vec<u8>)>,
}

impl RecvPool {
    /// Takes a free buffer for a message of an engine, which has so many bytes. None: all are held, or as many of them as one engine may
    /// hold, or there is no memory.
    fn take(&self, len: u64, engine: u64) -> Option<Vec<u8>> {
        let mut buffers = lock(&self.buffers);
        let held = buffers.held.get(&engine).copied().unwrap_or(0);
        if held >= self.per_peer {
            return None;
        }
        let buffer = buffers.free.pop_if(|buffer| buffer.try_reserve_exact(len as usize).is_ok())?;
        buffers.held.insert(engine, held + 1);
        Some(buffer)
    }

    pub fn give_back(&self, engine: u64, mut buffer: Vec<u8>) {
        buffer.clear();
        if self.len > LONGEST_KEPT {
            buffer = Vec::new();
        }
        let mut buffers = lock(&self.buffers);
        buffers.free.push(buffer);
        if let Some(held) = buffers.held.get_mut(&engine) {
            *held -= 1;
            if *held == 0 {
                buffers.held.remove(&engine);
            }
        }
    }

    /// Has the callback called with a message. Refused only by an engine that is closing, which is no place for one to arrive.
    pub fn deliver(self: &Arc<Self>, from: NetAddr, buffer: Vec<u8>, jobs: &Jobs) -> bool {
        !self.turns.push((from, buffer)) || jobs.push(self.side, Job::Next(Arc::clone(self) as Arc<dyn Next>)).is_ok()
    }
}

impl Next for RecvPool {
    fn side(&self) -> Side {
        self.side
    }

    fn step(&self, metrics: &Metrics) -> bool {
        self.turns.take(|(from, buffer)| {
            guarded(metrics, || lock(&self.callback)(&from, &buffer));
            self.give_back(from.key().engine, buffer);
        })
    }
}

/// All pools of an engine, by number. Those of one number are ordered by the length of their buffers.
#[derive(Default)]
pub(crate) struct Pools(Mutex<HashMap<u32, Vec<Arc<RecvPool>>>>);

impl Pools {
    pub fn add(
        &self,
        (len, count): (usize, usize),
        options: &RecvOptions,
        side: Side,
        callback: RecvCallback,
    ) -> Result<(), Error> {
        let per_peer = options.per_peer.unwrap_or(count - count / 4);
        for (argument, value) in [("len", len), ("count", count), ("per_peer", per_peer)] {
            if value == 0 {
                return Err(Error::argument(argument, "0 came; at least 1 is needed"));
            }
        }
        let kept = if len > LONGEST_KEPT { 0 } else { len };
        let free = (0..count).map(|_| Vec::with_capacity(kept)).collect();
        let buffers = Mutex::new(Buffers { free, held: HashMap::new() });
        let pool = RecvPool { len, per_peer, side, buffers, callback: Mutex::new(callback), turns: Turns::default() };
        let mut pools = lock(&self.0);
        let same = pools.entry(options.pool).or_default();
        let at = same.partition_point(|other| other.len <= len);
        same.insert(at, Arc::new(pool));
        Ok(())
    }

    /// Ends a pool: messages to it are refused from now on. Those that have buffers are still delivered.
    pub fn end(&self, pool: u32) {
        let ended = lock(&self.0).remove(&pool);
        drop(ended); // callbacks may refer to anything, so they go when the lock is free
    }

    /// A buffer for a message of so many bytes: the shortest that is free.
    pub fn take(&self, pool: u32, len: u64, engine: u64) -> Result<(Arc<RecvPool>, Vec<u8>), Rejection> {
        let pools = lock(&self.0);
        let same = pools.get(&pool).ok_or(Rejection::NoReceives)?;
        let longest = same.last().map_or(0, |pool| pool.len as u64);
        if len > longest {
            return Err(Rejection::TooLong { allowed: longest });
        }
        let mut fitting = same.iter().filter(|pool| len <= pool.len as u64);
        let taken = fitting.find_map(|pool| pool.take(len, engine).map(|buffer| (Arc::clone(pool), buffer)));
        taken.ok_or(Rejection::Exhausted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools(lens: &[usize]) -> Pools {
        let pools = Pools::default();
        for len in lens {
            pools.add((*len, 2), &RecvOptions::default(), Side::Own, Box::new(|_, _| {})).unwrap();
        }
        pools
    }

    #[test]
    fn a_pool_that_has_ended_takes_no_message_and_keeps_no_buffer() {
        let pools = pools(&[100]);
        let (pool, buffer) = pools.take(0, 10, 7).unwrap();
        let kept = Arc::downgrade(&pool);
        pools.end(0);
        assert!(matches!(pools.take(0, 10, 7), Err(Rejection::NoReceives)));
        pool.give_back(7, buffer);
        drop(pool);
        assert!(kept.upgrade().is_none());
    }

    #[test]
    fn a_long_buffer_is_made_for_its_message_and_given_back_behind_it() {
        let pools = pools(&[100, LONGEST_KEPT + 100]);
        let len = LONGEST_KEPT + 1;
        for _ in 0..3 {
            let (pool, buffer) = pools.take(0, len as u64, 7).unwrap();
            assert!(buffer.is_empty() && (len..=pool.len).contains(&buffer.capacity()));
            pool.give_back(7, buffer);
            let kept: usize = lock(&pool.buffers).free.iter().map(Vec::capacity).sum();
            assert_eq!((kept, lock(&pool.buffers).free.len()), (0, 2));
        }
        let (short, buffer) = pools.take(0, 100, 7).unwrap();
        assert_eq!(buffer.capacity(), 100);
        short.give_back(7, buffer);
        assert_eq!(lock(&short.buffers).free.iter().map(Vec::capacity).sum::<usize>(), 200);
    }
}
