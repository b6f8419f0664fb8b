//! Operations that are prepared once and submitted often: what they say is checked and cut into work requests ahead of time.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::engine::checks::check_range;
use crate::engine::handle::MrHandle;
use crate::engine::route::Via;
use crate::engine::running::Engine;
use crate::error::Error;
use crate::providers::shard::{Piece, Policy, paged, single};
use crate::submit::arguments::{Grid, PeerGroup};
use crate::submit::overlap;
use crate::wire::descriptor::{GroupKeys, MrDesc, PeerKey, group_key};
use crate::worker::command::{TargetRequest, Task};

/// One of many writes.
#[derive(Debug, Clone, Copy)]
pub struct WriteItem<'a> {
    /// Bytes.
    pub len: u64,
    /// The region and where in it they begin.
    pub src: (&'a MrHandle, u64),
    /// The region and where in it they go.
    pub dst: (&'a MrDesc, u64),
}

/// One of many reads.
#[derive(Debug, Clone, Copy)]
pub struct ReadItem<'a> {
    /// Bytes.
    pub len: u64,
    /// The peer's region and where in it they begin.
    pub src: (&'a MrDesc, u64),
    /// The own region and where in it they go.
    pub dst: (&'a MrHandle, u64),
}

/// One of many transfers, whichever way its bytes go.
struct Item<'a> {
    len: u64,
    local: (&'a MrHandle, u64),
    remote: (&'a MrDesc, u64),
}

/// The arguments' names of local and remote memory.
fn names(reads: bool) -> (&'static str, &'static str) {
    if reads { ("dst", "src") } else { ("src", "dst") }
}

/// Writes, or reads, that can be submitted as often as wanted. It keeps the own regions that they use registered.
#[derive(Clone)]
pub struct Prepared {
    engine: u64,
    /// By the device group that carries them.
    parts: Arc<[(usize, Arc<[TargetRequest]>)]>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let targets = || self.parts.iter().flat_map(|(_, targets)| targets.iter());
        let pieces: usize = targets().map(|target| target.pieces.len()).sum();
        write!(f, "Prepared({} destinations, {pieces} writes)", targets().count())
    }
}

/// Destinations of scatters whose lengths and offsets change.
#[derive(Clone)]
pub struct ScatterTemplate {
    pub(crate) engine: u64,
    /// That of its group of peers, if one is named there.
    pub(crate) device_group: Option<usize>,
    pub(crate) src: MrHandle,
    pub(crate) dsts: Arc<[MrDesc]>,
}

impl std::fmt::Debug for ScatterTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ScatterTemplate({} destinations)", self.dsts.len())
    }
}

/// The part that goes to one destination of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Bytes; with 0, only the immediate.
    pub len: u64,
    /// Where they begin in the source.
    pub src_offset: u64,
    /// Where they go in the destination.
    pub dst_offset: u64,
}

/// Everything that goes between two regions.
struct Bundle<'a> {
    /// The device group that carries it.
    group: usize,
    local: &'a MrHandle,
    keys: &'a GroupKeys,
    pieces: Vec<Piece>,
    policy: Policy,
}

impl Engine {
    /// Prepares writes between any regions. When they are submitted with an immediate, each peer counts it once, after all bytes
    /// for it have landed, in whichever of its regions. All that goes to one peer takes the same device group.
    ///
    /// # Errors
    /// As for [`Engine::submit_single_write`]; and [`Error::Argument`] if there are none, or no device group carries all that goes to
    /// a peer.
    pub fn prepare_writes(&self, items: &[WriteItem<'_>], via: Via) -> Result<Prepared, Error> {
        let items: Vec<_> =
            items.iter().map(|&WriteItem { len, src, dst }| Item { len, local: src, remote: dst }).collect();
        self.prepare_items(&items, false, via)
    }

    /// Prepares reads between any regions. When they are submitted with an immediate, each peer counts it once, after all bytes have
    /// been read from it. All that comes from one peer takes the same device group.
    ///
    /// # Errors
    /// As for [`Engine::submit_read`]; and [`Error::Argument`] if there are none, or no device group carries all that comes from a
    /// peer.
    pub fn prepare_reads(&self, items: &[ReadItem<'_>], via: Via) -> Result<Prepared, Error> {
        let items: Vec<_> =
            items.iter().map(|&ReadItem { len, src, dst }| Item { len, local: dst, remote: src }).collect();
        self.prepare_items(&items, true, via)
    }

    /// The device group for each peer, by its engine.
    fn groups_for_items(&self, items: &[Item<'_>], reads: bool, via: Via) -> Result<HashMap<u64, usize>, Error> {
        let (local, remote) = names(reads);
        let mut peers: HashMap<u64, Vec<(&MrHandle, &MrDesc)>> = HashMap::new();
        for item in items {
            self.check_item(local, item.local.0, reads)?;
            check_range(local, item.local.1, item.len, item.local.0.len())?;
            check_range(remote, item.remote.1, item.len, item.remote.0.len)?;
            peers.entry(item.remote.0.key().engine).or_default().push((item.local.0, item.remote.0));
        }
        let choose =
            |(peer, pairs): (u64, Vec<_>)| Ok((peer, self.route_all(remote, &pairs, reads, via.device_group)?));
        peers.into_iter().map(choose).collect()
    }

    fn prepare_items(&self, items: &[Item<'_>], reads: bool, via: Via) -> Result<Prepared, Error> {
        if items.is_empty() {
            return Err(Error::argument("items", "none came; at least 1 is needed"));
        }
        self.group(0)?;
        let groups = self.groups_for_items(items, reads, via)?;
        let mut bundles: Vec<Bundle<'_>> = Vec::new();
        let mut places = HashMap::new();
        for item in items {
            let index = groups.get(&item.remote.0.key().engine).copied();
            let (index, keys) = self.route(names(reads).1, Some(item.local.0), item.remote.0, index)?;
            let region = keys.first().map(|nic| (nic.address.key, nic.base, nic.rkey));
            let at = match places.entry((Arc::as_ptr(&item.local.0.registration), region)) {
                Entry::Occupied(at) => *at.get(),
                Entry::Vacant(place) => {
                    let policy = self.policy(self.group(index)?, via.nic)?;
                    bundles.push(Bundle { group: index, local: item.local.0, keys, pieces: Vec::new(), policy });
                    *place.insert(bundles.len() - 1)
                }
            };
            if let Some(bundle) = bundles.get_mut(at) {
                // By turns, as separate transfers would go.
                let policy = Policy { first: bundle.policy.first + bundle.pieces.len(), ..bundle.policy };
                bundle.pieces.extend(single(&policy, item.local.1, item.remote.1, item.len));
            }
        }
        let mut indices: Vec<_> = bundles.iter().map(|bundle| bundle.group).collect();
        indices.sort_unstable();
        indices.dedup();
        let mut parts = Vec::with_capacity(indices.len());
        for index in indices {
            let (own, others) = bundles.into_iter().partition(|bundle| bundle.group == index);
            parts.push((index, linked(own, reads).into()));
            bundles = others;
        }
        Ok(Prepared { engine: self.inner.shared.engine, parts: parts.into() })
    }

    /// Prepares a paged read.
    ///
    /// # Errors
    /// As for [`Engine::submit_paged_reads`].
    pub fn prepare_paged_reads<'a>(
        &self,
        page_len: u64,
        src: (&MrDesc, impl Into<Grid<'a>>),
        dst: (&MrHandle, impl Into<Grid<'a>>),
        via: Via,
    ) -> Result<Prepared, Error> {
        self.prepare_pages(page_len, (dst.0, dst.1.into()), (src.0, src.1.into()), true, via)
    }

    /// Prepares a paged write.
    ///
    /// # Errors
    /// As for [`Engine::submit_paged_writes`].
    pub fn prepare_paged_writes<'a>(
        &self,
        page_len: u64,
        src: (&MrHandle, impl Into<Grid<'a>>),
        dst: (&MrDesc, impl Into<Grid<'a>>),
        via: Via,
    ) -> Result<Prepared, Error> {
        self.prepare_pages(page_len, (src.0, src.1.into()), (dst.0, dst.1.into()), false, via)
    }

    fn check_item(&self, argument: &'static str, local: &MrHandle, reads: bool) -> Result<(), Error> {
        if reads { self.check_local_target(argument, local) } else { self.check_local(argument, local) }
    }

    fn prepare_pages(
        &self,
        page_len: u64,
        local: (&MrHandle, Grid<'_>),
        remote: (&MrDesc, Grid<'_>),
        reads: bool,
        via: Via,
    ) -> Result<Prepared, Error> {
        let (here, there) = names(reads);
        self.check_item(here, local.0, reads)?;
        local.1.check(here, page_len, local.0.len())?;
        remote.1.check(there, page_len, remote.0.len)?;
        let (from, to) = if reads { (remote.1.len(), local.1.len()) } else { (local.1.len(), remote.1.len()) };
        if from != to {
            return Err(Error::argument("dst", format!("{to} pages came; the source has {from}")));
        }
        overlap::check("dst", if reads { &local.1 } else { &remote.1 }, page_len)?;
        self.group(0)?;
        let index = self.route_all(there, &[(local.0, remote.0)], reads, via.device_group)?;
        let (index, keys) = self.route(there, Some(local.0), remote.0, Some(index))?;
        let policy = self.policy(self.group(index)?, via.nic)?;
        let pieces = paged(&policy, page_len, local.1.offsets().zip(remote.1.offsets()));
        let targets = Arc::from([TargetRequest { reads, ..target(pieces, None, Some(local.0), keys, &policy) }]);
        Ok(Prepared { engine: self.inner.shared.engine, parts: Arc::from([(index, targets)]) })
    }

    /// The writes of prepared ones, by device group.
    pub(crate) fn prepared_parts(&self, prepared: &Prepared, imm: Option<u32>) -> Result<Vec<(usize, Task)>, Error> {
        self.check_own("prepared", prepared.engine)?;
        let sources =
            prepared.parts.iter().flat_map(|(_, targets)| targets.iter().filter_map(|target| target.src.as_ref()));
        sources.into_iter().try_for_each(|source| source.region.check_here("prepared"))?;
        let with_imm = |target: &TargetRequest| {
            let own = if target.lead.is_none() { imm } else { None };
            TargetRequest { imm: own, ..target.clone() }
        };
        let part = |(group, targets): &(usize, Arc<[TargetRequest]>)| {
            (*group, Task::Write(targets.iter().map(with_imm).collect()))
        };
        Ok(prepared.parts.iter().map(part).collect())
    }

    /// Prepares scatters from one region to the same destinations, with lengths and offsets that change.
    ///
    /// # Errors
    /// As for [`Engine::submit_scatter`].
    pub fn scatter_template(
        &self,
        group: Option<&PeerGroup>,
        src: &MrHandle,
        dsts: &[&MrDesc],
    ) -> Result<ScatterTemplate, Error> {
        self.check_local("src", src)?;
        self.check_members(group, dsts.iter().copied())?;
        self.group(0)?;
        let device_group = group.and_then(PeerGroup::device_group);
        dsts.iter().try_for_each(|dst| self.route("dst", Some(src), dst, device_group).map(drop))?;
        let dsts = dsts.iter().map(|dst| (*dst).clone()).collect();
        Ok(ScatterTemplate { engine: self.inner.shared.engine, device_group, src: src.clone(), dsts })
    }
}

/// Makes targets of bundles. Where a peer gets several, the immediate travels by itself, behind all of them.
fn linked(bundles: Vec<Bundle<'_>>, reads: bool) -> Vec<TargetRequest> {
    let mut targets: Vec<TargetRequest> = Vec::with_capacity(bundles.len() + 1);
    let mut peers: HashMap<PeerKey, Vec<usize>> = HashMap::new();
    for Bundle { local, keys, pieces, policy, .. } in bundles {
        peers.entry(group_key(keys)).or_default().push(targets.len());
        targets.push(TargetRequest { reads, ..target(pieces, None, Some(local), keys, &policy) });
    }
    for same in peers.into_values().filter(|same| same.len() > 1) {
        let Some(head) = same.first().and_then(|at| targets.get(*at)) else { continue };
        let last = TargetRequest { pieces: Arc::default(), src: None, after: same.len(), ..head.clone() };
        let lead = Some(targets.len());
        for at in same {
            if let Some(target) = targets.get_mut(at) {
                target.lead = lead;
            }
        }
        targets.push(last);
    }
    targets
}

/// One destination of an operation.
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
