//! One endpoint and what it needs, with libfabric's calls as functions that cannot be called wrongly.

use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::{null, null_mut};

use super::ffi::*;
use crate::error::Error;
use crate::wire::descriptor::Device;

/// Memory that an operation in flight gives to libfabric: space of its own, as FI_CONTEXT2 asks for, and the number of its slot.
#[repr(C)]
struct Context {
    scratch: [usize; 8],
    slot: usize,
}

/// A context in a place that does not move, until this is dropped.
pub(super) struct PlacedContext(*mut Context);

impl PlacedContext {
    pub fn new(slot: usize) -> Self {
        Self(Box::into_raw(Box::new(Context { scratch: [0; 8], slot })))
    }
}

impl Drop for PlacedContext {
    fn drop(&mut self) {
        // SAFETY: it came from a box in `new`. Its slot keeps it until the operation is over or the endpoint closed.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// A report of the completion queue.
pub(super) enum Completion {
    /// A write of a peer has landed, with this immediate and, where the network carries so much, this tag above it.
    Immediate { imm: u32, tag: Option<u32> },
    /// The operation of a slot is over; for a receive, with so many bytes.
    Done { slot: usize, len: usize },
    /// The operation of a slot has failed, with libfabric's code.
    Failed { slot: usize, code: isize },
}

/// Memory that is registered with an endpoint's domain. Ended by [`Endpoint::deregister`].
pub(super) struct Memory {
    mr: *mut Mr,
    pub key: u64,
    /// The name of its offset 0 on the wire.
    pub base: u64,
}

/// A reliable, connectionless endpoint with its completion queue and addresses. It stays on the thread that opened it.
pub(super) struct Endpoint {
    pub library: &'static Library,
    info: *mut Info,
    fabric: *mut Fabric,
    domain: *mut Domain,
    av: *mut Av,
    cq: *mut Cq,
    /// Counts writes of peers, where nothing wakes a thread for them.
    cntr: *mut Cntr,
    ep: *mut Ep,
    /// A queue without completions, for its descriptor alone.
    silent: *mut Cq,
    /// Becomes readable when the provider needs a thread. Closed with its queue.
    wait_descriptor: Option<RawFd>,
    /// The provider's queue stays readable after its first completion (libfabric's net, 1.17).
    stays_readable: bool,
    /// It has one-sided reads.
    pub reads: bool,
    pub depth: usize,
    pub max_message: usize,
    /// Immediates have 32 bits more, which say whose they are.
    pub carries_tags: bool,
    mr_mode: i32,
}

fn checked(library: &Library, what: &'static str, code: i32) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(Error::System { what, why: library.words(code as isize) }) }
}

/// Writes in flight that a provider is trusted with.
const MOST_WRITES: usize = 128;
/// Entries that one look at the completion queue takes.
const BATCH: usize = 32;

impl Endpoint {
    /// Opens an endpoint of a provider ("net", "efa") for the memory of a device. `source` is the address of the NIC, where the provider
    /// has any.
    pub fn open(provider: &str, source: Option<&str>, device: Device) -> Result<Self, Error> {
        let library = Library::open()?;
        let text = |argument: &'static str, text: &str| {
            CString::new(text).map_err(|_| Error::argument(argument, format!("{text:?} came; it has a zero byte")))
        };
        let (name, node) = (text("provider", provider)?, source.map(|source| text("source", source)).transpose()?);
        let mut endpoint = Self {
            library,
            info: null_mut(),
            fabric: null_mut(),
            domain: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            cntr: null_mut(),
            ep: null_mut(),
            silent: null_mut(),
            wait_descriptor: None,
            stays_readable: provider == "net",
            reads: false,
            depth: 0,
            max_message: 0,
            carries_tags: false,
            mr_mode: 0,
        };
        // SAFETY: without a model, dupinfo allocates a zeroed info with all its attributes.
        let hints = unsafe { (library.dupinfo)(null()) };
        if hints.is_null() {
            return Err(Error::System { what: "fi_dupinfo", why: "no memory".into() });
        }
        // efa registers what it sends from, chooses keys and addresses memory virtually. The software providers take keys of
        // our choice and offsets; then the target checks every key and address itself.
        let mr_mode =
            if provider == "efa" { FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY } else { 0 };
        let (device_caps, device_mode) = match device {
            Device::Host => (0, 0),
            Device::Cuda(_) => (FI_HMEM, FI_MR_HMEM),
        };
        let writes = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE | device_caps;
        // SAFETY: `hints` and its attributes were allocated above; `strdup` gives memory that freeinfo frees.
        let found = unsafe {
            (*hints).caps = writes | FI_READ | FI_REMOTE_READ;
            (*hints).mode = FI_CONTEXT | FI_CONTEXT2;
            (*(*hints).ep_attr).kind = FI_EP_RDM;
            (*(*hints).tx_attr).op_flags = FI_DELIVERY_COMPLETE;
            (*(*hints).domain_attr).threading = FI_THREAD_DOMAIN;
            (*(*hints).domain_attr).resource_mgmt = FI_RM_ENABLED;
            (*(*hints).domain_attr).mr_mode = mr_mode | device_mode;
            (*(*hints).fabric_attr).prov_name = libc::strdup(name.as_ptr());
            let (node, flags) = node.as_ref().map_or((null(), 0), |node| (node.as_ptr(), FI_SOURCE));
            let mut found = (library.getinfo)(API_VERSION, node, null(), flags, hints, &mut endpoint.info);
            endpoint.reads = found == 0;
            if found != 0 {
                // Without reads, then.
                (*hints).caps = writes;
                found = (library.getinfo)(API_VERSION, node, null(), flags, hints, &mut endpoint.info);
            }
            (library.freeinfo)(hints);
            found
        };
        if found != 0 || endpoint.info.is_null() {
            let at = source.map_or(String::new(), |source| format!(" at {source}"));
            let of_devices = if device == Device::Host { "" } else { " for memory of devices (FI_HMEM)" };
            let words = library.words(found as isize);
            let there = library.providers().join(", ");
            let why = format!(
                "no endpoint{of_devices} with remote writes and delivery completion: {words}; libfabric has {there} here, and \
                 \"tcp\" and \"host\" need no library"
            );
            return Err(Error::Unavailable { what: format!("libfabric provider {provider}{at}"), why });
        }
        endpoint.start()?;
        Ok(endpoint)
    }

    fn check(&self, what: &'static str, code: i32) -> Result<(), Error> {
        checked(self.library, what, code)
    }

    fn start(&mut self) -> Result<(), Error> {
        // SAFETY: the info and its attributes came from getinfo; every object is opened before it is used, and the operation
        // tables belong to objects of the kinds that they are called on.
        unsafe {
            let library = self.library;
            let check = |what, code| checked(library, what, code);
            let info = self.info;
            let attributes = &*(*info).domain_attr;
            if attributes.cq_data_size < 4 {
                let why = format!("it carries {} bytes of immediate; 4 are needed", attributes.cq_data_size);
                return Err(Error::Unavailable { what: "this libfabric provider".into(), why });
            }
            self.carries_tags = attributes.cq_data_size >= 8;
            self.mr_mode = attributes.mr_mode;
            self.depth = (*(*info).tx_attr).size.clamp(1, MOST_WRITES);
            self.max_message = (*(*info).ep_attr).max_msg_size;
            check("fi_fabric", (library.fabric)((*info).fabric_attr, &mut self.fabric, null_mut()))?;
            let opened = ((*(*self.fabric).ops).domain)(self.fabric, info, &mut self.domain, null_mut());
            check("fi_domain", opened)?;
            let operations = &*(*self.domain).ops;
            let mut av = AvAttr {
                kind: FI_AV_TABLE,
                rx_ctx_bits: 0,
                count: 64,
                ep_per_node: 0,
                name: null(),
                map_addr: null_mut(),
                flags: 0,
            };
            check("fi_av_open", (operations.av_open)(self.domain, &mut av, &mut self.av, null_mut()))?;
            let mut cq = CqAttr {
                size: 4096,
                flags: 0,
                format: FI_CQ_FORMAT_DATA,
                wait_obj: FI_WAIT_NONE,
                signaling_vector: 0,
                wait_cond: 0,
                wait_set: null_mut(),
            };
            // tcp and net have descriptors to wait for; efa has none.
            let mut waited = cq;
            waited.wait_obj = FI_WAIT_FD;
            let into = if self.stays_readable { &mut self.silent } else { &mut self.cq };
            if (operations.cq_open)(self.domain, &mut waited, into, null_mut()) == 0 {
                let (fid, mut found): (_, RawFd) = (&raw mut (**into).fid, -1);
                let got = ((*(*fid).ops).control)(fid, FI_GETWAIT, (&raw mut found).cast());
                self.wait_descriptor = Some(found).filter(|found| got == 0 && *found >= 0);
            }
            if self.cq.is_null() {
                check("fi_cq_open", (operations.cq_open)(self.domain, &mut cq, &mut self.cq, null_mut()))?;
            }
            check("fi_endpoint", (operations.endpoint)(self.domain, info, &mut self.ep, null_mut()))?;
            let fid = &raw mut (*self.ep).fid;
            check("fi_ep_bind", ((*(*fid).ops).bind)(fid, &raw mut (*self.av).fid, 0))?;
            check("fi_ep_bind", ((*(*fid).ops).bind)(fid, &raw mut (*self.cq).fid, FI_SEND | FI_RECV))?;
            if self.wait_descriptor.is_none() {
                let (events, wait_obj) = (FI_CNTR_EVENTS_COMP, FI_WAIT_NONE);
                let mut counter = CntrAttr { events, wait_obj, wait_set: null_mut(), flags: 0 };
                // A provider without such counters is looked at less cleverly.
                if (operations.cntr_open)(self.domain, &mut counter, &mut self.cntr, null_mut()) == 0
                    && ((*(*fid).ops).bind)(fid, &raw mut (*self.cntr).fid, FI_REMOTE_WRITE) != 0
                {
                    close(fid_of(std::mem::replace(&mut self.cntr, null_mut()).cast()));
                }
            }
            check("fi_enable", ((*(*fid).ops).control)(fid, FI_ENABLE, null_mut()))
        }
    }

    /// The endpoint's own address.
    pub fn name(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; crate::wire::descriptor::MAX_ENDPOINT];
        let mut len = bytes.len();
        // SAFETY: the endpoint is enabled, and `len` is the room that there is.
        let code = unsafe {
            let getname = (*(*self.ep).cm).getname;
            getname(&raw mut (*self.ep).fid, bytes.as_mut_ptr().cast(), &mut len)
        };
        self.check("fi_getname", code)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Makes a peer's address known; the table's entry for it, if it is one.
    pub fn insert(&self, address: &[u8]) -> Option<u64> {
        let mut inserted = FI_ADDR_UNSPEC;
        // SAFETY: the address was checked to have the length of this endpoint's own, so the provider reads inside it.
        let count = unsafe {
            let insert = (*(*self.av).ops).insert;
            insert(self.av, address.as_ptr().cast(), 1, &mut inserted, 0, null_mut())
        };
        (count == 1 && inserted != FI_ADDR_UNSPEC).then_some(inserted)
    }

    /// Forgets a peer's address. Nobody may use its entry any more.
    pub fn remove(&self, mut address: u64) {
        // SAFETY: the entry came from `insert`.
        let _ = unsafe { ((*(*self.av).ops).remove)(self.av, &mut address, 1, 0) };
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The bytes stay valid until [`Self::deregister`] has returned.
    pub unsafe fn register(
        &self,
        (address, len): (usize, usize),
        device: Device,
        read_only: bool,
        key: u64,
    ) -> Result<Memory, Error> {
        let mut mr = null_mut();
        let reads = if self.reads { FI_READ | FI_REMOTE_READ } else { 0 };
        // FI_READ brings bytes here.
        let both = FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE | reads;
        let access = if read_only { FI_SEND | FI_WRITE | reads & FI_REMOTE_READ } else { both };
        let bytes = libc::iovec { iov_base: address as *mut c_void, iov_len: len };
        let (iface, number) = match device {
            Device::Host => (FI_HMEM_SYSTEM, 0),
            Device::Cuda(ordinal) => (FI_HMEM_CUDA, u64::from(ordinal)),
        };
        let attributes = MrAttr {
            iov: &raw const bytes,
            iov_count: 1,
            access,
            offset: 0,
            requested_key: key,
            context: null_mut(),
            auth_key_size: 0,
            auth_key: null_mut(),
            iface,
            device: number,
            rest: [0; 4],
        };
        // SAFETY: the caller promises that the bytes are valid; the domain is open, and the attributes are read during the call only.
        let code = unsafe {
            let operations = &*(*self.domain).mr;
            let fid = &raw mut (*self.domain).fid;
            match device {
                Device::Host => {
                    (operations.reg)(fid, address as *const c_void, len, access, 0, key, 0, &mut mr, null_mut())
                }
                Device::Cuda(_) => (operations.regattr)(fid, &attributes, 0, &mut mr),
            }
        };
        self.check(if device == Device::Host { "fi_mr_reg" } else { "fi_mr_regattr" }, code)?;
        if self.mr_mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: both objects are open, and such a region is bound and enabled before use.
            let code = unsafe {
                let fid = &raw mut (*mr).fid;
                let bound = ((*(*fid).ops).bind)(fid, &raw mut (*self.ep).fid, 0);
                if bound == 0 { ((*(*fid).ops).control)(fid, FI_ENABLE, null_mut()) } else { bound }
            };
            if let Err(error) = self.check("fi_mr_enable", code) {
                close(fid_of(mr.cast()));
                return Err(error);
            }
        }
        let base = if self.mr_mode & FI_MR_VIRT_ADDR != 0 { address as u64 } else { 0 };
        // SAFETY: the region is registered.
        Ok(Memory { mr, key: unsafe { (*mr).key }, base })
    }

    pub fn deregister(&self, memory: &Memory) -> Result<(), Error> {
        self.check("fi_close", close(fid_of(memory.mr.cast())))
    }

    fn desc(memory: &Memory) -> *mut c_void {
        // SAFETY: the region is registered as long as its `Memory` is in use.
        unsafe { (*memory.mr).mem_desc }
    }

    /// Posts a receive. The bytes and the context stay in place until its completion.
    pub fn recv(&self, memory: &Memory, address: usize, len: usize, context: &PlacedContext) -> isize {
        // SAFETY: the bytes lie in registered memory, which the caller keeps, as it keeps the context.
        unsafe {
            let recv = (*(*self.ep).msg).recv;
            recv(self.ep, address as *mut c_void, len, Self::desc(memory), FI_ADDR_UNSPEC, context.0.cast())
        }
    }

    /// Posts a message. The bytes and the context stay in place until its completion, which says that they may be used again
    /// and not that the message has arrived: so a peer that is gone does not keep them.
    pub fn send(&self, memory: &Memory, address: usize, len: usize, to: u64, context: &PlacedContext) -> isize {
        self.send_message(memory, (address, len), to, None, context)
    }

    /// Posts a message. One with an immediate has arrived when it completes.
    pub fn send_message(
        &self,
        memory: &Memory,
        (address, len): (usize, usize),
        to: u64,
        data: Option<u64>,
        context: &PlacedContext,
    ) -> isize {
        let local = libc::iovec { iov_base: address as *mut c_void, iov_len: len };
        let mut desc = Self::desc(memory);
        let has_data = data.is_some();
        let data = data.unwrap_or(0);
        let context = context.0.cast();
        let message = Msg { iov: &local, desc: &mut desc, iov_count: 1, addr: to, context, data };
        let flags = FI_COMPLETION | if has_data { FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE } else { 0 };
        // SAFETY: as for `recv`; the message itself is read during the call only.
        unsafe { ((*(*self.ep).msg).sendmsg)(self.ep, &message, flags) }
    }

    /// Posts a write. The bytes and the context stay in place until its completion, which says that the bytes have landed.
    pub fn write(
        &self,
        memory: &Memory,
        (address, len): (usize, usize),
        to: u64,
        (remote, key): (u64, u64),
        data: Option<u64>,
        context: &PlacedContext,
    ) -> isize {
        let local = libc::iovec { iov_base: address as *mut c_void, iov_len: len };
        let remote = RmaIov { addr: remote, len, key };
        let mut desc = Self::desc(memory);
        let mut message = MsgRma::one(&local, &mut desc, to, &remote, context.0.cast());
        message.data = data.unwrap_or(0);
        let flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | if data.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
        // SAFETY: as for `recv`; the message itself is read during the call only.
        unsafe { ((*(*self.ep).rma).writemsg)(self.ep, &message, flags) }
    }

    /// Posts a read. The memory and the context stay in place until its completion, which says that the bytes are here.
    pub fn read(
        &self,
        memory: &Memory,
        (address, len): (usize, usize),
        from: u64,
        (remote, key): (u64, u64),
        context: &PlacedContext,
    ) -> isize {
        let local = libc::iovec { iov_base: address as *mut c_void, iov_len: len };
        let remote = RmaIov { addr: remote, len, key };
        let mut desc = Self::desc(memory);
        let message = MsgRma::one(&local, &mut desc, from, &remote, context.0.cast());
        // SAFETY: as for `recv`; the message itself is read during the call only.
        unsafe { ((*(*self.ep).rma).readmsg)(self.ep, &message, FI_COMPLETION) }
    }

    /// A descriptor that becomes readable when there is something to poll for.
    pub fn wait_descriptor(&self) -> Option<RawFd> {
        self.wait_descriptor
    }

    /// Prepares for a wait for the descriptor. False: there is something to poll for.
    pub fn may_wait(&self) -> bool {
        let queue = if self.stays_readable { self.silent } else { self.cq };
        // SAFETY: fabric and queue are open, and the queue has a wait object.
        unsafe {
            let waited = [&raw mut (*queue).fid];
            ((*(*self.fabric).ops).trywait)(self.fabric, waited.as_ptr(), 1) == 0
        }
    }

    /// How many writes of peers have landed here, where the provider counts them.
    pub fn peer_writes(&self) -> u64 {
        if self.cntr.is_null() {
            return 0;
        }
        // SAFETY: the counter is open.
        unsafe { ((*(*self.cntr).ops).read)(self.cntr) }
    }

    /// Makes progress and reports some completions. Returns false once there are no more.
    pub fn poll(&self, mut report: impl FnMut(Completion)) -> Result<bool, isize> {
        // Left as it is: most looks find nothing, and are not to pay for that.
        let mut entries = [const { MaybeUninit::<CqEntry>::uninit() }; BATCH];
        // SAFETY: there is room for BATCH entries of the queue's format.
        let count = unsafe { ((*(*self.cq).ops).read)(self.cq, entries.as_mut_ptr().cast(), BATCH) };
        if count == -FI_EAVAIL {
            self.poll_error(&mut report);
            return Ok(true);
        }
        if count < 0 {
            return if count == -FI_EAGAIN { Ok(false) } else { Err(count) };
        }
        for entry in entries.iter().take(count as usize) {
            // SAFETY: the provider has written so many entries.
            let entry = unsafe { entry.assume_init_ref() };
            // Anybody can send a message with such data; a write needs a key.
            let written = entry.flags & FI_REMOTE_WRITE != 0;
            if entry.flags & FI_REMOTE_CQ_DATA != 0 && written {
                let tag = self.carries_tags.then_some((entry.data >> 32) as u32);
                report(Completion::Immediate { imm: entry.data as u32, tag });
            }
            // A write of a peer has no operation of this side, and whatever else in the place of its context.
            let own = entry.flags & FI_REMOTE_CQ_DATA == 0 || entry.flags & (FI_RECV | FI_MSG) != 0;
            if own && let Some(slot) = slot_of(entry.context) {
                // Bytes that came with an immediate are there for its sake.
                let len = if entry.flags & FI_REMOTE_CQ_DATA == 0 { entry.len } else { 0 };
                report(Completion::Done { slot, len });
            }
        }
        Ok(count as usize == BATCH)
    }

    fn poll_error(&self, report: &mut impl FnMut(Completion)) {
        // SAFETY: all zeros is a valid entry to fill in.
        let mut error: CqError = unsafe { std::mem::zeroed() };
        // SAFETY: the entry has the layout of this interface version.
        let count = unsafe { ((*(*self.cq).ops).readerr)(self.cq, &mut error, 0) };
        // A failed write of a peer has no operation of this side.
        if count == 1
            && error.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ) == 0
            && let Some(slot) = slot_of(error.context)
        {
            report(Completion::Failed { slot, code: error.err as isize });
        }
    }
}

/// The slot of a completed operation.
fn slot_of(context: *mut c_void) -> Option<usize> {
    // SAFETY: every operation of this endpoint is posted with a Context, which its slot keeps until the completion is seen.
    unsafe { context.cast::<Context>().as_ref() }.map(|context| context.slot)
}

/// Every object of libfabric begins with its `Fid`.
fn fid_of(object: *mut c_void) -> *mut Fid {
    object.cast()
}

fn close(fid: *mut Fid) -> i32 {
    if fid.is_null() {
        return 0;
    }
    // SAFETY: the object is open, and its owner forgets it after this.
    unsafe { ((*(*fid).ops).close)(fid) }
}

impl Endpoint {
    /// Ends every operation. After this nothing may be posted; what memory is registered can be let go.
    pub fn shut(&mut self) {
        close(fid_of(std::mem::replace(&mut self.ep, null_mut()).cast()));
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // In the reverse order of opening. A refusal has nobody left to go to.
        let (queues, tables) =
            ([self.cq.cast(), self.silent.cast()], [self.av.cast(), self.domain.cast(), self.fabric.cast()]);
        for object in [self.ep.cast(), self.cntr.cast()].into_iter().chain(queues).chain(tables) {
            close(fid_of(object));
        }
        if !self.info.is_null() {
            // SAFETY: it came from getinfo and is not used any more.
            unsafe { (self.library.freeinfo)(self.info) };
        }
    }
}
