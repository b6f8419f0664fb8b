//! Writes that are posted without a lock, an allocation or a wait: through a ring of fixed size that a worker takes them out of.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::counters::completion::Done;
use crate::counters::metrics::count;
use crate::engine::checks::check_range;
use crate::engine::handle::MrHandle;
use crate::engine::route::Via;
use crate::engine::running::Engine;
use crate::error::Error;
use crate::peers::doors::Doors;
use crate::submit::arguments::Options;
use crate::sys::queue::Queue;
use crate::wire::descriptor::MrDesc;
use crate::worker::command::{Command, Posted};

/// Posts writes on one NIC of a device group. A write takes that NIC whole, so its immediate travels with its bytes where one work
/// request takes them.
pub struct Poster {
    engine: Engine,
    group: usize,
    nic: usize,
    commands: Arc<Queue<Command>>,
    ring: SyncSender<Posted>,
}

impl fmt::Debug for Poster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Poster(group {}, NIC {})", self.group, self.nic)
    }
}

impl Engine {
    /// Makes a poster for the device group and the NIC of `via`, the first ones if it names none. `room` is how many writes may wait
    /// for the worker.
    ///
    /// # Errors
    /// [`Error::Argument`] for no room, or a device group or NIC that the engine does not have; [`Error::Closed`].
    pub fn poster(&self, room: usize, via: Via) -> Result<Poster, Error> {
        if room == 0 {
            return Err(Error::argument("room", "0 came; at least 1 is needed"));
        }
        let (group, nic) = (via.device_group.unwrap_or(0), via.nic.unwrap_or(0));
        let found = self.group(group)?;
        self.policy(found, Some(nic))?;
        let (commands, (ring, posted)) = (Arc::clone(&found.commands), sync_channel(room));
        commands.push(Command::Listen { posted }).map_err(|_| Error::Closed)?;
        Ok(Poster { engine: self.clone(), group, nic, commands, ring })
    }
}

impl Poster {
    /// Writes `len` bytes from `src` to `dst`, as [`Engine::submit_single_write`] does. Without bytes, `src` may be None. Of `options`, the
    /// deadline counts. The call takes no lock and never waits, and it allocates nothing unless it finds a mistake.
    ///
    /// # Errors
    /// As for [`Engine::submit_single_write`]; and [`Error::Busy`] if the ring is full or `max_submissions` operations are under way.
    /// Then nothing has happened, and `done` is not told.
    pub fn write(
        &self,
        len: u64,
        imm: Option<u32>,
        src: Option<(&MrHandle, u64)>,
        dst: (&MrDesc, u64),
        options: &Options,
        done: Done,
    ) -> Result<(), Error> {
        check_range("dst", dst.1, len, dst.0.len)?;
        match src {
            Some((src, offset)) => {
                self.engine.check_local("src", src)?;
                check_range("src", offset, len, src.len())?;
            }
            None if len > 0 => return Err(Error::argument("src", format!("none came, for {len} bytes"))),
            None => {}
        }
        self.engine.group(self.group)?;
        let (handle, src_offset) = src.unzip();
        let (_, keys) = self.engine.route("dst", handle, dst.0, Some(self.group))?;
        let shared = &self.engine.inner.shared;
        let busy = Error::Busy { most: shared.config.max_submissions };
        let Some(permit) = shared.gate.try_enter() else { return Err(busy) };
        let posted = Posted {
            id: self.engine.next_id(),
            dst: Arc::clone(keys),
            src: handle.map(|handle| Arc::clone(&handle.registration)),
            src_offset: src_offset.unwrap_or(0),
            dst_offset: dst.1,
            len,
            imm,
            nic: self.nic,
            deadline: self.engine.deadline(options.deadline),
            stamp: Doors::now(),
            done: Some(Done { permit: Some(permit), ..done }),
            shared: Arc::clone(shared),
        };
        match self.ring.try_send(posted) {
            Ok(()) => {
                count(&shared.metrics.submitted_total);
                self.commands.nudge();
                Ok(())
            }
            Err(TrySendError::Full(posted)) => {
                posted.forget();
                Err(busy)
            }
            Err(TrySendError::Disconnected(posted)) => {
                posted.forget();
                Err(Error::Closed)
            }
        }
    }
}
