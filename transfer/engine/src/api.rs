//! The engine's calls. Everything is checked here, before any effect.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::batch::{Batch, EVERYWHERE};
use crate::callbacks::{Repeated, Side, WatchCallback, check_wait};
use crate::completion::{Done, TransferFuture, TransferId};
use crate::descriptor::{GroupKeys, MrDesc, NetAddr, NicAddr, NicKey};
use crate::engine::{Engine, Group};
use crate::error::Error;
use crate::expect::EXPECTATIONS;
use crate::handle::MrHandle;
use crate::metrics::count;
use crate::patience;
use crate::route::Via;
use crate::shard::{Piece, Policy, single};
use crate::watcher::{UvmWatcher, WORD_PAGE};
use crate::worker::command::{Command, TargetRequest};

/// Longest deadline that is told apart from "never", about a century.
const FOREVER: Duration = Duration::from_secs(3 << 30);

/// Options of any operation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Time until the operation fails; the engine's default if None.
    pub deadline: Option<Duration>,
    /// The one NIC to use, instead of all.
    pub nic: Option<usize>,
    /// The one device group of this engine to use, instead of the best one for each peer.
    pub device_group: Option<usize>,
}

impl From<&Options> for Via {
    fn from(options: &Options) -> Self {
        Self { device_group: options.device_group, nic: options.nic }
    }
}

/// Pages of a region: page `i` begins at `indices[i] * stride + offset` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// Which pages, in the order of the transfer.
    pub indices: &'a [u64],
    /// Bytes from one page to the next.
    pub stride: u64,
    /// Bytes before page 0.
    pub offset: u64,
}

/// Pages of a region that has several planes of them, as caches with a plane for keys and one for values: page `i` of plane `j`
/// begins at `j * plane_stride + indices[i] * stride + offset` bytes. The order of the transfer is plane by plane.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    /// The pages of every plane.
    pub pages: Pages<'a>,
    /// How many planes, at least 1.
    pub planes: u64,
    /// Bytes from one plane to the next.
    pub plane_stride: u64,
}

impl<'a> From<Pages<'a>> for Grid<'a> {
    fn from(pages: Pages<'a>) -> Self {
        Self { pages, planes: 1, plane_stride: 0 }
    }
}

impl<'a> Grid<'a> {
    /// How many pages there are in all planes.
    pub(crate) fn len(&self) -> u64 {
        self.planes.saturating_mul(self.pages.indices.len() as u64)
    }

    /// Checks that every page lies inside `len` bytes.
    pub(crate) fn check(&self, argument: &'static str, page_len: u64, len: u64) -> Result<(), Error> {
        if self.planes == 0 {
            return Err(Error::argument(argument, "0 planes came; at least 1 is needed"));
        }
        // The page with the largest index lies behind all others, in the last plane.
        let Some(&last) = self.pages.indices.iter().max() else { return Ok(()) };
        let start = last.checked_mul(self.pages.stride).and_then(|start| start.checked_add(self.pages.offset));
        let plane = (self.planes - 1).checked_mul(self.plane_stride);
        let end = start.zip(plane).and_then(|(start, plane)| start.checked_add(plane)?.checked_add(page_len));
        if end.is_some_and(|end| end <= len) {
            return Ok(());
        }
        let plane = if self.planes == 1 { String::new() } else { format!(" of plane {}", self.planes - 1) };
        let problem = format!("page {last}{plane} of {page_len} bytes came; the region has {len} bytes");
        Err(Error::argument(argument, problem))
    }

    /// Where every page begins. They have been checked.
    pub(crate) fn offsets(self) -> impl Iterator<Item = u64> + use<'a> {
        let Self { pages, planes, plane_stride } = self;
        (0..planes).flat_map(move |plane| {
            let start = plane * plane_stride + pages.offset;
            pages.indices.iter().map(move |index| index * pages.stride + start)
        })
    }
}

/// One destination of a scatter.
#[derive(Debug, Clone, Copy)]
pub struct ScatterDst<'a> {
    /// Bytes to write.
    pub len: u64,
    /// Where they begin in the source.
    pub src_offset: u64,
    /// The region and where in it they go.
    pub dst: (&'a MrDesc, u64),
}

/// Peers that are connected ahead of the operations that name them.
#[derive(Debug, Clone)]
pub struct PeerGroup {
    /// The engine that has connected them.
    engine: u64,
    /// The device group that the caller has named.
    device_group: Option<usize>,
    /// The peers' engines.
    members: Arc<[u64]>,
}

impl PeerGroup {
    /// How many peers it has.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// The device group that was named for it.
    pub(crate) fn device_group(&self) -> Option<usize> {
        self.device_group
    }

    /// Says whether it has no peers.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

fn outside(argument: &'static str, offset: u64, len: u64, region: u64) -> Error {
    let problem = format!("bytes {offset} to {} came; the region has {region}", u128::from(offset) + u128::from(len));
    Error::argument(argument, problem)
}

pub(crate) fn check_range(argument: &'static str, offset: u64, len: u64, region: u64) -> Result<(), Error> {
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(outside(argument, offset, len, region)),
    }
}

/// Refuses what belongs to another engine of this process.
pub(crate) fn check_engine(own: u64, argument: &'static str, found: u64) -> Result<(), Error> {
    if found == own {
        return Ok(());
    }
    Err(Error::argument(argument, "another engine's came; each engine takes its own"))
}

impl Engine {
    pub(crate) fn group(&self, index: usize) -> Result<&Group, Error> {
        if self.inner.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.inner.home.check()?;
        self.inner.groups.get(index).ok_or_else(|| {
            Error::argument("group", format!("{index} came; the engine has {} groups", self.inner.groups.len()))
        })
    }

    pub(crate) fn deadline(&self, deadline: Option<Duration>) -> Instant {
        let deadline = deadline.unwrap_or(self.inner.shared.config.default_deadline).min(FOREVER);
        Instant::now() + deadline
    }

    pub(crate) fn policy(&self, group: &Group, nic: Option<usize>) -> Result<Policy, Error> {
        let nics = group.addresses.len();
        if let Some(nic) = nic.filter(|nic| *nic >= nics) {
            return Err(Error::argument("nic", format!("{nic} came; 0 to {} are allowed", nics - 1)));
        }
        let first = self.inner.rotation.fetch_add(1, Ordering::Relaxed);
        let min_shard = self.inner.shared.config.min_shard;
        Ok(Policy { nics, min_shard, max_write: group.limits.max_write, only: nic, first })
    }

    /// Refuses what belongs to another engine of this process.
    pub(crate) fn check_own(&self, argument: &'static str, engine: u64) -> Result<(), Error> {
        check_engine(self.inner.shared.engine, argument, engine)
    }

    /// Checks memory of this engine that an operation is to use.
    pub(crate) fn check_local(&self, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
        self.check_own(argument, handle.registration.engine)?;
        handle.registration.region.check_here(argument)
    }

    /// Checks memory of this engine that something is to land in.
    pub(crate) fn check_local_target(&self, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
        self.check_own(argument, handle.registration.engine)?;
        handle.registration.region.check_takes_writes(argument)
    }

    pub(crate) fn transfer(&self, group: usize, id: u64) -> TransferId {
        TransferId { engine: self.inner.shared.engine, group, id }
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.inner.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Checks that a group is this engine's, and that every destination is in it.
    pub(crate) fn check_members<'a>(
        &self,
        group: Option<&PeerGroup>,
        mut dsts: impl Iterator<Item = &'a MrDesc>,
    ) -> Result<(), Error> {
        let Some(group) = group else { return Ok(()) };
        self.check_own("group", group.engine)?;
        match dsts.find(|dst| !group.members.contains(&dst.key().engine)) {
            Some(stranger) => Err(Error::argument("dst", format!("peer {} is not in the group", stranger.name()))),
            None => Ok(()),
        }
    }

    /// Lets an operation in: once there is room for it, if it is to `start`.
    pub(crate) fn begin(
        &self,
        done: &mut Done,
        deadline: Option<Duration>,
        start: bool,
    ) -> Result<(u64, Instant), Error> {
        let deadline = self.deadline(deadline);
        done.submitted_to(self.inner.shared.engine);
        if start {
            done.permit = Some(self.inner.shared.gate.enter(deadline, patience::gives_up)?);
        }
        count(&self.inner.shared.metrics.submitted_total);
        Ok((self.next_id(), deadline))
    }

    /// Hands an operation to its worker.
    pub(crate) fn submit(
        &self,
        group: usize,
        (mut done, deadline): (Done, Option<Duration>),
        make: impl FnOnce(u64, Done, Instant) -> Command,
    ) -> Result<TransferId, Error> {
        let commands = &self.group(group)?.commands;
        let (id, deadline) = self.begin(&mut done, deadline, true)?;
        self.taken(commands.push(make(id, done, deadline)));
        Ok(self.transfer(group, id))
    }

    /// If the engine has closed meanwhile, whoever waits is told, as for every other operation that it ends.
    pub(crate) fn taken(&self, taken: Result<(), Command>) {
        if let Err(Command::Write { done, .. } | Command::Message { done, .. } | Command::Reset { done, .. }) = taken {
            self.inner.shared.complete(done, Err(Error::Closed));
        }
    }

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

/// The operations that are over when the connection to a peer stands.
pub(crate) fn connection(address: &NicAddr) -> TargetRequest {
    TargetRequest {
        dst: Arc::new([NicKey { address: address.clone(), base: 0, rkey: 0 }]),
        src: None,
        reads: false,
        pieces: Arc::default(),
        imm: None,
        imm_nic: 0,
        lead: None,
        after: 0,
    }
}

pub(crate) fn target(
    mut pieces: Vec<Piece>,
    imm: Option<u32>,
    src: Option<&MrHandle>,
    keys: &GroupKeys,
    policy: &Policy,
) -> TargetRequest {
    pieces.sort_by_key(|piece| piece.nic);
    TargetRequest {
        dst: Arc::clone(keys),
        src: src.map(|handle| Arc::clone(&handle.registration)),
        reads: false,
        pieces: pieces.into(),
        imm,
        imm_nic: policy.only.unwrap_or(policy.first % policy.nics.max(1)),
        lead: None,
        after: 0,
    }
}
