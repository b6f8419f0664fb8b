//! A port of a verbs device and what hangs on it, with libibverbs' calls as functions that cannot be called wrongly.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use super::ffi::*;
use super::gid::{self, Gid};
use super::handshake::Endpoint;
use crate::error::Error;
use crate::memory::gpu;
use crate::memory::region::Region;
use crate::providers::interface::{Begun, Registrar};
use crate::wire::descriptor::Device as Kind;

/// The engine's name for a NIC of this provider: `device`, `device:port` or `device:port:gid_index`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Name {
    device: String,
    port: u8,
    gid_index: Option<u8>,
}

impl Name {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = || {
            let problem = format!("{text:?} came; \"mlx5_0\", \"mlx5_0:PORT\" or \"mlx5_0:PORT:GID_INDEX\" is allowed");
            Error::argument("device", problem)
        };
        let mut parts = text.split(':');
        let device = parts.next().unwrap_or_default().to_owned();
        let mut number = || parts.next().map(|part| part.parse::<u8>().map_err(|_| bad())).transpose();
        let (port, gid_index) = (number()?.unwrap_or(1), number()?);
        // The name becomes part of a path.
        let plain = device.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter));
        if device.is_empty() || device.starts_with('.') || !plain || port == 0 || parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self { device, port, gid_index })
    }
}

/// An open device with its protection domain, and the port in use.
pub(super) struct Port {
    pub library: &'static Library,
    context: *mut Context,
    pub(super) pd: *mut Pd,
    pub number: u8,
    pub gid: Gid,
    pub lid: u16,
    pub mtu: u8,
    /// Longest message in bytes.
    pub max_message: u32,
    /// Entries of a completion queue.
    pub max_completions: u32,
}

// SAFETY: libibverbs' calls may be made from any thread, and what is in a port does not change once it is open.
unsafe impl Send for Port {}
// SAFETY: as above.
unsafe impl Sync for Port {}

/// The system's words about the call that has just failed.
pub(super) fn failed(what: &'static str) -> Error {
    Error::System { what, why: io::Error::last_os_error().to_string() }
}

/// The result of a call that returns an error number.
pub(super) fn checked(what: &'static str, code: c_int) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::System { what, why: io::Error::from_raw_os_error(code.abs()).to_string() })
}

/// Opens the device of this name.
fn open_device(library: &'static Library, name: &str) -> Result<*mut Context, Error> {
    let missing = |why: String| Error::Unavailable { what: format!("verbs device {name}"), why };
    let mut count = 0;
    // SAFETY: the list has `count` entries until it is freed; their names are terminated. An open device outlives the list.
    unsafe {
        let list = (library.get_device_list)(&mut count);
        if list.is_null() {
            return Err(missing(format!("no list of devices: {}", io::Error::last_os_error())));
        }
        let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
        let named = |device: &&*mut Device| CStr::from_ptr((library.get_device_name)(**device)).to_string_lossy();
        let found = devices.iter().find(|device| named(device) == name);
        let names: Vec<_> = devices.iter().map(|device| named(&device).into_owned()).collect();
        let context = found.map(|device| (library.open_device)(*device));
        let why = io::Error::last_os_error();
        (library.free_device_list)(list);
        match context {
            None if names.is_empty() => Err(missing("this machine has no verbs devices".into())),
            None => Err(missing(format!("this machine has {}", names.join(", ")))),
            Some(context) if context.is_null() => Err(missing(format!("it cannot be opened: {why}"))),
            Some(context) => Ok(context),
        }
    }
}

impl Port {
    pub fn open(name: &Name) -> Result<Arc<Self>, Error> {
        let library = Library::open()?;
        let context = open_device(library, &name.device)?;
        let mut port = Self {
            library,
            context,
            pd: null_mut(),
            number: name.port,
            gid: Gid { index: 0, bytes: [0; 16], ethernet: true },
            lid: 0,
            mtu: 0,
            max_message: 0,
            max_completions: 0,
        };
        port.gid = gid::choose(Path::new("/sys"), &name.device, name.port, name.gid_index)?;
        // SAFETY: all zeros are valid attributes to fill in, and the device is open.
        unsafe {
            let (mut device, mut attributes): (DeviceAttributes, PortAttributes) =
                (std::mem::zeroed(), std::mem::zeroed());
            checked("ibv_query_device", (library.query_device)(context, &mut device))?;
            checked("ibv_query_port", (library.query_port)(context, name.port, &mut attributes))?;
            if attributes.state != PORT_ACTIVE {
                let what = format!("verbs device {}, port {}", name.device, name.port);
                return Err(Error::Unavailable { what, why: format!("it is not active (state {})", attributes.state) });
            }
            port.pd = (library.alloc_pd)(context);
            if port.pd.is_null() {
                return Err(failed("ibv_alloc_pd"));
            }
            port.lid = attributes.lid;
            port.mtu = u8::try_from(attributes.active_mtu).unwrap_or(1).max(1);
            port.max_message = attributes.max_message;
            port.max_completions = u32::try_from(device.max_cqe).unwrap_or(0);
        }
        Ok(Arc::new(port))
    }

    /// A path that leads to another port.
    pub fn address(&self, to: &Endpoint) -> Address {
        Address {
            gid: to.gid,
            flow_label: 0,
            own_gid_index: self.gid.index,
            hop_limit: 64,
            traffic_class: 0,
            lid: to.lid,
            service_level: 0,
            path_bits: 0,
            static_rate: 0,
            is_global: 1,
            port: self.number,
        }
    }
}

/// IBV_PORT_ACTIVE.
const PORT_ACTIVE: c_int = 4;

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: everything that hangs on them holds the port, so nothing does any more.
        unsafe {
            if !self.pd.is_null() {
                (self.library.dealloc_pd)(self.pd);
            }
            (self.library.close_device)(self.context);
        }
    }
}

/// Registers regions on threads other than the port's own, as long as that has the port open.
pub(super) struct PortRegistrar(pub Weak<Port>);

impl Registrar for PortRegistrar {
    fn begin(&self, region: &Arc<Region>) -> Result<Begun, Error> {
        let port = self.0.upgrade().ok_or(Error::Closed)?;
        Ok(Box::new(Memory::register(&port, Arc::clone(region), true)?))
    }
}

/// A region with its registration, which ends when this is dropped, before the region does.
pub(super) struct Memory {
    port: Arc<Port>,
    mr: *mut Mr,
    pub lkey: u32,
    pub rkey: u32,
    pub region: Arc<Region>,
}

// SAFETY: a registration belongs to no thread.
unsafe impl Send for Memory {}

/// Registers what the kernel can pin: host memory, and a GPU's where the driver's peer-memory module helps.
fn host_mr(port: &Port, region: &Region, access: c_int) -> io::Result<*mut Mr> {
    let (address, len) = (region.address(), region.len() as usize);
    let start = address as *mut c_void;
    // The completion of a write and its immediate still come after its bytes, which is all that the engine relies on.
    let relaxed = (access | IBV_ACCESS_RELAXED_ORDERING) as c_uint;
    // SAFETY: the region's bytes are valid, and kept until the registration has ended; the domain is open.
    let mut mr = port
        .library
        .reg_mr_iova
        .map_or(null_mut(), |register| unsafe { register(port.pd, start, len, address as u64, relaxed) });
    if mr.is_null() {
        // SAFETY: as above.
        mr = unsafe { (port.library.reg_mr)(port.pd, start, len, access) };
    }
    if mr.is_null() { Err(io::Error::last_os_error()) } else { Ok(mr) }
}

/// Registers memory of a GPU: as a DMA-BUF, or else as the driver's peer-memory module lets the kernel pin it.
fn device_mr(port: &Port, region: &Region, ordinal: u16, access: c_int) -> Result<*mut Mr, Error> {
    let (address, len) = (region.address() as u64, region.len());
    let by_file = || {
        let lacking = "libibverbs.so.1 has no ibv_reg_dmabuf_mr (rdma-core 34 has)";
        let register = port.library.reg_dmabuf.ok_or_else(|| lacking.to_owned())?;
        let memory = gpu::dma_buf(ordinal, address, len)?;
        let access = access | IBV_ACCESS_RELAXED_ORDERING;
        // SAFETY: the file holds the memory as long as the registration needs it; the domain is open.
        let mr = unsafe { register(port.pd, memory.offset, len as usize, address, memory.file.as_raw_fd(), access) };
        if mr.is_null() { Err(format!("ibv_reg_dmabuf_mr: {}", io::Error::last_os_error())) } else { Ok(mr) }
    };
    by_file().or_else(|no_file| {
        host_mr(port, region, access).map_err(|error| {
            let why = format!("no DMA-BUF ({no_file}), and no peer-memory module of the driver (ibv_reg_mr: {error})");
            Error::Unavailable { what: format!("memory of CUDA device {ordinal} over verbs"), why }
        })
    })
}

impl Memory {
    /// Registers a region; peers may write to it if `remote` says so.
    pub fn register(port: &Arc<Port>, region: Arc<Region>, remote: bool) -> Result<Self, Error> {
        let writes = if region.is_read_only() { 0 } else { IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
        let access = if remote { writes | IBV_ACCESS_REMOTE_READ } else { IBV_ACCESS_LOCAL_WRITE };
        let mr = match region.device() {
            Kind::Host => host_mr(port, &region, access).map_err(|error| {
                let no_memory = error.raw_os_error() == Some(libc::ENOMEM);
                let hint = if no_memory { "; `ulimit -l` limits locked memory" } else { "" };
                Error::System { what: "ibv_reg_mr", why: format!("{} bytes: {error}{hint}", region.len()) }
            })?,
            Kind::Cuda(ordinal) => device_mr(port, &region, ordinal, access)?,
        };
        // SAFETY: the registration is there until it is ended.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self { port: Arc::clone(port), mr, lkey, rkey, region })
    }

    /// Allocates and registers memory of the NIC's own.
    pub fn allocate(port: &Arc<Port>, len: usize) -> Result<Self, Error> {
        Self::register(port, Arc::new(Region::allocate(len)?), false)
    }

    /// The address of a byte.
    pub fn address(&self, offset: usize) -> u64 {
        (self.region.address() + offset) as u64
    }

    /// Ends the registration: once this returns, the device does not touch the bytes any more.
    pub fn deregister(mut self) -> Result<(), Error> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        let mr = std::mem::replace(&mut self.mr, null_mut());
        if mr.is_null() {
            return Ok(());
        }
        // SAFETY: it is registered, and forgotten after this.
        let ended = checked("ibv_dereg_mr", unsafe { (self.port.library.dereg_mr)(mr) });
        if ended.is_err() {
            // The device may still touch the bytes, so they stay for good.
            std::mem::forget(Arc::clone(&self.region));
        }
        ended
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A refusal has nobody left to go to.
        let _ = self.end();
    }
}

/// A completion queue.
pub(super) struct Completions {
    pub port: Arc<Port>,
    pub(super) cq: *mut Cq,
}

/// Entries that one look at a completion queue takes.
pub(super) const BATCH: usize = 32;

impl Completions {
    pub fn new(port: &Arc<Port>, entries: u32) -> Result<Self, Error> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the device is open; there is neither an event channel nor a context.
        let cq = unsafe { (port.library.create_cq)(port.context, entries, null_mut(), null_mut(), 0) };
        if cq.is_null() { Err(failed("ibv_create_cq")) } else { Ok(Self { port: Arc::clone(port), cq }) }
    }

    /// Takes some completions.
    pub fn poll(&self, entries: &mut [Completion; BATCH]) -> usize {
        // SAFETY: the queue is open and there is room for BATCH entries; the operations belong to its context.
        let count =
            unsafe { ((*(*self.cq).context).operations.poll_cq)(self.cq, BATCH as c_int, entries.as_mut_ptr()) };
        usize::try_from(count).unwrap_or(0).min(BATCH)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: every queue pair holds its completion queues, so none is left.
        unsafe { (self.port.library.destroy_cq)(self.cq) };
    }
}

/// An address that datagrams can be sent to.
pub(super) struct Route {
    port: Arc<Port>,
    pub(super) ah: *mut Ah,
}

impl Route {
    pub fn new(port: &Arc<Port>, to: &Endpoint) -> Result<Self, Error> {
        let mut address = port.address(to);
        // SAFETY: the domain is open; the address is read during the call only.
        let ah = unsafe { (port.library.create_ah)(port.pd, &mut address) };
        if ah.is_null() { Err(failed("ibv_create_ah")) } else { Ok(Self { port: Arc::clone(port), ah }) }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        // SAFETY: it is open, and forgotten after this.
        unsafe { (self.port.library.destroy_ah)(self.ah) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nics() {
        let name = |device: &str, port, gid_index| Name { device: device.into(), port, gid_index };
        assert_eq!(Name::parse("mlx5_0"), Ok(name("mlx5_0", 1, None)));
        assert_eq!(Name::parse("mlx5_bond-0.1:2"), Ok(name("mlx5_bond-0.1", 2, None)));
        assert_eq!(Name::parse("rxe0:1:3"), Ok(name("rxe0", 1, Some(3))));
        for wrong in ["", ":1", "a:0", "a:256", "a:1:x", "a:1:2:3", "../a", "a/b", ".a"] {
            assert!(matches!(Name::parse(wrong), Err(Error::Argument { argument: "device", .. })), "{wrong}");
        }
    }
}
