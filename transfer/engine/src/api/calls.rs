//! The engine's calls. Those that begin a transfer build a [`Request`].

use std::time::Duration;

use crate::counters::callbacks::{Repeated, Side, WatchCallback, check_wait};
use crate::counters::completion::{Done, TransferFuture, TransferId};
use crate::engine::handle::MrHandle;
use crate::engine::running::Engine;
use crate::engine::watcher::UvmWatcher;
use crate::error::Error;
use crate::memory::region::WORD_PAGE;
use crate::peers::pools::{RecvCallback, RecvOptions};
use crate::submit::arguments::{Grid, Options, PeerGroup, ScatterDst};
use crate::submit::expect::EXPECTATIONS;
use crate::submit::prepared::{Part, Prepared, ReadItem, ScatterTemplate, WriteItem};
use crate::submit::request::{EVERYWHERE, MAX_MESSAGE, Request};
use crate::wire::descriptor::{MrDesc, NetAddr};
use crate::worker::command::Command;

impl Engine {
    /// Writes `len` bytes from `src` to `dst`, each a region and an offset in bytes. With an immediate, the target's counter
    /// grows by one after all bytes have landed.
    ///
    /// # Errors
    /// [`Error::Argument`] for ranges outside their regions, other numbers of NICs or another network; [`Error::Closed`].
    pub fn submit_single_write(
        &self,
        len: u64,
        imm: Option<u32>,
        src: (&MrHandle, u64),
        dst: (&MrDesc, u64),
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Single { len, imm, src, dst }, options, done)
    }

    /// Writes pages of `page_len` bytes: page `i` of `src` to page `i` of `dst`. With an immediate, the target's counter grows
    /// by one after all pages have landed, however many they are.
    ///
    /// # Errors
    /// As for [`Engine::submit_single_write`], and if the two sides name different numbers of pages.
    pub fn submit_paged_writes<'a>(
        &self,
        page_len: u64,
        imm: Option<u32>,
        src: (&MrHandle, impl Into<Grid<'a>>),
        dst: (&MrDesc, impl Into<Grid<'a>>),
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_prepared(&self.prepare_paged_writes(page_len, src, dst, options.into())?, imm, options, done)
    }

    /// Writes many ranges between any regions as one operation: [`Engine::prepare_writes`] and [`Engine::submit_prepared`].
    ///
    /// # Errors
    /// As for those.
    pub fn submit_writes(
        &self,
        imm: Option<u32>,
        items: &[WriteItem<'_>],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_prepared(&self.prepare_writes(items, options.into())?, imm, options, done)
    }

    /// Writes parts of `src` to many destinations. With an immediate, each destination's counter grows by one after its own
    /// bytes have landed. A destination that fails does not hold the others up.
    ///
    /// # Errors
    /// As for [`Engine::submit_single_write`], and if a destination is not in the group.
    pub fn submit_scatter(
        &self,
        group: Option<&PeerGroup>,
        imm: Option<u32>,
        src: &MrHandle,
        dsts: &[ScatterDst<'_>],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Scatter { group, imm, src, dsts }, options, done)
    }

    /// Submits a scatter: part `i` goes to destination `i` of the template. With an immediate, each destination's counter grows by
    /// one after its own bytes have landed, also where there are none.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of parts than destinations, a part outside a region, or another engine's template;
    /// [`Error::Closed`]; [`Error::Busy`].
    pub fn submit_template(
        &self,
        template: &ScatterTemplate,
        imm: Option<u32>,
        parts: &[Part],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Template { template, imm, parts }, options, done)
    }

    /// Raises the counter of `imm` by one at every destination, without any bytes. A barrier is this at every member, and an
    /// expectation of as many arrivals as there are members.
    ///
    /// # Errors
    /// As for [`Engine::submit_scatter`].
    pub fn submit_barrier(
        &self,
        group: Option<&PeerGroup>,
        imm: u32,
        dsts: &[&MrDesc],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Barrier { group, imm, dsts }, options, done)
    }

    /// Submits prepared writes. With an immediate, the counter of each peer that is written to grows by one after all bytes for
    /// it have landed. The device group and the NIC were chosen when they were prepared.
    ///
    /// # Errors
    /// [`Error::Argument`] if another engine has prepared them; [`Error::Closed`]; [`Error::Busy`].
    pub fn submit_prepared(
        &self,
        prepared: &Prepared,
        imm: Option<u32>,
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Prepared { prepared, imm }, options, done)
    }

    /// Submits prepared writes when the watched word is at least `value`: at once if it is already. A thread of the engine posts them,
    /// so nothing else has to run for it. The deadline and a cancellation hold from now on.
    ///
    /// # Errors
    /// As for [`Engine::submit_prepared`]; and [`Error::Argument`] if another engine watches the word.
    pub fn submit_when(
        &self,
        watcher: &UvmWatcher,
        value: u64,
        prepared: &Prepared,
        imm: Option<u32>,
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::When { watcher, value, prepared, imm }, options, done)
    }

    /// Reads `len` bytes from `src` to `dst`, each a region and an offset in bytes: the peer's memory and the own. Nothing but this engine
    /// writes to `dst`. With an immediate, the peer's counter grows by one after all bytes have been read.
    ///
    /// If a read fails, the bytes of `dst` that it names may have changed, but none changes after `done`, except where the error says
    /// `may_land`.
    ///
    /// # Errors
    /// [`Error::Argument`] for ranges outside their regions, other numbers of NICs or another network; [`Error::Unavailable`] over
    /// a network that has no reads; [`Error::Closed`].
    pub fn submit_read(
        &self,
        len: u64,
        imm: Option<u32>,
        src: (&MrDesc, u64),
        dst: (&MrHandle, u64),
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_reads(imm, &[ReadItem { len, src, dst }], options, done)
    }

    /// Reads many ranges between any regions as one operation: [`Engine::prepare_reads`] and [`Engine::submit_prepared`].
    ///
    /// # Errors
    /// As for those.
    pub fn submit_reads(
        &self,
        imm: Option<u32>,
        items: &[ReadItem<'_>],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_prepared(&self.prepare_reads(items, options.into())?, imm, options, done)
    }

    /// Reads pages of `page_len` bytes: page `i` of `src` to page `i` of `dst`.
    ///
    /// # Errors
    /// As for [`Engine::submit_read`], and if the two sides name different numbers of pages.
    pub fn submit_paged_reads<'a>(
        &self,
        page_len: u64,
        imm: Option<u32>,
        src: (&MrDesc, impl Into<Grid<'a>>),
        dst: (&MrHandle, impl Into<Grid<'a>>),
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_prepared(&self.prepare_paged_reads(page_len, src, dst, options.into())?, imm, options, done)
    }

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
        self.submit(&Request::Message { to, pool, bytes }, options, done)
    }

    /// Sets a counter of this engine back to 0 once every sender has said that nothing of its own is under way with this
    /// immediate, over any of its device groups. `senders` are all who write with it; they begin its next use after `done`.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`]. `done` gets [`Error::CounterBusy`] if an expectation
    /// waits for the counter.
    pub fn submit_reset_imm(
        &self,
        imm: u32,
        senders: &[NetAddr],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit(&Request::Reset { imm, senders }, options, done)
    }

    /// Connects to peers ahead of the operations that will name them. `done` says when all are connected, or which are not.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`].
    pub fn add_peer_group(&self, peers: &[NetAddr], options: &Options, done: Done) -> Result<PeerGroup, Error> {
        self.submit(&Request::Connect { peers }, options, done)?;
        let members = peers.iter().map(|address| address.key().engine).collect();
        Ok(PeerGroup { engine: self.inner.shared.engine, device_group: options.device_group, members })
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

    /// Ends all receives of a pool, and frees their buffers. Messages that have arrived are still delivered; later ones are refused, as
    /// to a pool that nobody has provided. A pool that there is not is no error.
    pub fn end_recvs(&self, pool: u32) {
        // In a fork nothing arrives, and the pools may be locked for good.
        if self.inner.home.check().is_ok() {
            self.inner.shared.pools.end(pool);
        }
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

    /// Asks for the end of an operation. Its `done` is the confirmation: `Ok` if it had already gone through, an error with the
    /// reason [`Cancelled`](crate::Reason::Cancelled) otherwise; either way nothing of it lands afterwards, except where the
    /// error says that it may.
    ///
    /// # Errors
    /// [`Error::Argument`] for a transfer of another engine; [`Error::Closed`].
    pub fn cancel(&self, transfer: TransferId) -> Result<(), Error> {
        self.check_own("transfer", transfer.engine)?;
        if transfer.group == EXPECTATIONS {
            self.group(0)?;
            self.cancel_expectation(transfer.id);
            return Ok(());
        }
        let everywhere = transfer.group == EVERYWHERE;
        self.group(if everywhere { 0 } else { transfer.group })?;
        if self.inner.disarm(transfer.id) && !everywhere {
            return Ok(());
        }
        let groups = self.inner.groups.iter().enumerate();
        for (_, group) in groups.filter(|(index, _)| everywhere || *index == transfer.group) {
            group.commands.push(Command::Cancel { id: transfer.id }).map_err(|_| Error::Closed)?;
        }
        Ok(())
    }

    /// How often `imm` has arrived since the engine began or the counter was reset.
    pub fn imm_count(&self, imm: u32) -> u64 {
        self.inner.shared.counters.value(imm)
    }

    /// Sets a counter of this engine back to 0 and returns what it was. It is for a counter that nobody writes to any more;
    /// otherwise use a new immediate or [`Engine::submit_reset_imm`].
    ///
    /// # Errors
    /// [`Error::CounterBusy`] if an expectation waits for it.
    pub fn reset_imm(&self, imm: u32) -> Result<u64, Error> {
        self.inner.shared.counters.reset(imm).map_err(|waiting| Error::CounterBusy { imm, waiting })
    }

    /// Makes a word that a thread of the engine watches; `callback(old, new)` runs on a callback thread when it changes.
    /// With a device group over nvlink, the word is pinned and mapped, so that kernels can store to it.
    ///
    /// # Errors
    /// [`Error::System`] if the watching thread cannot be started; [`Error::Closed`].
    pub fn alloc_uvm_watcher(&self, callback: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<UvmWatcher, Error> {
        self.alloc_watched(Some(Repeated::new(Side::Own, move |(old, new)| callback(old, new))))
    }

    /// Makes a word as [`Engine::alloc_uvm_watcher`] does, for [`Engine::submit_when`] alone.
    ///
    /// # Errors
    /// As for that.
    pub fn alloc_uvm_word(&self) -> Result<UvmWatcher, Error> {
        self.alloc_watched(None)
    }

    pub(crate) fn alloc_watched(&self, callback: Option<WatchCallback>) -> Result<UvmWatcher, Error> {
        self.group(0)?;
        let pins = self.inner.groups.iter().any(|group| group.takes_host);
        let memory = if pins { Some(self.alloc_mr(WORD_PAGE)?.0) } else { None };
        self.inner.watchers()?.add(memory, callback)
    }

    /// Waits for an operation by its future, no longer than its deadline and the time to confirm its end allow.
    ///
    /// # Errors
    /// The operation's own, or [`Error::Timeout`]; [`Error::Argument`] inside a callback of this engine, unless the operation is over, and
    /// for the future of another engine's operation.
    pub fn wait(&self, future: &TransferFuture, timeout: Duration) -> Result<(), Error> {
        future.engine().map_or(Ok(()), |engine| self.check_own("future", engine))?;
        if !future.is_over() {
            check_wait(self.inner.shared.engine)?;
        }
        future.wait(timeout).unwrap_or(Err(Error::Timeout { what: "waiting for a transfer", after: timeout }))
    }
}
