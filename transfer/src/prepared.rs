//! Operations that are prepared once and submitted often: what they say is checked and cut into work requests ahead of time.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::api::{Grid, Options, PeerGroup, check_members, check_range, target};
use crate::completion::{Done, TransferId};
use crate::descriptor::{MrDesc, PeerKey};
use crate::engine::Engine;
use crate::error::Error;
use crate::handle::MrHandle;
use crate::shard::{Piece, Policy, paged, single};
use crate::watcher::UvmWatcher;
use crate::worker::command::TargetRequest;

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

/// Writes that can be submitted as often as wanted. It keeps the regions that it reads from registered.
#[derive(Clone)]
pub struct Prepared {
    engine: u64,
    group: usize,
    targets: Arc<[TargetRequest]>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pieces: usize = self.targets.iter().map(|target| target.pieces.len()).sum();
        write!(f, "Prepared({} destinations, {pieces} writes)", self.targets.len())
    }
}

/// Destinations of scatters whose lengths and offsets change.
#[derive(Clone)]
pub struct ScatterTemplate {
    engine: u64,
    src: MrHandle,
    dsts: Arc<[MrDesc]>,
}

impl std::fmt::Debug for ScatterTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ScatterTemplate({} destinations)", self.dsts.len())
    }
}

/// What goes to one destination of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Bytes; with 0, only the immediate.
    pub len: u64,
    /// Where they begin in the source.
    pub src_offset: u64,
    /// Where they go in the destination.
    pub dst_offset: u64,
}

/// Everything that goes from one region to another.
struct Bundle<'a> {
    src: &'a MrHandle,
    dst: &'a MrDesc,
    pieces: Vec<Piece>,
    policy: Policy,
}

impl Engine {
    /// Prepares writes between any regions. When they are submitted with an immediate, each peer counts it once, after all bytes
    /// for it have landed, in whichever of its regions.
    ///
    /// # Errors
    /// As for [`Engine::submit_single_write`]; and [`Error::Argument`] if there are none, or they come from several device groups.
    pub fn prepare_writes(&self, items: &[WriteItem<'_>], nic: Option<usize>) -> Result<Prepared, Error> {
        let Some(first) = items.first() else {
            return Err(Error::argument("items", "none came; at least 1 is needed"));
        };
        let index = first.src.0.registration.group;
        let group = self.group(index)?;
        for (at, item) in items.iter().enumerate() {
            check_range("src", item.src.1, item.len, item.src.0.len())?;
            check_range("dst", item.dst.1, item.len, item.dst.0.len)?;
            self.check_dst("dst", group, item.dst.0)?;
            let other = item.src.0.registration.group;
            if other != index {
                let problem = format!("item {at} reads from device group {other}, item 0 from {index}; one is allowed");
                return Err(Error::argument("items", problem));
            }
        }
        let mut bundles: Vec<Bundle<'_>> = Vec::new();
        let mut places = HashMap::new();
        for item in items {
            let region = item.dst.0.nics.first().map(|nic| (nic.address.key, nic.base, nic.rkey));
            let at = match places.entry((Arc::as_ptr(&item.src.0.registration), region)) {
                Entry::Occupied(at) => *at.get(),
                Entry::Vacant(place) => {
                    let policy = self.policy(group, nic)?;
                    bundles.push(Bundle { src: item.src.0, dst: item.dst.0, pieces: Vec::new(), policy });
                    *place.insert(bundles.len() - 1)
                }
            };
            if let Some(bundle) = bundles.get_mut(at) {
                // By turns, as separate writes would go.
                let policy = Policy { first: bundle.policy.first + bundle.pieces.len(), ..bundle.policy };
                bundle.pieces.extend(single(&policy, item.src.1, item.dst.1, item.len));
            }
        }
        Ok(Prepared { engine: self.inner.shared.engine, group: index, targets: linked(bundles).into() })
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
        nic: Option<usize>,
    ) -> Result<Prepared, Error> {
        let (from, to) = (src.1.into(), dst.1.into());
        from.check("src", page_len, src.0.len())?;
        to.check("dst", page_len, dst.0.len)?;
        if from.len() != to.len() {
            return Err(Error::argument("dst", format!("{} pages came; the source has {}", to.len(), from.len())));
        }
        let index = src.0.registration.group;
        let group = self.group(index)?;
        self.check_dst("dst", group, dst.0)?;
        let policy = self.policy(group, nic)?;
        let pieces = paged(&policy, page_len, from.offsets().zip(to.offsets()));
        let targets = Arc::from([target(pieces, None, Some(src.0), dst.0, &policy)]);
        Ok(Prepared { engine: self.inner.shared.engine, group: index, targets })
    }

    /// Submits prepared writes. With an immediate, the counter of each peer that is written to grows by one after all bytes for
    /// it have landed. `options.nic` was chosen when they were prepared.
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
        self.write(prepared.group, self.targets(prepared, imm)?, options, done)
    }

    fn targets(&self, prepared: &Prepared, imm: Option<u32>) -> Result<Vec<TargetRequest>, Error> {
        self.check_own("prepared", prepared.engine)?;
        let with_imm = |target: &TargetRequest| {
            let own = if target.lead.is_none() { imm } else { None };
            TargetRequest { imm: own, ..target.clone() }
        };
        Ok(prepared.targets.iter().map(with_imm).collect())
    }

    fn check_own(&self, argument: &'static str, engine: u64) -> Result<(), Error> {
        if engine == self.inner.shared.engine {
            return Ok(());
        }
        Err(Error::argument(argument, "another engine's came; each engine prepares its own"))
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
        self.submit_prepared(&self.prepare_writes(items, options.nic)?, imm, options, done)
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
        check_members(group, dsts.iter().copied())?;
        let own = self.group(src.registration.group)?;
        dsts.iter().try_for_each(|dst| self.check_dst("dst", own, dst))?;
        let dsts = dsts.iter().map(|dst| (*dst).clone()).collect();
        Ok(ScatterTemplate { engine: self.inner.shared.engine, src: src.clone(), dsts })
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
        self.check_own("template", template.engine)?;
        let (src, index) = (&template.src, template.src.registration.group);
        let own = self.group(index)?;
        if parts.len() != template.dsts.len() {
            let problem = format!("{} came; the template has {} destinations", parts.len(), template.dsts.len());
            return Err(Error::argument("parts", problem));
        }
        let mut policy = self.policy(own, options.nic)?;
        let mut targets = Vec::with_capacity(parts.len());
        for (part, dst) in parts.iter().zip(template.dsts.iter()) {
            check_range("src", part.src_offset, part.len, src.len())?;
            check_range("dst", part.dst_offset, part.len, dst.len)?;
            let pieces = single(&policy, part.src_offset, part.dst_offset, part.len);
            targets.push(target(pieces, imm, Some(src), dst, &policy));
            policy.first = policy.first.wrapping_add(1);
        }
        self.write(index, targets, options, done)
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
        let targets = self.targets(prepared, imm)?;
        self.submit_to(prepared.group, (done, options.deadline), targets, |commands, command| {
            self.inner.watchers()?.arm(watcher, value, commands, command)
        })
    }
}

/// Makes targets of bundles. Where a peer gets several, the immediate travels by itself, behind all of them.
fn linked(bundles: Vec<Bundle<'_>>) -> Vec<TargetRequest> {
    let mut targets: Vec<TargetRequest> = Vec::with_capacity(bundles.len() + 1);
    let mut peers: HashMap<PeerKey, Vec<usize>> = HashMap::new();
    for Bundle { src, dst, pieces, policy } in bundles {
        peers.entry(dst.key()).or_default().push(targets.len());
        targets.push(target(pieces, None, Some(src), dst, &policy));
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
