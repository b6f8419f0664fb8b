//! The parts of libfabric's binary interface that are used: layouts of its headers, and the symbols of their version.
//!
//! The library is opened at run time, so the engine works without it. `fi_getinfo` and its kin are taken with the symbol version
//! FABRIC_1.3, whose structures these are; later libraries keep that version beside newer ones.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::error::Error;

pub(super) const FI_MSG: u64 = 1 << 1;
pub(super) const FI_RMA: u64 = 1 << 2;
pub(super) const FI_READ: u64 = 1 << 8;
pub(super) const FI_WRITE: u64 = 1 << 9;
pub(super) const FI_RECV: u64 = 1 << 10;
pub(super) const FI_SEND: u64 = 1 << 11;
pub(super) const FI_REMOTE_READ: u64 = 1 << 12;
pub(super) const FI_REMOTE_WRITE: u64 = 1 << 13;
pub(super) const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub(super) const FI_COMPLETION: u64 = 1 << 24;
pub(super) const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
/// Memory of devices.
pub(super) const FI_HMEM: u64 = 1 << 47;
pub(super) const FI_SOURCE: u64 = 1 << 57;
pub(super) const FI_CONTEXT: u64 = 1 << 59;
pub(super) const FI_CONTEXT2: u64 = 1 << 52;
pub(super) const FI_ADDR_UNSPEC: u64 = u64::MAX;

pub(super) const FI_MR_LOCAL: c_int = 1 << 2;
pub(super) const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub(super) const FI_MR_ALLOCATED: c_int = 1 << 5;
pub(super) const FI_MR_PROV_KEY: c_int = 1 << 6;
pub(super) const FI_MR_ENDPOINT: c_int = 1 << 9;
pub(super) const FI_MR_HMEM: c_int = 1 << 10;

pub(super) const FI_HMEM_SYSTEM: c_int = 0;
pub(super) const FI_HMEM_CUDA: c_int = 1;

pub(super) const FI_EP_RDM: c_int = 3;
pub(super) const FI_THREAD_DOMAIN: c_int = 3;
pub(super) const FI_AV_TABLE: c_int = 2;
pub(super) const FI_RM_ENABLED: c_int = 2;
pub(super) const FI_CQ_FORMAT_DATA: c_int = 3;
pub(super) const FI_WAIT_NONE: c_int = 0;
pub(super) const FI_WAIT_FD: c_int = 3;
pub(super) const FI_CNTR_EVENTS_COMP: c_int = 0;
/// The commands of `control` that get a wait object and enable an endpoint: the sixth and seventh of their enumeration.
pub(super) const FI_GETWAIT: c_int = 5;
pub(super) const FI_ENABLE: c_int = 6;

pub(super) const FI_EAGAIN: isize = 11;
pub(super) const FI_EAVAIL: isize = 259;

/// The interface version that is asked for.
pub(super) const API_VERSION: u32 = (1 << 16) | 9;

#[repr(C)]
pub(super) struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub(super) struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

#[repr(C)]
pub(super) struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub orders: [usize; 3],
    pub mem_tag_format: u64,
    pub ctx_cnt: [usize; 2],
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

#[repr(C)]
pub(super) struct DomainAttr {
    pub domain: *mut Domain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub counts: [usize; 10],
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

#[repr(C)]
pub(super) struct FabricAttr {
    pub fabric: *mut Fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub(super) struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

/// A function that is not called here; it keeps the place.
type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub(super) struct FidOps {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
}

#[repr(C)]
pub(super) struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *const FidOps,
}

#[repr(C)]
pub(super) struct FabricOps {
    pub size: usize,
    pub domain: unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int,
    pub passive_ep: Unused,
    pub eq_open: Unused,
    pub wait_open: Unused,
    pub trywait: unsafe extern "C" fn(*mut Fabric, *const *mut Fid, c_int) -> c_int,
}

#[repr(C)]
pub(super) struct Fabric {
    pub fid: Fid,
    pub ops: *const FabricOps,
}

#[repr(C)]
pub(super) struct DomainOps {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int,
    pub cq_open: unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int,
    pub endpoint: unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int,
    pub scalable_ep: Unused,
    pub cntr_open: unsafe extern "C" fn(*mut Domain, *mut CntrAttr, *mut *mut Cntr, *mut c_void) -> c_int,
}

#[repr(C)]
pub(super) struct MrOps {
    pub size: usize,
    /// Domain, address, length, access, offset, requested key, flags, region, context.
    pub reg:
        unsafe extern "C" fn(*mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut Mr, *mut c_void) -> c_int,
    pub regv: Unused,
    pub regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut Mr) -> c_int,
}

/// The registered memory and its place. Later versions read further fields, which are zeros here.
#[repr(C)]
pub(super) struct MrAttr {
    pub iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: c_int,
    /// A union of 8 bytes; for CUDA, the device's number.
    pub device: u64,
    pub rest: [u64; 4],
}

#[repr(C)]
pub(super) struct Domain {
    pub fid: Fid,
    pub ops: *const DomainOps,
    pub mr: *const MrOps,
}

#[repr(C)]
pub(super) struct Mr {
    pub fid: Fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub(super) struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub(super) struct AvOps {
    pub size: usize,
    pub insert: unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
    pub insertsvc: Unused,
    pub insertsym: Unused,
    pub remove: unsafe extern "C" fn(*mut Av, *mut u64, usize, u64) -> c_int,
}

#[repr(C)]
pub(super) struct Av {
    pub fid: Fid,
    pub ops: *const AvOps,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

/// A completion, in the format FI_CQ_FORMAT_DATA.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CqEntry {
    pub context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub(super) struct CqError {
    pub context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}

#[repr(C)]
pub(super) struct CqOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize,
    pub readfrom: Unused,
    pub readerr: unsafe extern "C" fn(*mut Cq, *mut CqError, u64) -> isize,
}

#[repr(C)]
pub(super) struct Cq {
    pub fid: Fid,
    pub ops: *const CqOps,
}

#[repr(C)]
pub(super) struct CntrAttr {
    pub events: c_int,
    pub wait_obj: c_int,
    pub wait_set: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub(super) struct CntrOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut Cntr) -> u64,
}

#[repr(C)]
pub(super) struct Cntr {
    pub fid: Fid,
    pub ops: *const CntrOps,
}

#[repr(C)]
pub(super) struct CmOps {
    pub size: usize,
    pub setname: Unused,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
}

#[repr(C)]
pub(super) struct Msg {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub context: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub(super) struct MsgOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut Ep, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
    pub recvv: Unused,
    pub recvmsg: Unused,
    pub send: Unused,
    pub sendv: Unused,
    pub sendmsg: unsafe extern "C" fn(*mut Ep, *const Msg, u64) -> isize,
}

#[repr(C)]
pub(super) struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
pub(super) struct MsgRma {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

impl MsgRma {
    /// One stretch here, one there.
    pub fn one(local: &libc::iovec, desc: &mut *mut c_void, addr: u64, remote: &RmaIov, context: *mut c_void) -> Self {
        Self { iov: local, desc, iov_count: 1, addr, rma_iov: remote, rma_iov_count: 1, context, data: 0 }
    }
}

#[repr(C)]
pub(super) struct RmaOps {
    pub size: usize,
    pub read: Unused,
    pub readv: Unused,
    pub readmsg: unsafe extern "C" fn(*mut Ep, *const MsgRma, u64) -> isize,
    pub write: Unused,
    pub writev: Unused,
    pub writemsg: unsafe extern "C" fn(*mut Ep, *const MsgRma, u64) -> isize,
}

#[repr(C)]
pub(super) struct Ep {
    pub fid: Fid,
    pub ops: *const c_void,
    pub cm: *const CmOps,
    pub msg: *const MsgOps,
    pub rma: *const RmaOps,
}

type GetInfo = unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut Info);
type DupInfo = unsafe extern "C" fn(*const Info) -> *mut Info;
type OpenFabric = unsafe extern "C" fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;

/// The functions that the library exports by name; everything else hangs on its objects.
pub(super) struct Library {
    pub getinfo: GetInfo,
    pub freeinfo: FreeInfo,
    pub dupinfo: DupInfo,
    pub fabric: OpenFabric,
    strerror: StrError,
}

impl Library {
    /// Opens libfabric, once; it stays open.
    pub fn open() -> Result<&'static Self, Error> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let unavailable = |why: &String| Error::Unavailable { what: "libfabric".into(), why: why.clone() };
        LIBRARY.get_or_init(Self::load).as_ref().map_err(unavailable)
    }

    fn load() -> Result<Self, String> {
        // SAFETY: a constant, terminated name; the flags are valid.
        let library = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err("libfabric.so.1 cannot be loaded (apt-get install libfabric1)".into());
        }
        let symbol = |name: &CStr, version: &CStr| {
            // SAFETY: the library is open, and both names are terminated.
            let found = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
            let missing = || format!("libfabric.so.1 lacks {name:?} of version {version:?}; 1.9 or later has it");
            if found.is_null() { Err(missing()) } else { Ok(found) }
        };
        let (getinfo, freeinfo) = (symbol(c"fi_getinfo", c"FABRIC_1.3")?, symbol(c"fi_freeinfo", c"FABRIC_1.3")?);
        let (dupinfo, fabric) = (symbol(c"fi_dupinfo", c"FABRIC_1.3")?, symbol(c"fi_fabric", c"FABRIC_1.1")?);
        let strerror = symbol(c"fi_strerror", c"FABRIC_1.0")?;
        // SAFETY: these are the signatures that rdma/fabric.h gives for these names and versions.
        unsafe {
            Ok(Self {
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(getinfo),
                freeinfo: std::mem::transmute::<*mut c_void, FreeInfo>(freeinfo),
                dupinfo: std::mem::transmute::<*mut c_void, DupInfo>(dupinfo),
                fabric: std::mem::transmute::<*mut c_void, OpenFabric>(fabric),
                strerror: std::mem::transmute::<*mut c_void, StrError>(strerror),
            })
        }
    }

    /// The names of the providers that have something on this machine.
    pub fn providers(&self) -> Vec<String> {
        let mut first = std::ptr::null_mut();
        // SAFETY: without hints, getinfo makes a list of everything, whose names are terminated; freeinfo takes the list back.
        unsafe {
            let found =
                (self.getinfo)(API_VERSION, std::ptr::null(), std::ptr::null(), 0, std::ptr::null_mut(), &mut first);
            let (mut names, mut info) = (Vec::new(), if found == 0 { first } else { std::ptr::null_mut() });
            while let Some(one) = info.as_ref() {
                let name =
                    one.fabric_attr.as_ref().map_or(std::ptr::null(), |attributes| attributes.prov_name.cast_const());
                if !name.is_null() {
                    names.push(CStr::from_ptr(name).to_string_lossy().into_owned());
                }
                info = one.next;
            }
            if !first.is_null() {
                (self.freeinfo)(first);
            }
            names.sort_unstable();
            names.dedup();
            names
        }
    }

    /// libfabric's words for an error code, positive or negative.
    pub fn words(&self, code: isize) -> String {
        // SAFETY: it returns a terminated, static string for every code.
        let text = unsafe { CStr::from_ptr((self.strerror)(code.unsigned_abs() as c_int)) };
        text.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes as the C compiler has them for rdma/*.h of libfabric 1.17 on 64-bit Linux.
    #[test]
    fn layouts_are_those_of_the_headers() {
        let sizes = [
            (size_of::<TxAttr>(), 80),
            (size_of::<RxAttr>(), 64),
            (size_of::<EpAttr>(), 96),
            (size_of::<DomainAttr>(), 192),
            (size_of::<FabricAttr>(), 32),
            (size_of::<Info>(), 120),
            (size_of::<Fid>(), 24),
            (size_of::<Mr>(), 40),
            (size_of::<AvAttr>(), 48),
            (size_of::<CqAttr>(), 40),
            (size_of::<CntrAttr>(), 24),
            (std::mem::offset_of!(FabricOps, trywait), 40),
            (std::mem::offset_of!(DomainOps, cntr_open), 40),
            (size_of::<CqEntry>(), 40),
            (size_of::<CqError>(), 80),
            (size_of::<MsgRma>(), 64),
            (size_of::<Msg>(), 48),
            (std::mem::offset_of!(MsgOps, sendmsg), 48),
            (std::mem::offset_of!(RmaOps, writemsg), 48),
            (std::mem::offset_of!(DomainAttr, caps), 136),
        ];
        for (index, (found, right)) in sizes.into_iter().enumerate() {
            assert_eq!(found, right, "structure {index}");
        }
    }
}
