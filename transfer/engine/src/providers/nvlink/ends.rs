//! How links end. A GPU's memory that another process has mapped cannot be taken from it: the writer has to let go. One that is
//! stopped does not answer, and then everything that it was told of is kept until it lets go or is gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{INCOMING, NvlinkNic, Outgoing};
use crate::error::NetworkError;
use crate::memory::region::Region;
use crate::providers::interface::{Event, Link};

/// How long the end of a link waits for the writer.
const ANSWER: Duration = Duration::from_secs(1);
/// Connections of strangers, and how long one may take to become a peer's.
const MAX_STRANGERS: usize = 64;

/// A link that has been disconnected.
struct End {
    link: Link,
    /// Connections over which the peer may still write.
    fenced: Vec<usize>,
    since: Instant,
    /// The engine knows that the peer may still write.
    told: bool,
}

/// Bytes on their way out.
#[derive(Default)]
pub(super) struct Ends {
    links: Vec<End>,
    /// Memory whose registration has ended and that somebody may still write to.
    kept: Vec<(u64, Arc<Region>)>,
}

impl Ends {
    pub fn keep(&mut self, rkey: u64, region: Arc<Region>) {
        self.kept.push((rkey, region));
    }
}

impl NvlinkNic {
    /// Makes a connection that presents a pass, or a way.
    pub(super) fn reach(&mut self, endpoint: &[u8], pass: u64) -> Result<Link, NetworkError> {
        let link = Link(self.outgoing.len());
        let outgoing = Outgoing::connect(endpoint, (self.registrations.process, pass), link, &self.device)?;
        let added = self.selector.add(outgoing.descriptor(), link.0 as u64);
        self.outgoing.push(Some(outgoing));
        if let Err(error) = added {
            if let Some(Some(outgoing)) = self.outgoing.get_mut(link.0) {
                outgoing.disconnect(&mut self.finished);
            }
            return Err(NetworkError::Other(format!("epoll_ctl: {error}")));
        }
        Ok(link)
    }

    /// Shuts the peer of a link out.
    pub(super) fn fence(&mut self, link: Link) {
        for pass in self.passes.end(link) {
            let late = self.incoming.iter_mut().filter(|(_, incoming)| incoming.waits_for(pass));
            late.for_each(|(_, incoming)| incoming.close());
        }
        let mut fenced = Vec::new();
        for (index, incoming) in &mut self.incoming {
            if incoming.is_of(link) {
                incoming.fence();
                fenced.push(index);
            }
        }
        self.ends.links.push(End { link, fenced, since: Instant::now(), told: false });
    }

    /// Reports the links that are over, and those that cannot be ended.
    pub(super) fn end_links(&mut self) {
        if self.ends.links.is_empty() && self.ends.kept.is_empty() {
            return;
        }
        let (incoming, outgoing) = (&mut self.incoming, &self.outgoing);
        for end in &mut self.ends.links {
            end.fenced
                .retain(|index| incoming.get(*index).is_some_and(|other| other.is_fenced() && other.may_write_any()));
        }
        let finished = &mut self.finished;
        self.ends.links.retain_mut(|end| {
            // Its own copies, too, have to be over.
            let copies = outgoing.get(end.link.0).is_some_and(Option::is_some);
            match (end.fenced.is_empty(), end.told) {
                (true, true) => finished.push(Event::Drained(end.link)),
                (true, false) if !copies => finished.push(Event::Ended { link: end.link, held: false }),
                (false, false) if !copies && end.since.elapsed() > ANSWER => {
                    end.told = true;
                    finished.push(Event::Ended { link: end.link, held: true });
                    return true;
                }
                _ => return true,
            }
            false
        });
        for (_, incoming) in incoming.iter_mut().filter(|(_, incoming)| incoming.is_shut_out()) {
            incoming.close();
        }
        self.ends.kept.retain(|(rkey, _)| incoming.iter().any(|(_, incoming)| incoming.may_write(*rkey)));
        incoming.retain(|_, incoming| !(incoming.is_closed() && incoming.is_fenced()));
    }

    /// Keeps the connections of strangers few: the oldest goes when there are too many.
    pub(super) fn make_room(&mut self) {
        let strangers = self.incoming.iter().filter(|(_, incoming)| incoming.is_stranger());
        if strangers.clone().count() < MAX_STRANGERS {
            return;
        }
        if let Some((index, _)) = strangers.min_by_key(|(_, incoming)| incoming.since) {
            // The selector forgets what is closed.
            debug_assert!(index as u64 & INCOMING == 0);
            self.incoming.remove(index);
        }
    }
}
