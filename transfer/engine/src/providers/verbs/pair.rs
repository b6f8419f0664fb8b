//! Queue pairs: their states, and posting to them in chains.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::rc::Rc;

use super::device::{Completions, Route, checked, failed};
use super::ffi::*;
use super::handshake::{End, Endpoint};
use crate::error::Error;

/// Work requests that one call gives to the device at most.
pub(super) const CHAIN: usize = 4;
/// Receives that one call gives to the device at most.
const RECEIVE_CHAIN: usize = 16;

/// How long a packet may stay unanswered: 4.096 us times two to this power, and how often it is sent again. A peer without
/// power is reported after four to fifteen seconds, as the device rounds it; the engine's heartbeat may be faster. Seven
/// repetitions would be the most, but soft-RoCE takes seven for "for ever".
const TIMEOUT: u8 = 17;
const RETRIES: u8 = 6;
/// A peer that has no receive posted makes the device wait and ask again for ever; the engine's deadlines end that.
const RETRY_FOR_EVER: u8 = 7;
/// The time that a device without a posted receive asks its peer to wait: 0.12 ms.
const RECEIVE_WAIT: u8 = 7;

/// A request to post: registered bytes, and their use.
pub(super) struct Posting<'a> {
    pub id: u64,
    pub address: u64,
    pub len: u32,
    pub lkey: u32,
    pub goal: Goal<'a>,
}

pub(super) enum Goal<'a> {
    Message,
    Write { remote: u64, rkey: u32, imm: Option<u32> },
    Read { remote: u64, rkey: u32 },
    Datagram { route: &'a Route, to: Endpoint },
}

/// Work requests of which most fields are always the same: each points to the next one and to its piece of memory.
struct Templates {
    requests: [SendRequest; CHAIN],
    pieces: [Piece; CHAIN],
}

pub(super) struct QueuePair {
    sends: Rc<Completions>,
    _receives: Rc<Completions>,
    qp: *mut Qp,
    /// In a place that does not move.
    templates: *mut Templates,
    filled: usize,
}

/// How many work requests a queue pair holds.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    pub sends: u32,
    pub receives: u32,
}

impl QueuePair {
    pub fn reliable(sends: &Rc<Completions>, receives: &Rc<Completions>, depths: Depths) -> Result<Self, Error> {
        Self::new(sends, receives, depths, IBV_QPT_RC)
    }

    /// A queue pair for datagrams, ready for use.
    pub fn datagram(completions: &Rc<Completions>, depths: Depths, qkey: u32) -> Result<Self, Error> {
        let pair = Self::new(completions, completions, depths, IBV_QPT_UD)?;
        let mut attributes = attributes(IBV_QPS_INIT);
        attributes.port = completions.port.number;
        attributes.qkey = qkey;
        pair.modify(&mut attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)?;
        pair.modify(&mut self::attributes(IBV_QPS_RTR), IBV_QP_STATE)?;
        pair.modify(&mut self::attributes(IBV_QPS_RTS), IBV_QP_STATE | IBV_QP_SQ_PSN)?;
        Ok(pair)
    }

    fn new(sends: &Rc<Completions>, receives: &Rc<Completions>, depths: Depths, kind: c_int) -> Result<Self, Error> {
        let port = &sends.port;
        let mut setup = QpSetup {
            context: null_mut(),
            send_cq: sends.cq,
            receive_cq: receives.cq,
            shared_receives: null_mut(),
            capacity: Capacity {
                send_requests: depths.sends,
                receive_requests: depths.receives,
                send_pieces: 1,
                receive_pieces: 1,
                inline_bytes: 0,
            },
            kind,
            // Each template asks for its completion itself.
            signal_all: 0,
        };
        // SAFETY: domain and queues are open and belong together; the setup is read and adjusted during the call only.
        let qp = unsafe { (port.library.create_qp)(port.pd, &mut setup) };
        if qp.is_null() {
            return Err(failed("ibv_create_qp"));
        }
        let empty = Piece { address: 0, len: 0, lkey: 0 };
        let templates = Templates { requests: [SendRequest::empty(); CHAIN], pieces: [empty; CHAIN] };
        let templates = Box::into_raw(Box::new(templates));
        for index in 0..CHAIN {
            // SAFETY: the templates are alive and nobody else's; index and index + 1 are inside where they are used.
            unsafe {
                let request = (&raw mut (*templates).requests).cast::<SendRequest>().add(index);
                (*request).pieces = (&raw mut (*templates).pieces).cast::<Piece>().add(index);
                (*request).next = if index + 1 < CHAIN { request.add(1) } else { null_mut() };
            }
        }
        Ok(Self { sends: Rc::clone(sends), _receives: Rc::clone(receives), qp, templates, filled: 0 })
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is there until this is dropped.
        unsafe { (*self.qp).number }
    }

    fn modify(&self, attributes: &mut QpAttributes, mask: c_int) -> Result<(), Error> {
        // SAFETY: the queue pair is there; the attributes are read during the call only.
        checked("ibv_modify_qp", unsafe { (self.sends.port.library.modify_qp)(self.qp, attributes, mask) })
    }

    /// Makes a reliable queue pair ready for posted receives; its peer may write to and read from this side's memory if `open`.
    pub fn prepare(&self, open: bool) -> Result<(), Error> {
        let mut attributes = attributes(IBV_QPS_INIT);
        attributes.port = self.sends.port.number;
        let access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        attributes.access = if open { access as c_uint } else { 0 };
        self.modify(&mut attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
    }

    /// Connects a prepared queue pair to its peer's; `psn` is the number of its own first packet.
    pub fn connect(&self, to: &Endpoint, theirs: End, psn: u32) -> Result<(), Error> {
        let port = &self.sends.port;
        let mut attributes = attributes(IBV_QPS_RTR);
        attributes.path_mtu = c_int::from(port.mtu.min(to.mtu));
        attributes.destination = theirs.qpn;
        attributes.receive_psn = theirs.psn;
        attributes.min_rnr_timer = RECEIVE_WAIT;
        // The ability of every device. Long reads fill the network also one by one.
        attributes.reads_in = 1;
        attributes.address = port.address(to);
        let mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let mask = mask | IBV_QP_STATE | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attributes, mask)?;
        let mut attributes = self::attributes(IBV_QPS_RTS);
        attributes.timeout = TIMEOUT;
        attributes.retries = RETRIES;
        attributes.rnr_retries = RETRY_FOR_EVER;
        attributes.send_psn = psn;
        attributes.reads_out = 1;
        let mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
        self.modify(&mut attributes, mask | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)
    }

    /// Ends all traffic: what is posted completes as flushed, and what arrives is thrown away.
    pub fn fail(&self) -> Result<(), Error> {
        self.modify(&mut attributes(IBV_QPS_ERR), IBV_QP_STATE)
    }

    /// How many work requests wait for [`Self::flush`].
    pub fn chained(&self) -> usize {
        self.filled
    }

    /// Forgets the work requests that wait for [`Self::flush`].
    pub fn discard(&mut self) {
        self.filled = 0;
    }

    /// Adds a work request to the chain; the bytes stay valid until its completion. A full chain is an error of the caller's
    /// and takes nothing.
    pub fn chain(&mut self, posting: &Posting<'_>) -> bool {
        if self.filled >= CHAIN {
            return false;
        }
        // SAFETY: the templates are alive and nobody else's, and `filled` is inside. What they point to is inside too.
        let (request, piece) = unsafe {
            let request = &mut *(&raw mut (*self.templates).requests).cast::<SendRequest>().add(self.filled);
            (request, &mut *(&raw mut (*self.templates).pieces).cast::<Piece>().add(self.filled))
        };
        request.id = posting.id;
        request.num_pieces = c_int::from(posting.len > 0);
        *piece = Piece { address: posting.address, len: posting.len, lkey: posting.lkey };
        match &posting.goal {
            Goal::Message => request.opcode = IBV_WR_SEND,
            Goal::Write { remote, rkey, imm } => {
                request.opcode = if imm.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
                request.imm = imm.unwrap_or(0).to_be();
                request.destination.remote = Remote { address: *remote, rkey: *rkey };
            }
            Goal::Read { remote, rkey } => {
                request.opcode = IBV_WR_RDMA_READ;
                request.destination.remote = Remote { address: *remote, rkey: *rkey };
            }
            Goal::Datagram { route, to } => {
                request.opcode = IBV_WR_SEND;
                request.destination.recipient = Recipient { ah: route.ah, qpn: to.qpn, qkey: to.qkey };
            }
        }
        self.filled += 1;
        true
    }

    /// Gives the chain to the device; says how many of its last requests were not taken.
    pub fn flush(&mut self) -> usize {
        let filled = std::mem::take(&mut self.filled);
        if filled == 0 {
            return 0;
        }
        // SAFETY: the first `filled` templates are filled in, and the chain ends behind them; the device reads them during
        // the call only. The operations belong to the queue pair's context.
        unsafe {
            let first = (&raw mut (*self.templates).requests).cast::<SendRequest>();
            let last = first.add(filled - 1);
            let next = std::mem::replace(&mut (*last).next, null_mut());
            let mut refused = first;
            let code = ((*(*self.qp).context).operations.post_send)(self.qp, first, &mut refused);
            (*last).next = next;
            if code == 0 {
                return 0;
            }
            let taken = refused.offset_from(first);
            filled - usize::try_from(taken).unwrap_or(0).min(filled)
        }
    }

    /// Posts receives of registered bytes, or of none; says how many were taken. The bytes stay valid until the completion.
    pub fn receive(&self, wanted: &[(u64, Option<Piece>)]) -> usize {
        let mut posted = 0;
        for group in wanted.chunks(RECEIVE_CHAIN) {
            let nothing = ReceiveRequest { id: 0, next: null_mut(), pieces: null_mut(), num_pieces: 0 };
            let mut requests = [nothing; RECEIVE_CHAIN];
            let mut pieces = [Piece { address: 0, len: 0, lkey: 0 }; RECEIVE_CHAIN];
            let (first, room) = (requests.as_mut_ptr(), pieces.as_mut_ptr());
            // SAFETY: a group has at most RECEIVE_CHAIN entries, so all are inside; the device reads them during the call.
            let taken = unsafe {
                for (index, (id, piece)) in group.iter().enumerate() {
                    let request = first.add(index);
                    (*request).id = *id;
                    (*request).next = if index + 1 < group.len() { first.add(index + 1) } else { null_mut() };
                    if let Some(piece) = piece {
                        *room.add(index) = *piece;
                        (*request).pieces = room.add(index);
                        (*request).num_pieces = 1;
                    }
                }
                let mut refused = first;
                match ((*(*self.qp).context).operations.post_recv)(self.qp, first, &mut refused) {
                    0 => group.len(),
                    _ => usize::try_from(refused.offset_from(first)).unwrap_or(0).min(group.len()),
                }
            };
            posted += taken;
            if taken < group.len() {
                break;
            }
        }
        posted
    }
}

/// Attributes for a change of state; what is not named by the mask of a change is not read.
fn attributes(state: c_int) -> QpAttributes {
    // SAFETY: all zeros are valid attributes.
    let mut attributes: QpAttributes = unsafe { std::mem::zeroed() };
    attributes.state = state;
    attributes
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is there and forgotten after this; the templates came from a box in `new`.
        unsafe {
            (self.sends.port.library.destroy_qp)(self.qp);
            drop(Box::from_raw(self.templates));
        }
    }
}
