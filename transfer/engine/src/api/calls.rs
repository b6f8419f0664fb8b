//! The engine's calls. Everything is checked here, before any effect.

use std::time::Duration;

use crate::counters::callbacks::{Repeated, Side, WatchCallback, check_wait};
use crate::counters::completion::{Done, TransferFuture, TransferId};
use crate::engine::checks::check_range;
use crate::engine::handle::MrHandle;
use crate::engine::running::Engine;
use crate::engine::watcher::UvmWatcher;
use crate::error::Error;
use crate::memory::region::WORD_PAGE;
use crate::providers::shard::single;
use crate::submit::arguments::{Grid, Options, PeerGroup, ScatterDst};
use crate::submit::batch::{Batch, EVERYWHERE, connection, target};
use crate::submit::expect::EXPECTATIONS;
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
        self.check_local("src", src.0)?;
        check_range("src", src.1, len, src.0.len())?;
        check_range("dst", dst.1, len, dst.0.len)?;
        self.group(0)?;
        let (index, keys) = self.route("dst", Some(src.0), dst.0, options.device_group)?;
        let policy = self.policy(self.group(index)?, options.nic)?;
        let target = target(single(&policy, src.1, dst.1, len), imm, Some(src.0), keys, &policy);
        self.write(Batch::one(index, vec![target]), (done, options.deadline))
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

    /// Connects to peers ahead of the operations that will name them. `done` says when all are connected, or which are not.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`].
    pub fn add_peer_group(&self, peers: &[NetAddr], options: &Options, done: Done) -> Result<PeerGroup, Error> {
        self.group(0)?;
        let mut batch = Batch::default();
        for address in peers {
            let (group, nic) = self.route_to("peers", address, options.device_group)?;
            batch.push(group, connection(nic));
        }
        self.write(batch, (done, options.deadline))?;
        let members = peers.iter().map(|address| address.key().engine).collect();
        Ok(PeerGroup { engine: self.inner.shared.engine, device_group: options.device_group, members })
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
        self.check_local("src", src)?;
        self.check_members(group, dsts.iter().map(|dst| dst.dst.0))?;
        self.group(0)?;
        let device_group = options.device_group.or(group.and_then(PeerGroup::device_group));
        let mut batch = Batch::default();
        for dst in dsts {
            check_range("src", dst.src_offset, dst.len, src.len())?;
            check_range("dst", dst.dst.1, dst.len, dst.dst.0.len)?;
            let (index, keys) = self.route("dst", Some(src), dst.dst.0, device_group)?;
            let policy = self.policy(self.group(index)?, options.nic)?;
            let pieces = single(&policy, dst.src_offset, dst.dst.1, dst.len);
            batch.push(index, target(pieces, imm, Some(src), keys, &policy));
        }
        self.write(batch, (done, options.deadline))
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
        self.check_members(group, dsts.iter().copied())?;
        self.group(0)?;
        let device_group = options.device_group.or(group.and_then(PeerGroup::device_group));
        let mut batch = Batch::default();
        for dst in dsts {
            let (index, keys) = self.route("dst", None, dst, device_group)?;
            let policy = self.policy(self.group(index)?, options.nic)?;
            batch.push(index, target(Vec::new(), Some(imm), None, keys, &policy));
        }
        self.write(batch, (done, options.deadline))
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
