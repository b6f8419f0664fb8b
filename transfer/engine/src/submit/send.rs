//! Messages, as callers see them.

use crate::counters::callbacks::Side;
use crate::counters::completion::{Done, TransferId};
use crate::engine::running::Engine;
use crate::error::Error;
use crate::peers::doors::Doors;
use crate::peers::pools::{RecvCallback, RecvOptions};
use crate::submit::arguments::Options;
use crate::wire::descriptor::NetAddr;
use crate::worker::command::Command;

/// Longest message in bytes: it is copied when it is submitted.
const MAX_MESSAGE: usize = 256 << 20;

impl Engine {
    /// Sends a message to an engine's receive pool 0, over the first NIC of a device group. The bytes are copied before this returns. It is over when the
    /// receiver has all of it in a buffer; while it has none free, the message is tried again until the deadline. A message that
    /// is longer than a frame travels in several, once the receiver has a buffer for it.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network or a message longer than [`Engine::max_message`]; [`Error::Closed`].
    pub fn submit_send(&self, to: &NetAddr, bytes: &[u8], options: &Options, done: Done) -> Result<TransferId, Error> {
        self.submit_send_to(to, 0, bytes, options, done)
    }

    /// Sends a message to one of an engine's receive pools, as [`Engine::submit_send`] does.
    ///
    /// # Errors
    /// As for that.
    pub fn submit_send_to(
        &self,
        to: &NetAddr,
        pool: u32,
        bytes: &[u8],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.group(0)?;
        let (group, to) = self.route_to("to", to, options.device_group)?;
        if bytes.len() > MAX_MESSAGE {
            let problem = format!("{} bytes came; at most {MAX_MESSAGE} are allowed", bytes.len());
            return Err(Error::argument("bytes", problem));
        }
        if options.nic.is_some_and(|nic| nic != 0) {
            return Err(Error::argument("nic", "a message uses the first NIC, 0"));
        }
        let (to, bytes) = (to.clone(), bytes.to_vec());
        let (stamp, done) = (Doors::now(), (done, options.deadline));
        let make = |id, done, deadline| Command::Message { id, to, pool, bytes, done, deadline, stamp };
        self.submit(group, done, make)
    }

    /// Longest message of `submit_send` in bytes. What a receiver takes is as long as the buffers of its pool.
    pub fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    /// Provides `count` rotating buffers of `len` bytes for messages to pool 0, as [`Engine::submit_recvs_to`] does.
    ///
    /// # Errors
    /// As for that.
    pub fn submit_recvs(
        &self,
        len: usize,
        count: usize,
        callback: impl FnMut(&NetAddr, &[u8]) + Send + 'static,
    ) -> Result<(), Error> {
        self.submit_recvs_to(len, count, &RecvOptions::default(), callback)
    }

    /// Provides `count` rotating buffers of `len` bytes for messages to a pool. The callback gets the sender's address and a message
    /// of its true length, one message after the other, on a callback thread; when it returns, the buffer is free for the next
    /// one. Buffers of several lengths may be provided for one pool, each with its callback: a message takes the shortest free
    /// one that it fits into.
    ///
    /// # Errors
    /// [`Error::Argument`] for a length, a count or a limit of 0; [`Error::Closed`].
    pub fn submit_recvs_to(
        &self,
        len: usize,
        count: usize,
        options: &RecvOptions,
        callback: impl FnMut(&NetAddr, &[u8]) + Send + 'static,
    ) -> Result<(), Error> {
        self.receive((len, count), options, Side::Own, Box::new(callback))
    }

    pub(crate) fn receive(
        &self,
        size: (usize, usize),
        options: &RecvOptions,
        side: Side,
        callback: RecvCallback,
    ) -> Result<(), Error> {
        self.group(0)?;
        self.inner.shared.pools.add(size, options, side, callback)
    }
}
