//! The parts of libibverbs' binary interface that are used: layouts of its header, and the symbols of their version.
//!
//! The library is opened at run time, so the engine works without it. Three calls have no symbol: `ibv_poll_cq`,
//! `ibv_post_send` and `ibv_post_recv` are inline functions of the header and go through the context's table of operations.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::error::Error;

pub(super) const IBV_QPT_RC: c_int = 2;
pub(super) const IBV_QPT_UD: c_int = 4;

pub(super) const IBV_QPS_INIT: c_int = 1;
pub(super) const IBV_QPS_RTR: c_int = 2;
pub(super) const IBV_QPS_RTS: c_int = 3;
pub(super) const IBV_QPS_ERR: c_int = 6;

pub(super) const IBV_QP_STATE: c_int = 1;
pub(super) const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const IBV_QP_PORT: c_int = 1 << 5;
pub(super) const IBV_QP_QKEY: c_int = 1 << 6;
pub(super) const IBV_QP_AV: c_int = 1 << 7;
pub(super) const IBV_QP_PATH_MTU: c_int = 1 << 8;
pub(super) const IBV_QP_TIMEOUT: c_int = 1 << 9;
pub(super) const IBV_QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const IBV_QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const IBV_QP_RQ_PSN: c_int = 1 << 12;
pub(super) const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const IBV_QP_SQ_PSN: c_int = 1 << 16;
pub(super) const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const IBV_QP_DEST_QPN: c_int = 1 << 20;

pub(super) const IBV_ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(super) const IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;
/// Optional: a device or a library that does not know it ignores it.
pub(super) const IBV_ACCESS_RELAXED_ORDERING: c_int = 1 << 20;

pub(super) const IBV_WR_RDMA_WRITE: c_int = 0;
pub(super) const IBV_WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub(super) const IBV_WR_SEND: c_int = 2;
pub(super) const IBV_WR_RDMA_READ: c_int = 4;
pub(super) const IBV_SEND_SIGNALED: c_uint = 1 << 1;

pub(super) const IBV_WC_SUCCESS: c_int = 0;
pub(super) const IBV_WC_WR_FLUSH_ERR: c_int = 5;
pub(super) const IBV_WC_REM_ACCESS_ERR: c_int = 10;
pub(super) const IBV_WC_RETRY_EXC_ERR: c_int = 12;
pub(super) const IBV_WC_RECV_RDMA_WITH_IMM: c_int = 129;

/// Bytes of the routing header that stand before a datagram in its receive.
pub(super) const GRH: usize = 40;

/// A function that is not called here; it keeps the place.
type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub(super) struct Device {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Pd {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Ah {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Operations {
    before_poll: [Unused; 11],
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int,
    before_post: [Unused; 13],
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut Qp, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int,
}

#[repr(C)]
pub(super) struct Context {
    pub device: *mut Device,
    pub operations: Operations,
}

#[repr(C)]
pub(super) struct Cq {
    pub context: *mut Context,
}

#[repr(C)]
pub(super) struct Qp {
    pub context: *mut Context,
    pointers: [*mut c_void; 5],
    number_in_kernel: u32,
    pub number: u32,
}

#[repr(C)]
pub(super) struct Mr {
    pointers: [*mut c_void; 3],
    len: usize,
    number_in_kernel: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub(super) struct DeviceAttributes {
    versions: [u8; 64],
    identities: [u64; 4],
    vendor: [u32; 3],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    capabilities: c_uint,
    max_sge: [c_int; 2],
    max_cq: c_int,
    pub max_cqe: c_int,
    rest: [u32; 24],
}

/// Longer than the structure of any version, since the library fills in what it knows.
#[repr(C)]
pub(super) struct PortAttributes {
    pub state: c_int,
    max_mtu: c_int,
    pub active_mtu: c_int,
    gid_table_len: c_int,
    capabilities: u32,
    pub max_message: u32,
    violations: [u32; 2],
    pkey_table_len: u16,
    pub lid: u16,
    rest: [u32; 23],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub send_requests: u32,
    pub receive_requests: u32,
    pub send_pieces: u32,
    pub receive_pieces: u32,
    pub inline_bytes: u32,
}

#[repr(C)]
pub(super) struct QpSetup {
    pub context: *mut c_void,
    pub send_cq: *mut Cq,
    pub receive_cq: *mut Cq,
    pub shared_receives: *mut c_void,
    pub capacity: Capacity,
    pub kind: c_int,
    pub signal_all: c_int,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Address {
    pub gid: [u8; 16],
    pub flow_label: u32,
    pub own_gid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub lid: u16,
    pub service_level: u8,
    pub path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct QpAttributes {
    pub state: c_int,
    current_state: c_int,
    pub path_mtu: c_int,
    migration: c_int,
    pub qkey: u32,
    pub receive_psn: u32,
    pub send_psn: u32,
    pub destination: u32,
    pub access: c_uint,
    capacity: Capacity,
    pub address: Address,
    alternative: Address,
    pub pkey_index: u16,
    alternative_pkey: u16,
    drained: [u8; 2],
    pub reads_out: u8,
    pub reads_in: u8,
    pub min_rnr_timer: u8,
    pub port: u8,
    pub timeout: u8,
    pub retries: u8,
    pub rnr_retries: u8,
    alternative_path: [u8; 2],
    rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub address: u64,
    pub len: u32,
    pub lkey: u32,
}

/// Where a write goes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Remote {
    pub address: u64,
    pub rkey: u32,
}

/// Where a datagram goes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Recipient {
    pub ah: *mut Ah,
    pub qpn: u32,
    pub qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Destination {
    pub remote: Remote,
    pub recipient: Recipient,
    room: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SendRequest {
    pub id: u64,
    pub next: *mut SendRequest,
    pub pieces: *mut Piece,
    pub num_pieces: c_int,
    pub opcode: c_int,
    pub flags: c_uint,
    /// Big-endian.
    pub imm: u32,
    pub destination: Destination,
    rest: [u64; 7],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ReceiveRequest {
    pub id: u64,
    pub next: *mut ReceiveRequest,
    pub pieces: *mut Piece,
    pub num_pieces: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Completion {
    pub id: u64,
    pub status: c_int,
    pub opcode: c_int,
    vendor_error: u32,
    pub len: u32,
    /// Big-endian.
    pub imm: u32,
    pub qpn: u32,
    pub source_qpn: u32,
    flags: c_uint,
    rest: [u16; 4],
}

impl SendRequest {
    pub const fn empty() -> Self {
        Self {
            id: 0,
            next: null_mut(),
            pieces: null_mut(),
            num_pieces: 0,
            opcode: IBV_WR_SEND,
            flags: IBV_SEND_SIGNALED,
            imm: 0,
            destination: Destination { room: [0; 4] },
            rest: [0; 7],
        }
    }
}

impl Completion {
    pub const fn empty() -> Self {
        Self {
            id: 0,
            status: 0,
            opcode: 0,
            vendor_error: 0,
            len: 0,
            imm: 0,
            qpn: 0,
            source_qpn: 0,
            flags: 0,
            rest: [0; 4],
        }
    }
}

macro_rules! library {
    ($($(#[$doc:meta])* $field:ident $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that the library exports by name.
        pub(super) struct Library {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Registration with optional flags, which old libraries do not have.
            pub reg_mr_iova: Option<unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr>,
            /// Registration of a DMA-BUF, which rdma-core has from version 34 on: domain, offset, bytes, address, file, access.
            pub reg_dmabuf: Option<unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr>,
        }

        impl Library {
            fn load() -> Result<Self, String> {
                // SAFETY: a constant, terminated name; the flags are valid.
                let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err("libibverbs.so.1 cannot be loaded (apt-get install libibverbs1 ibverbs-providers)".into());
                }
                let symbol = |name: &CStr, version: &CStr| {
                    // SAFETY: the library is open, and both names are terminated.
                    unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) }
                };
                let needed = |name: &CStr| {
                    let found = symbol(name, c"IBVERBS_1.1");
                    let missing = || format!("libibverbs.so.1 lacks {name:?} of version IBVERBS_1.1");
                    if found.is_null() { Err(missing()) } else { Ok(found) }
                };
                let iova = symbol(c"ibv_reg_mr_iova2", c"IBVERBS_1.8");
                let dmabuf = symbol(c"ibv_reg_dmabuf_mr", c"IBVERBS_1.12");
                // SAFETY: these are the signatures that infiniband/verbs.h gives for these names and versions.
                unsafe {
                    Ok(Self {
                        $($field: std::mem::transmute::<
                            *mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?
                        >(needed($symbol)?),)*
                        reg_mr_iova: std::mem::transmute::<
                            *mut c_void, Option<unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr>
                        >(iova),
                        reg_dmabuf: std::mem::transmute::<
                            *mut c_void, Option<unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr>
                        >(dmabuf),
                    })
                }
            }
        }
    };
}

library! {
    get_device_list c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    free_device_list c"ibv_free_device_list": fn(*mut *mut Device);
    get_device_name c"ibv_get_device_name": fn(*mut Device) -> *const c_char;
    open_device c"ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device c"ibv_close_device": fn(*mut Context) -> c_int;
    query_device c"ibv_query_device": fn(*mut Context, *mut DeviceAttributes) -> c_int;
    query_port c"ibv_query_port": fn(*mut Context, u8, *mut PortAttributes) -> c_int;
    alloc_pd c"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd c"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr c"ibv_reg_mr": fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr c"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    /// Context, entries, the caller's own, event channel, interrupt vector.
    create_cq c"ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
    destroy_cq c"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    create_qp c"ibv_create_qp": fn(*mut Pd, *mut QpSetup) -> *mut Qp;
    modify_qp c"ibv_modify_qp": fn(*mut Qp, *mut QpAttributes, c_int) -> c_int;
    destroy_qp c"ibv_destroy_qp": fn(*mut Qp) -> c_int;
    create_ah c"ibv_create_ah": fn(*mut Pd, *mut Address) -> *mut Ah;
    destroy_ah c"ibv_destroy_ah": fn(*mut Ah) -> c_int;
    status_text c"ibv_wc_status_str": fn(c_int) -> *const c_char;
}

impl Library {
    /// Opens libibverbs, once; it stays open.
    pub fn open() -> Result<&'static Self, Error> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let unavailable = |why: &String| Error::Unavailable { what: "libibverbs".into(), why: why.clone() };
        LIBRARY.get_or_init(Self::load).as_ref().map_err(unavailable)
    }

    /// libibverbs' words for the status of a completion.
    pub fn words(&self, status: c_int) -> String {
        // SAFETY: it returns a terminated, static string for every status.
        let text = unsafe { CStr::from_ptr((self.status_text)(status)) };
        text.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Sizes and places as the C compiler has them for infiniband/verbs.h of rdma-core 44 on 64-bit Linux.
    #[test]
    fn layouts_are_those_of_the_header() {
        let found = [
            (offset_of!(Context, operations), 8),
            (offset_of!(Operations, poll_cq), 88),
            (offset_of!(Operations, post_send), 200),
            (offset_of!(Operations, post_recv), 208),
            (offset_of!(Qp, number), 52),
            (offset_of!(Mr, lkey), 36),
            (offset_of!(Mr, rkey), 40),
            (size_of::<DeviceAttributes>(), 232),
            (offset_of!(DeviceAttributes, max_qp), 108),
            (offset_of!(DeviceAttributes, max_qp_wr), 112),
            (offset_of!(DeviceAttributes, max_cqe), 132),
            (offset_of!(PortAttributes, active_mtu), 8),
            (offset_of!(PortAttributes, max_message), 20),
            (offset_of!(PortAttributes, lid), 34),
            (size_of::<Capacity>(), 20),
            (size_of::<QpSetup>(), 64),
            (offset_of!(QpSetup, capacity), 32),
            (offset_of!(QpSetup, kind), 52),
            (size_of::<Address>(), 32),
            (offset_of!(Address, lid), 24),
            (offset_of!(Address, is_global), 29),
            (size_of::<QpAttributes>(), 144),
            (offset_of!(QpAttributes, address), 56),
            (offset_of!(QpAttributes, pkey_index), 120),
            (offset_of!(QpAttributes, reads_out), 126),
            (offset_of!(QpAttributes, min_rnr_timer), 128),
            (offset_of!(QpAttributes, rnr_retries), 132),
            (size_of::<Piece>(), 16),
            (size_of::<SendRequest>(), 128),
            (offset_of!(SendRequest, imm), 36),
            (offset_of!(SendRequest, destination), 40),
            (offset_of!(Remote, rkey), 8),
            (offset_of!(Recipient, qpn), 8),
            (size_of::<ReceiveRequest>(), 32),
            (size_of::<Completion>(), 48),
            (offset_of!(Completion, imm), 24),
            (offset_of!(Completion, source_qpn), 32),
        ];
        for (index, (found, right)) in found.into_iter().enumerate() {
            assert_eq!(found, right, "entry {index}");
        }
        assert!(size_of::<PortAttributes>() >= 52);
    }
}
