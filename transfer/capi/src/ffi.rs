//! The types of the header, and pointers from outside as values that can be used.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use putget_transfer::bindings::{self, Word, status};
use putget_transfer::{
    Callback, Device, Done, Error, Grid, MrDesc, MrHandle, Options, Outcome, Pages, TransferId, Via,
};

pub(super) const ABI_VERSION: c_int = 5;
pub(super) const OK: c_int = 0;
pub(super) const INTERNAL: c_int = 9;

pub(super) type DoneCallback = Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>;
pub(super) type MessageCallback = Option<unsafe extern "C" fn(*mut c_void, *const Received)>;
pub(super) type PeerCallback = Option<unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *const c_char)>;
pub(super) type WatchCallback = Option<unsafe extern "C" fn(*mut c_void, u64, u64)>;

/// The error of the last call that failed, put into words when somebody asks.
#[derive(Default)]
struct Last {
    error: Option<Error>,
    words: CString,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// The words of the last failure on this thread.
pub(super) fn last_words() -> *const c_char {
    LAST.with(|last| {
        let mut last = last.borrow_mut();
        if let Some(error) = last.error.take() {
            last.words = text(&error.to_string());
        }
        last.words.as_ptr()
    })
}

pub(super) fn text(words: &str) -> CString {
    CString::new(words.replace('\0', " ")).unwrap_or_default()
}

/// Runs the body of a function: a status comes out, and the words of a failure stay with the thread.
pub(super) fn guarded(body: impl FnOnce() -> Result<(), Error>) -> c_int {
    let (code, last) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return OK,
        Ok(Err(error)) => (status(&error), Last { error: Some(error), words: CString::default() }),
        Err(_) => (INTERNAL, Last { error: None, words: text("a defect of this library") }),
    };
    LAST.with(|kept| *kept.borrow_mut() = last);
    code
}

pub(super) fn missing(argument: &'static str) -> Error {
    Error::argument(argument, "a null pointer came")
}

/// # Safety
/// Null, or valid as long as the result is used.
pub(super) unsafe fn from<'a, T>(argument: &'static str, pointer: *const T) -> Result<&'a T, Error> {
    // SAFETY: the caller promises that it is null or valid.
    unsafe { pointer.as_ref() }.ok_or_else(|| missing(argument))
}

/// # Safety
/// Valid for `len` values as long as the result is used; null is an error unless there are none.
pub(super) unsafe fn slice<'a, T>(argument: &'static str, pointer: *const T, len: usize) -> Result<&'a [T], Error> {
    match len {
        0 => Ok(&[]),
        _ if pointer.is_null() => Err(missing(argument)),
        // SAFETY: not null, and the caller promises that it is valid.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

/// # Safety
/// Null, or valid for one value.
pub(super) unsafe fn give<T>(argument: &'static str, into: *mut T, value: T) -> Result<(), Error> {
    if into.is_null() {
        return Err(missing(argument));
    }
    // SAFETY: not null, and the caller promises that it is valid.
    unsafe { into.write(value) };
    Ok(())
}

/// # Safety
/// `len` is null or valid; `into` is valid for `*len` bytes.
pub(super) unsafe fn copy_out(bytes: &[u8], into: *mut u8, len: *mut usize) -> Result<(), Error> {
    // SAFETY: the caller promises that it is null or valid.
    let len = unsafe { len.as_mut() }.ok_or_else(|| missing("len"))?;
    let room = std::mem::replace(len, bytes.len());
    if room < bytes.len() {
        return Err(Error::argument("len", format!("room for {room} bytes came; {} are needed", bytes.len())));
    }
    if into.is_null() {
        return Err(missing("bytes"));
    }
    // SAFETY: not null, and there is room for them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
    Ok(())
}

pub(super) fn seconds(argument: &'static str, value: f64) -> Result<Option<Duration>, Error> {
    let problem = |_| Error::argument(argument, format!("{value} came; a time from 0 s on is allowed"));
    // Longer than a century is "never".
    let time = Duration::try_from_secs_f64(value.min(3e9)).map_err(problem)?;
    Ok((!time.is_zero()).then_some(time))
}

/// A caller's pointer that travels to a callback.
#[derive(Clone, Copy)]
pub(super) struct Context(pub *mut c_void);

// SAFETY: it is only handed back to its owner, who said that callbacks come from another thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// The receiver of the outcome: a function, or a word that counts and a function that hears of failures alone.
///
/// # Safety
/// `word` is null, or valid until it has counted this.
pub(super) unsafe fn done(callback: DoneCallback, context: *mut c_void, word: *mut u64) -> Result<Done, Error> {
    let context = Context(context);
    let call = callback.map(|callback| {
        move |outcome: Outcome| {
            let words = outcome.as_ref().err().map(|error| text(&error.to_string()));
            let code = outcome.as_ref().err().map_or(OK, status);
            let words = words.as_ref().map_or(std::ptr::null(), |words| words.as_ptr());
            // SAFETY: the caller gave this function for this, and the words live through the call.
            unsafe { callback(context.pointer(), code, words) };
        }
    });
    // SAFETY: the caller promises it.
    let word = unsafe { Word::at(word)? };
    Ok(match (word, call) {
        (Some(word), call) => bindings::word(word, call.map(|call| -> Callback { Box::new(call) })),
        (None, Some(call)) => Done::callback(call),
        (None, None) => Done::ignore(),
    })
}

/// `pt_submit`.
#[repr(C)]
pub struct Submit {
    pub size: usize,
    pub deadline: f64,
    pub nic: c_int,
    pub device_group: c_int,
    pub has_imm: c_int,
    pub imm: u32,
    pub done: DoneCallback,
    pub context: *mut c_void,
    pub word: *mut u64,
}

/// `pt_expect`.
#[repr(C)]
pub struct Expect {
    pub size: usize,
    pub deadline: f64,
    pub senders: *const *const u8,
    pub sender_lens: *const usize,
    pub sender_count: usize,
    pub take: c_int,
    pub done: DoneCallback,
    pub context: *mut c_void,
    pub word: *mut u64,
}

impl Expect {
    /// # Safety
    /// As `Submit::read`.
    pub unsafe fn read(&self) -> Result<(Option<Duration>, Done), Error> {
        right_size(self.size, size_of::<Self>())?;
        let deadline = seconds("deadline", self.deadline)?;
        // SAFETY: the caller promises it.
        Ok((deadline, unsafe { done(self.done, self.context, self.word)? }))
    }
}

/// `pt_transfer`.
#[repr(C)]
pub struct Transfer {
    pub engine: u64,
    pub group: u64,
    pub id: u64,
}

/// `pt_pages`.
#[repr(C)]
pub struct CPages {
    pub indices: *const u64,
    pub count: usize,
    pub stride: u64,
    pub offset: u64,
    pub planes: u64,
    pub plane_stride: u64,
}

/// `pt_write_item`.
#[repr(C)]
pub struct CWriteItem {
    pub len: u64,
    pub src: *const Mr,
    pub src_offset: u64,
    pub desc: *const MrDesc,
    pub dst_offset: u64,
}

/// `pt_read_item`.
#[repr(C)]
pub struct CReadItem {
    pub len: u64,
    pub desc: *const MrDesc,
    pub src_offset: u64,
    pub dst: *const Mr,
    pub dst_offset: u64,
}

/// `pt_received`.
#[repr(C)]
pub struct Received {
    pub peer: *const c_char,
    pub address: *const u8,
    pub address_len: usize,
    pub bytes: *const c_void,
    pub len: usize,
}

/// `pt_part`.
#[repr(C)]
pub struct CPart {
    pub len: u64,
    pub src_offset: u64,
    pub dst_offset: u64,
}

/// `pt_scatter_dst`.
#[repr(C)]
pub struct CScatterDst {
    pub len: u64,
    pub src_offset: u64,
    pub desc: *const MrDesc,
    pub dst_offset: u64,
}

/// `pt_memory`.
#[repr(C)]
pub struct CMemory {
    pub start: *mut u8,
    pub len: usize,
    pub read_only: c_int,
}

/// -1 for the host's memory, otherwise a GPU.
pub(super) fn device(number: c_int) -> Result<Device, Error> {
    let problem = |_| Error::argument("device", format!("{number} came; -1 or the number of a GPU is allowed"));
    if number == -1 { Ok(Device::Host) } else { Ok(Device::Cuda(u16::try_from(number).map_err(problem)?)) }
}

/// Device group and NIC, where -1 leaves either to the engine.
pub(super) fn via(device_group: c_int, nic: c_int) -> Via {
    Via { device_group: usize::try_from(device_group).ok(), nic: usize::try_from(nic).ok() }
}

/// `pt_mr`.
pub struct Mr {
    pub handle: MrHandle,
    pub desc: MrDesc,
}

pub(super) fn right_size(found: usize, right: usize) -> Result<(), Error> {
    if found == right {
        return Ok(());
    }
    Err(Error::argument("size", format!("{found} came; this library was built with {right}: another version")))
}

impl Submit {
    /// # Safety
    /// `word` is null, or valid until the operation is over.
    pub unsafe fn read(&self) -> Result<(Options, Option<u32>, Done), Error> {
        right_size(self.size, size_of::<Self>())?;
        let deadline = seconds("deadline", self.deadline)?;
        let (nic, device_group) = (usize::try_from(self.nic).ok(), usize::try_from(self.device_group).ok());
        let imm = (self.has_imm != 0).then_some(self.imm);
        // SAFETY: the caller promises it.
        Ok((Options { deadline, nic, device_group }, imm, unsafe { done(self.done, self.context, self.word)? }))
    }
}

impl CPages {
    /// # Safety
    /// `indices` is valid for `count` values as long as the result is used.
    pub unsafe fn read<'a>(&self) -> Result<Grid<'a>, Error> {
        // SAFETY: the caller promises that it is valid.
        let indices = unsafe { slice("indices", self.indices, self.count)? };
        let pages = Pages { indices, stride: self.stride, offset: self.offset };
        Ok(Grid { pages, planes: self.planes.max(1), plane_stride: self.plane_stride })
    }
}

/// # Safety
/// Null, or a string that ends with a zero.
pub(super) unsafe fn string(argument: &'static str, pointer: *const c_char) -> Result<String, Error> {
    if pointer.is_null() {
        return Err(missing(argument));
    }
    // SAFETY: not null, and the caller promises that it ends.
    Ok(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// # Safety
/// Null, or valid for one value.
pub(super) unsafe fn give_transfer(into: *mut Transfer, id: TransferId) {
    // SAFETY: the caller promises that it is null or valid.
    if let Some(into) = unsafe { into.as_mut() } {
        let (engine, group, id) = bindings::transfer_numbers(id);
        *into = Transfer { engine, group: group as u64, id };
    }
}
