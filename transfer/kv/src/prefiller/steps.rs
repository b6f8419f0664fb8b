//! Checks of a forward step: it is checked as a whole before anything of it has an effect.

use std::collections::HashSet;

use putget_transfer::Error;

use super::{Inner, LAYER_BITS, State, Work};
use crate::geometry::{Geometry, Kind, Region};
use crate::message::MOST_NAME;

/// The requirements for a list of pages, for all regions that use it alike.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct List {
    group: u32,
    page_tokens: u32,
    num_pages: u64,
    is_state: bool,
}

impl List {
    /// The lists of a cache, each kind once.
    pub(super) fn of(geometry: &Geometry) -> Vec<Self> {
        let list = |region: &Region| {
            let Region { group, page_tokens, num_pages, .. } = *region;
            Self { group, page_tokens, num_pages, is_state: region.kind == Kind::State }
        };
        let mut lists: Vec<_> = geometry.regions.iter().map(list).collect();
        lists.sort_unstable();
        lists.dedup();
        lists
    }
}

impl Inner {
    /// Checks a step as a whole.
    pub(super) fn check_step(&self, state: &State, step: u64, work: &[Work<'_>]) -> Result<(), Error> {
        if step <= state.step || step >= 1 << (64 - LAYER_BITS) {
            let problem = format!("{step} came; steps ascend, and the last one was {}", state.step);
            return Err(Error::argument("step", problem));
        }
        // Most steps have room for all, so that nobody has to know which are new.
        let new = || work.iter().filter(|one| !state.prefills.contains_key(one.request)).count();
        let (known, most) = (state.prefills.len(), self.options.max_requests);
        if known + work.len() > most && known + new() > most {
            return Err(Error::Busy { most });
        }
        let mut seen = HashSet::with_capacity(work.len());
        for one in work {
            let bad = |problem: String| Err(Error::argument("work", format!("{:?}: {problem}", one.request)));
            if one.request.is_empty() || one.request.len() > MOST_NAME || !seen.insert(one.request) {
                return bad("a name of 1 to 4096 bytes that came once is needed".into());
            }
            if let Some(prefill) = state.prefills.get(one.request) {
                if prefill.finished || prefill.failed.is_some() {
                    return bad("its prefill is over".into());
                }
                if one.tokens < prefill.tokens() {
                    return bad(format!("{} tokens came; {} were computed before", one.tokens, prefill.tokens()));
                }
            }
            for needs in &self.lists {
                let list = one.pages.get(needs.group as usize).map(Vec::as_slice).unwrap_or_default();
                let tokens = if needs.is_state { 1 } else { one.tokens };
                let needed = tokens.div_ceil(needs.page_tokens.into());
                if (list.len() as u64) < needed {
                    return bad(format!("list {} has {} pages; {needed} are needed", needs.group, list.len()));
                }
                if let Some(page) = list.iter().find(|page| **page >= needs.num_pages) {
                    return bad(format!("page {page} of list {} came; there are {}", needs.group, needs.num_pages));
                }
            }
        }
        Ok(())
    }
}
