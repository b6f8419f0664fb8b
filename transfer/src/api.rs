//! What an engine does for its callers. Everything is checked here, before any effect.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::callbacks::{RecvPool, WatchCallback, check_wait};
use crate::completion::{Done, TransferFuture, TransferId};
use crate::descriptor::{MrDesc, NetAddr, NicKey, PeerKey};
use crate::engine::{Engine, Group};
use crate::error::{Error, PeerName};
use crate::expect::EXPECTATIONS;
use crate::handle::MrHandle;
use crate::message::OVERHEAD;
use crate::metrics::count;
use crate::queue::Queue;
use crate::shard::{Piece, Policy, single};
use crate::watcher::{UvmWatcher, WORD_PAGE};
use crate::worker::MAX_TARGETS;
use crate::worker::command::{Command, TargetRequest};

/// Longest deadline that is told apart from "never", about a century.
const FOREVER: Duration = Duration::from_secs(3 << 30);

/// What may be said about any operation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Time until the operation fails; the engine's default if None.
    pub deadline: Option<Duration>,
    /// The one NIC to use, instead of all.
    pub nic: Option<usize>,
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
    group: usize,
    members: Arc<[PeerKey]>,
}

impl PeerGroup {
    /// How many peers it has.
    pub fn len(&self) -> usize {
        self.members.len()
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

/// Hands a command to a worker at once.
fn push(commands: &Arc<Queue<Command>>, command: Command) -> Result<Result<(), Command>, Error> {
    Ok(commands.push(command))
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
        Ok(Policy { nics, min_shard, max_write: group.max_write, only: nic, first })
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.inner.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands an operation to its worker, once there is room for it.
    fn submit(
        &self,
        group: usize,
        (mut done, deadline): (Done, Option<Duration>),
        make: impl FnOnce(u64, Done, Instant) -> Command,
        take: impl FnOnce(&Arc<Queue<Command>>, Command) -> Result<Result<(), Command>, Error>,
    ) -> Result<TransferId, Error> {
        let (commands, deadline) = (&self.group(group)?.commands, self.deadline(deadline));
        done.permit = Some(self.inner.shared.gate.enter(deadline)?);
        let id = self.next_id();
        count(&self.inner.shared.metrics.submitted_total);
        let refused = take(commands, make(id, done, deadline))?;
        match refused {
            Ok(()) => Ok(TransferId { group, id }),
            Err(command) => {
                // The engine closed meanwhile: whoever waits is told, as for every other operation that it ends.
                if let Command::Write { done, .. } | Command::Message { done, .. } | Command::Reset { done, .. } =
                    command
                {
                    self.inner.shared.complete(done, Err(Error::Closed));
                }
                Ok(TransferId { group, id })
            }
        }
    }

    pub(crate) fn check_dst(&self, argument: &'static str, group: &Group, dst: &MrDesc) -> Result<(), Error> {
        let (ours, theirs) = (group.addresses.len(), dst.nics.len());
        if ours != theirs {
            let problem = format!("a region of an engine with {theirs} NICs a device came; this engine has {ours}");
            return Err(Error::argument(argument, problem));
        }
        dst.nics.iter().try_for_each(|nic| self.check_address(argument, &nic.address))
    }

    pub(crate) fn check_address(&self, argument: &'static str, address: &NetAddr) -> Result<(), Error> {
        if address.provider != self.inner.kind {
            let problem = format!("an address of {:?} came; this engine uses {:?}", address.provider, self.inner.kind);
            return Err(Error::argument(argument, problem));
        }
        Ok(())
    }

    /// Sends a message to an engine's receive pool, over the first NIC. The bytes are copied before this returns. It is over
    /// when the receiver has taken a buffer for it; while it has none, the message is tried again until the deadline.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network or a message that no frame can hold; [`Error::Closed`].
    pub fn submit_send(&self, to: &NetAddr, bytes: &[u8], options: &Options, done: Done) -> Result<TransferId, Error> {
        self.check_address("to", to)?;
        let longest = self.max_message();
        if bytes.len() > longest {
            let problem = format!("{} bytes came; at most {longest} are allowed", bytes.len());
            return Err(Error::argument("bytes", problem));
        }
        if options.nic.is_some_and(|nic| nic != 0) {
            return Err(Error::argument("nic", "a message uses the first NIC, 0"));
        }
        self.group(0)?;
        let (to, bytes) = (to.clone(), bytes.to_vec());
        let done = (done, options.deadline);
        self.submit(0, done, |id, done, deadline| Command::Message { id, to, bytes, done, deadline }, push)
    }

    /// Longest message of `submit_send` in bytes.
    pub fn max_message(&self) -> usize {
        self.inner.groups.first().map_or(0, |group| group.max_frame.saturating_sub(OVERHEAD))
    }

    /// Provides `count` rotating buffers of `len` bytes for messages. The callback borrows a buffer on the callback thread;
    /// when it returns, the buffer is free for the next message.
    ///
    /// # Errors
    /// [`Error::Argument`] for a length or count of 0, or if receives were submitted before.
    pub fn submit_recvs(
        &self,
        len: usize,
        count: usize,
        callback: impl FnMut(PeerName, &[u8]) + Send + 'static,
    ) -> Result<(), Error> {
        self.group(0)?;
        for (argument, value) in [("len", len), ("count", count)] {
            if value == 0 {
                return Err(Error::argument(argument, "0 came; at least 1 is needed"));
            }
        }
        let mut pool = self.inner.shared.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if pool.is_some() {
            return Err(Error::argument("callback", "receives were submitted before; an engine has one pool"));
        }
        *pool = Some(Arc::new(RecvPool::new(len, count, Box::new(callback))));
        Ok(())
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
        check_range("src", src.1, len, src.0.len())?;
        check_range("dst", dst.1, len, dst.0.len)?;
        let group = self.group(src.0.registration.group)?;
        self.check_dst("dst", group, dst.0)?;
        let policy = self.policy(group, options.nic)?;
        let target = target(single(&policy, src.1, dst.1, len), imm, Some(src.0), dst.0, &policy);
        self.write(src.0.registration.group, vec![target], options, done)
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
        self.submit_prepared(&self.prepare_paged_writes(page_len, src, dst, options.nic)?, imm, options, done)
    }

    /// Connects to peers ahead of the operations that will name them. `done` says when all are connected, or which are not.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`].
    pub fn add_peer_group(&self, peers: &[NetAddr], options: &Options, done: Done) -> Result<PeerGroup, Error> {
        peers.iter().try_for_each(|address| self.check_address("peers", address))?;
        self.group(0)?;
        let connect = |address: &NetAddr| TargetRequest {
            dst: Arc::new([NicKey { address: address.clone(), base: 0, rkey: 0 }]),
            src: None,
            pieces: Arc::default(),
            imm: None,
            imm_nic: 0,
            lead: None,
            after: 0,
        };
        self.write(0, peers.iter().map(connect).collect(), options, done)?;
        Ok(PeerGroup { group: 0, members: peers.iter().map(|address| address.key).collect() })
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
        check_members(group, dsts.iter().map(|dst| dst.dst.0))?;
        let index = src.registration.group;
        let own = self.group(index)?;
        for dst in dsts {
            check_range("src", dst.src_offset, dst.len, src.len())?;
            check_range("dst", dst.dst.1, dst.len, dst.dst.0.len)?;
            self.check_dst("dst", own, dst.dst.0)?;
        }
        let targets = dsts.iter().map(|dst| {
            let policy = self.policy(own, options.nic)?;
            Ok(target(single(&policy, dst.src_offset, dst.dst.1, dst.len), imm, Some(src), dst.dst.0, &policy))
        });
        let targets = targets.collect::<Result<_, Error>>()?;
        self.write(index, targets, options, done)
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
        check_members(group, dsts.iter().copied())?;
        let index = group.map_or(0, |group| group.group);
        let own = self.group(index)?;
        dsts.iter().try_for_each(|dst| self.check_dst("dst", own, dst))?;
        let policy = self.policy(own, options.nic)?;
        let targets = dsts.iter().map(|dst| target(Vec::new(), Some(imm), None, dst, &policy)).collect();
        self.write(index, targets, options, done)
    }

    pub(crate) fn write(
        &self,
        group: usize,
        targets: Vec<TargetRequest>,
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.submit_to(group, (done, options.deadline), targets, push)
    }

    /// Hands writes to whoever takes them to the worker.
    pub(crate) fn submit_to(
        &self,
        group: usize,
        done: (Done, Option<Duration>),
        targets: Vec<TargetRequest>,
        take: impl FnOnce(&Arc<Queue<Command>>, Command) -> Result<Result<(), Command>, Error>,
    ) -> Result<TransferId, Error> {
        if targets.len() > MAX_TARGETS {
            let problem = format!("{} destinations came; at most {MAX_TARGETS} are allowed", targets.len());
            return Err(Error::argument("dst", problem));
        }
        self.submit(group, done, |id, done, deadline| Command::Write { id, targets, done, deadline }, take)
    }

    /// Asks for the end of an operation. Its `done` is the confirmation: `Ok` if it had already gone through, an error with the
    /// reason [`Cancelled`](crate::Reason::Cancelled) otherwise; either way nothing of it lands afterwards, except where the
    /// error says that it may.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn cancel(&self, transfer: TransferId) -> Result<(), Error> {
        if transfer.group == EXPECTATIONS {
            self.group(0)?;
            self.cancel_expectation(transfer.id);
            return Ok(());
        }
        let group = self.group(transfer.group)?;
        if self.inner.disarm(transfer.id) {
            return Ok(());
        }
        let command = Command::Cancel { id: transfer.id };
        group.commands.push(command).map_err(|_| Error::Closed)
    }

    /// How often `imm` has arrived since the engine began or the counter was reset.
    pub fn imm_count(&self, imm: u32) -> u64 {
        self.inner.shared.counters.value(imm)
    }

    /// Shows the counter of `imm` in the 64-bit word at `offset` of registered host memory, now and at every change. Memory
    /// that a GPU has mapped makes it visible to kernels.
    ///
    /// # Errors
    /// [`Error::Argument`] if the word is not inside, not aligned to 8 bytes, or not host memory.
    pub fn mirror_imm(&self, imm: u32, handle: &MrHandle, offset: u64) -> Result<(), Error> {
        handle.registration.region.check_word(offset)?;
        let registration = Arc::clone(&handle.registration);
        let store = move |value| {
            // Checked above, and a region does not change.
            let _ = registration.region.store_word(offset, value);
        };
        self.inner.shared.counters.mirror(imm, Some(Box::new(store)));
        Ok(())
    }

    /// Ends the mirror of a counter.
    pub fn unmirror_imm(&self, imm: u32) {
        self.inner.shared.counters.mirror(imm, None);
    }

    /// Sets a counter of this engine back to 0 and returns what it was. It is for a counter that nobody writes to any more;
    /// otherwise use a new immediate or [`Engine::submit_reset_imm`].
    ///
    /// # Errors
    /// [`Error::CounterBusy`] if an expectation waits for it.
    pub fn reset_imm(&self, imm: u32) -> Result<u64, Error> {
        self.inner.shared.counters.reset(imm).map_err(|waiting| Error::CounterBusy { imm, waiting })
    }

    /// Sets a counter of this engine back to 0 once every sender has said that nothing of its own is under way with this
    /// immediate. `senders` are all who write with it; they begin its next use after `done`.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network, or if the engine has several device groups, whose NICs give no
    /// common order; [`Error::Closed`].
    pub fn submit_reset_imm(
        &self,
        imm: u32,
        senders: &[NetAddr],
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        senders.iter().try_for_each(|address| self.check_address("senders", address))?;
        self.group(0)?;
        if self.inner.groups.len() > 1 {
            return Err(Error::argument("imm", "an engine with several device groups uses a new immediate instead"));
        }
        let peers = senders.to_vec();
        let done = (done, options.deadline);
        self.submit(0, done, |id, done, deadline| Command::Reset { id, imm, peers, done, deadline }, push)
    }

    /// Makes a word that a thread of the engine watches; `callback(old, new)` runs on the callback thread when it changes.
    /// With a device group over nvlink, the word is pinned and mapped, so that kernels can store to it.
    ///
    /// # Errors
    /// [`Error::System`] if the watching thread cannot be started; [`Error::Closed`].
    pub fn alloc_uvm_watcher(&self, callback: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<UvmWatcher, Error> {
        self.alloc_watched(Some(Arc::new(callback)))
    }

    /// Makes a word as [`Engine::alloc_uvm_watcher`] does, for [`Engine::submit_when`] alone.
    ///
    /// # Errors
    /// As for that.
    pub fn alloc_uvm_word(&self) -> Result<UvmWatcher, Error> {
        self.alloc_watched(None)
    }

    fn alloc_watched(&self, callback: Option<WatchCallback>) -> Result<UvmWatcher, Error> {
        self.group(0)?;
        let pins = self.inner.groups.iter().any(|group| group.takes_host);
        let memory = if pins { Some(self.alloc_mr(WORD_PAGE)?.0) } else { None };
        self.inner.watchers()?.add(memory, callback)
    }

    /// Waits for an operation by its future, no longer than its deadline and the time to confirm its end allow.
    ///
    /// # Errors
    /// The operation's own, or [`Error::Timeout`]; [`Error::Argument`] inside a callback of this engine, unless the operation is over.
    pub fn wait(&self, future: &TransferFuture, timeout: Duration) -> Result<(), Error> {
        if !future.is_done() {
            check_wait(self.inner.shared.engine)?;
        }
        future.wait(timeout).unwrap_or(Err(Error::Timeout { what: "waiting for a transfer", after: timeout }))
    }
}

pub(crate) fn check_members<'a>(
    group: Option<&PeerGroup>,
    mut dsts: impl Iterator<Item = &'a MrDesc>,
) -> Result<(), Error> {
    match group.and_then(|group| dsts.find(|dst| !group.members.contains(&dst.key()))) {
        Some(stranger) => Err(Error::argument("dst", format!("peer {} is not in the group", stranger.name()))),
        None => Ok(()),
    }
}

pub(crate) fn target(
    mut pieces: Vec<Piece>,
    imm: Option<u32>,
    src: Option<&MrHandle>,
    dst: &MrDesc,
    policy: &Policy,
) -> TargetRequest {
    pieces.sort_by_key(|piece| piece.nic);
    TargetRequest {
        dst: Arc::clone(&dst.nics),
        src: src.map(|handle| Arc::clone(&handle.registration)),
        pieces: pieces.into(),
        imm,
        imm_nic: policy.only.unwrap_or(policy.first % policy.nics.max(1)),
        lead: None,
        after: 0,
    }
}
