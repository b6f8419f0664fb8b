//! The words of operations: options, pages, destinations and groups of peers.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::route::Via;
use crate::engine::running::Engine;
use crate::error::Error;
use crate::wire::descriptor::MrDesc;

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
        let planes = if pages.indices.is_empty() { 0 } else { planes };
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
    pub(crate) engine: u64,
    /// The device group that the caller has named.
    pub(crate) device_group: Option<usize>,
    /// The peers' engines.
    pub(crate) members: Arc<[u64]>,
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

impl Engine {
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
}
