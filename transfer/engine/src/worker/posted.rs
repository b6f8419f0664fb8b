//! Writes that posters have left in their rings.

use std::sync::mpsc::TryRecvError;

use super::Worker;
use super::command::{Posted, TargetRequest};
use crate::providers::interface::Nic;
use crate::providers::shard::{Policy, single};

/// Writes of one ring in one turn: polling comes soon.
const MOST: usize = 64;

impl<N: Nic + ?Sized> Worker<N> {
    /// Starts what has been posted, and forgets rings whose posters are gone; says whether there was anything.
    pub(super) fn take_posted(&mut self) -> bool {
        let mut rings = std::mem::take(&mut self.posters);
        let mut active = false;
        rings.retain(|ring| {
            for _ in 0..MOST {
                match ring.try_recv() {
                    Ok(posted) => self.start_posted(posted),
                    Err(TryRecvError::Empty) => return true,
                    Err(TryRecvError::Disconnected) => return false,
                }
                active = true;
            }
            true
        });
        self.posters = rings;
        active
    }

    fn start_posted(&mut self, mut posted: Posted) {
        let Some(done) = posted.done.take() else { return };
        let Posted { id, nic, len, src_offset, dst_offset, imm, deadline, stamp, .. } = posted;
        let (nics, max_write) = (self.lanes.len(), self.limits().max_write);
        let policy = Policy { nics, min_shard: u64::MAX, max_write, only: Some(nic), first: nic };
        let target = TargetRequest {
            dst: posted.dst.clone(),
            src: posted.src.take(),
            reads: false,
            pieces: single(&policy, src_offset, dst_offset, len).into(),
            imm,
            imm_nic: nic,
            lead: None,
            after: 0,
        };
        self.start_write(id, vec![target], (done, deadline), stamp);
    }
}
