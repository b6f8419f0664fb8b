//! The functions of `putget_transfer.h`. Pointers are checked for null here, everything else by the engine.
#![allow(unsafe_code)]

mod build;
mod ffi;

use std::ffi::{c_char, c_int, c_void};

use build::{EngineOptions, build};
use ffi::*;
use putget_transfer::{
    Engine, Error, ExpectOptions, ImmRange, Memory, MrDesc, NetAddr, Part, PeerGroup, Poster, Prepared, ReadItem,
    RecvOptions, ScatterDst, ScatterTemplate, SimNetwork, TransferId, UvmWatcher, WriteItem, bindings,
};

/// Defines functions as the header declares them: a body that may fail becomes a status.
macro_rules! functions {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)+) => {$(
        $(#[doc = $doc])*
        /// # Safety
        /// Every pointer is null or valid, as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the caller promises what the header asks for, and nothing else is assumed of the pointers.
            guarded(|| unsafe { $body })
        }
    )+};
}

/// Defines functions that destroy what others have made.
macro_rules! destroyers {
    ($($name:ident: $type:ty,)+) => {$(
        /// Frees it; null is allowed.
        ///
        /// # Safety
        /// It came from this library and is not used any more.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(object: *mut $type) {
            if !object.is_null() {
                // SAFETY: it came from a box, and the caller gives it up.
                let owned = unsafe { Box::from_raw(object) };
                guarded(|| {
                    drop(owned);
                    Ok(())
                });
            }
        }
    )+};
}

destroyers! {
    pt_network_destroy: SimNetwork,
    pt_engine_destroy: Engine,
    pt_desc_destroy: MrDesc,
    pt_group_destroy: PeerGroup,
    pt_watcher_destroy: UvmWatcher,
    pt_imms_destroy: ImmRange,
    pt_prepared_destroy: Prepared,
    pt_poster_destroy: Poster,
    pt_template_destroy: ScatterTemplate,
}

/// The version of the header that this library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn pt_abi_version() -> c_int {
    ABI_VERSION
}

/// The words of the last failure on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn pt_last_error() -> *const c_char {
    last_words()
}

functions! {
    /// Makes a simulated network.
    fn pt_network_create(seed: u64, network: *mut *mut SimNetwork) {
        give("network", network, Box::into_raw(Box::new(SimNetwork::new(seed))))
    }
    /// Starts an engine.
    fn pt_engine_create(options: *const EngineOptions, engine: *mut *mut Engine) {
        if engine.is_null() {
            return Err(missing("engine"));
        }
        give("engine", engine, Box::into_raw(Box::new(build(from("options", options)?)?)))
    }
    /// Closes it.
    fn pt_engine_close(engine: *mut Engine) {
        from("engine", engine)?.close();
        Ok(())
    }
    /// Makes another handle of an engine.
    fn pt_engine_share(engine: *const Engine, shared: *mut *mut Engine) {
        if shared.is_null() {
            return Err(missing("shared"));
        }
        let engine = from("engine", engine)?;
        bindings::check_open(engine)?;
        give("shared", shared, Box::into_raw(Box::new(engine.clone())))
    }
    /// Copies its address.
    fn pt_engine_address(engine: *const Engine, bytes: *mut u8, len: *mut usize) {
        copy_out(&from("engine", engine)?.main_address().to_bytes(), bytes, len)
    }
    /// Copies the address of one of its device groups.
    fn pt_group_address(engine: *const Engine, device_group: usize, bytes: *mut u8, len: *mut usize) {
        let address = from("engine", engine)?.group_address(device_group);
        let problem = || Error::argument("device_group", format!("{device_group} came; the engine has no such one"));
        copy_out(&address.ok_or_else(problem)?.to_bytes(), bytes, len)
    }
    /// Copies its counts.
    fn pt_metrics_text(engine: *const Engine, bytes: *mut c_char, len: *mut usize) {
        copy_out(text(&from("engine", engine)?.metrics_text()).as_bytes_with_nul(), bytes.cast(), len)
    }
    /// Registers memory.
    fn pt_reg_mr(engine: *mut Engine, start: *mut u8, len: usize, device: c_int, mr: *mut *mut Mr) {
        let device = self::device(device)?;
        if mr.is_null() {
            return Err(missing("mr"));
        }
        let (handle, desc) = from("engine", engine)?.reg_mr(start, len, device)?;
        give("mr", mr, Box::into_raw(Box::new(Mr { handle, desc })))
    }
    /// Registers much memory at once.
    fn pt_reg_mrs(
        engine: *mut Engine, memory: *const CMemory, count: usize, device: c_int, groups: *const usize,
        group_count: usize, mrs: *mut *mut Mr,
    ) {
        let device = self::device(device)?;
        if mrs.is_null() && count > 0 {
            return Err(missing("mrs"));
        }
        let one = |one: &CMemory| Memory { ptr: one.start, len: one.len, device, read_only: one.read_only != 0 };
        let memory: Vec<_> = slice("memory", memory, count)?.iter().map(one).collect();
        let groups = if groups.is_null() { None } else { Some(slice("groups", groups, group_count)?) };
        let made = from("engine", engine)?.reg_mrs(&memory, groups)?;
        for (at, (handle, desc)) in made.into_iter().enumerate() {
            mrs.add(at).write(Box::into_raw(Box::new(Mr { handle, desc })));
        }
        Ok(())
    }
    /// Allocates registered memory.
    fn pt_alloc_mr(engine: *mut Engine, len: usize, mr: *mut *mut Mr) {
        if mr.is_null() {
            return Err(missing("mr"));
        }
        let (handle, desc) = from("engine", engine)?.alloc_mr(len)?;
        give("mr", mr, Box::into_raw(Box::new(Mr { handle, desc })))
    }
    /// Copies its description.
    fn pt_mr_describe(mr: *const Mr, bytes: *mut u8, len: *mut usize) {
        copy_out(&from("mr", mr)?.desc.to_bytes(), bytes, len)
    }
    /// Ends a registration.
    fn pt_mr_destroy(engine: *mut Engine, mr: *mut Mr) {
        let (engine, Mr { handle, .. }) = (from("engine", engine)?, from("mr", mr)?);
        bindings::check_own(engine, "mr", handle)?;
        if handle.is_in_use() {
            return Err(Error::argument("mr", "transfers or mirrors still use it"));
        }
        engine.dereg_mr(Box::from_raw(mr).handle)
    }
    /// Reads a description.
    fn pt_desc_create(bytes: *const u8, len: usize, desc: *mut *mut MrDesc) {
        let read = MrDesc::from_bytes(slice("bytes", bytes, len)?);
        let read = read.map_err(|error| Error::argument("bytes", error.to_string()))?;
        give("desc", desc, Box::into_raw(Box::new(read)))
    }
    /// Writes one range.
    fn pt_submit_single_write(
        engine: *mut Engine, len: u64, src: *const Mr, src_offset: u64, dst: *const MrDesc, dst_offset: u64,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (src, dst) = ((&from("src", src)?.handle, src_offset), (from("dst", dst)?, dst_offset));
        let id = from("engine", engine)?.submit_single_write(len, imm, src, dst, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Makes a poster.
    fn pt_poster_create(
        engine: *mut Engine, device_group: c_int, nic: c_int, room: usize, poster: *mut *mut Poster,
    ) {
        if poster.is_null() {
            return Err(missing("poster"));
        }
        let made = from("engine", engine)?.poster(room, via(device_group, nic))?;
        give("poster", poster, Box::into_raw(Box::new(made)))
    }
    /// Posts one range.
    fn pt_post_write(
        poster: *const Poster, len: u64, src: *const Mr, src_offset: u64, dst: *const MrDesc, dst_offset: u64,
        submit: *const Submit,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (src, dst) = (src.as_ref().map(|src| (&src.handle, src_offset)), (from("dst", dst)?, dst_offset));
        from("poster", poster)?.write(len, imm, src, dst, &options, done)
    }
    /// Writes pages.
    fn pt_submit_paged_writes(
        engine: *mut Engine, page_len: u64, src: *const Mr, src_pages: CPages, dst: *const MrDesc, dst_pages: CPages,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (src, dst) = ((&from("src", src)?.handle, src_pages.read()?), (from("dst", dst)?, dst_pages.read()?));
        let id = from("engine", engine)?.submit_paged_writes(page_len, imm, src, dst, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Reads one range.
    fn pt_submit_read(
        engine: *mut Engine, len: u64, src: *const MrDesc, src_offset: u64, dst: *const Mr, dst_offset: u64,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (src, dst) = ((from("src", src)?, src_offset), (&from("dst", dst)?.handle, dst_offset));
        give_transfer(transfer, from("engine", engine)?.submit_read(len, imm, src, dst, &options, done)?);
        Ok(())
    }
    /// Reads pages.
    fn pt_submit_paged_reads(
        engine: *mut Engine, page_len: u64, src: *const MrDesc, src_pages: CPages, dst: *const Mr, dst_pages: CPages,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (src, dst) = ((from("src", src)?, src_pages.read()?), (&from("dst", dst)?.handle, dst_pages.read()?));
        let id = from("engine", engine)?.submit_paged_reads(page_len, imm, src, dst, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Prepares reads.
    fn pt_prepare_reads(
        engine: *mut Engine, items: *const CReadItem, count: usize, device_group: c_int, nic: c_int,
        prepared: *mut *mut Prepared,
    ) {
        if prepared.is_null() {
            return Err(missing("prepared"));
        }
        let read = |item: &CReadItem| {
            let dst = (&from("items", item.dst)?.handle, item.dst_offset);
            Ok(ReadItem { len: item.len, src: (from("items", item.desc)?, item.src_offset), dst })
        };
        let items = slice("items", items, count)?.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
        let made = from("engine", engine)?.prepare_reads(&items, via(device_group, nic))?;
        give("prepared", prepared, Box::into_raw(Box::new(made)))
    }
    /// Prepares a paged read.
    fn pt_prepare_paged_reads(
        engine: *mut Engine, page_len: u64, src: *const MrDesc, src_pages: CPages, dst: *const Mr, dst_pages: CPages,
        device_group: c_int, nic: c_int, prepared: *mut *mut Prepared,
    ) {
        if prepared.is_null() {
            return Err(missing("prepared"));
        }
        let (src, dst) = ((from("src", src)?, src_pages.read()?), (&from("dst", dst)?.handle, dst_pages.read()?));
        let made = from("engine", engine)?.prepare_paged_reads(page_len, src, dst, via(device_group, nic))?;
        give("prepared", prepared, Box::into_raw(Box::new(made)))
    }
    /// Prepares writes.
    fn pt_prepare_writes(
        engine: *mut Engine, items: *const CWriteItem, count: usize, device_group: c_int, nic: c_int,
        prepared: *mut *mut Prepared,
    ) {
        if prepared.is_null() {
            return Err(missing("prepared"));
        }
        let read = |item: &CWriteItem| {
            let src = (&from("items", item.src)?.handle, item.src_offset);
            Ok(WriteItem { len: item.len, src, dst: (from("items", item.desc)?, item.dst_offset) })
        };
        let items = slice("items", items, count)?.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
        let made = from("engine", engine)?.prepare_writes(&items, via(device_group, nic))?;
        give("prepared", prepared, Box::into_raw(Box::new(made)))
    }
    /// Prepares a paged write.
    fn pt_prepare_paged_writes(
        engine: *mut Engine, page_len: u64, src: *const Mr, src_pages: CPages, dst: *const MrDesc, dst_pages: CPages,
        device_group: c_int, nic: c_int, prepared: *mut *mut Prepared,
    ) {
        if prepared.is_null() {
            return Err(missing("prepared"));
        }
        let (src, dst) = ((&from("src", src)?.handle, src_pages.read()?), (from("dst", dst)?, dst_pages.read()?));
        let made = from("engine", engine)?.prepare_paged_writes(page_len, src, dst, via(device_group, nic))?;
        give("prepared", prepared, Box::into_raw(Box::new(made)))
    }
    /// Submits what was prepared.
    fn pt_submit_prepared(
        engine: *mut Engine, prepared: *const Prepared, submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let prepared = from("prepared", prepared)?;
        give_transfer(transfer, from("engine", engine)?.submit_prepared(prepared, imm, &options, done)?);
        Ok(())
    }
    /// Submits what was prepared, once a word is there.
    fn pt_submit_when(
        engine: *mut Engine, watcher: *const UvmWatcher, value: u64, prepared: *const Prepared, submit: *const Submit,
        transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let (watcher, prepared) = (from("watcher", watcher)?, from("prepared", prepared)?);
        let id = from("engine", engine)?.submit_when(watcher, value, prepared, imm, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Prepares scatters.
    fn pt_template_create(
        engine: *mut Engine, group: *const PeerGroup, src: *const Mr, dsts: *const *const MrDesc, count: usize,
        template: *mut *mut ScatterTemplate,
    ) {
        if template.is_null() {
            return Err(missing("template"));
        }
        let dsts = slice("dsts", dsts, count)?.iter().map(|dst| from("dsts", *dst)).collect::<Result<Vec<_>, _>>()?;
        let made = from("engine", engine)?.scatter_template(group.as_ref(), &from("src", src)?.handle, &dsts)?;
        give("template", template, Box::into_raw(Box::new(made)))
    }
    /// Scatters by a template.
    fn pt_submit_template(
        engine: *mut Engine, template: *const ScatterTemplate, parts: *const CPart, count: usize,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let read = |part: &CPart| Part { len: part.len, src_offset: part.src_offset, dst_offset: part.dst_offset };
        let parts: Vec<_> = slice("parts", parts, count)?.iter().map(read).collect();
        let template = from("template", template)?;
        give_transfer(transfer, from("engine", engine)?.submit_template(template, imm, &parts, &options, done)?);
        Ok(())
    }
    /// Writes to many.
    fn pt_submit_scatter(
        engine: *mut Engine, group: *const PeerGroup, src: *const Mr, dsts: *const CScatterDst, count: usize,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let read = |dst: &CScatterDst| {
            let place = (from("dsts", dst.desc)?, dst.dst_offset);
            Ok(ScatterDst { len: dst.len, src_offset: dst.src_offset, dst: place })
        };
        let dsts = slice("dsts", dsts, count)?.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
        let src = &from("src", src)?.handle;
        let id = from("engine", engine)?.submit_scatter(group.as_ref(), imm, src, &dsts, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Raises counters.
    fn pt_submit_barrier(
        engine: *mut Engine, group: *const PeerGroup, dsts: *const *const MrDesc, count: usize,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, imm, done) = from("submit", submit)?.read()?;
        let imm = imm.ok_or_else(|| Error::argument("has_imm", "0 came; a barrier needs an immediate"))?;
        let dsts = slice("dsts", dsts, count)?.iter().map(|dst| from("dsts", *dst)).collect::<Result<Vec<_>, _>>()?;
        let id = from("engine", engine)?.submit_barrier(group.as_ref(), imm, &dsts, &options, done)?;
        give_transfer(transfer, id);
        Ok(())
    }
    /// Sends a message.
    fn pt_submit_send(
        engine: *mut Engine, address: *const u8, address_len: usize, pool: u32, bytes: *const u8, len: usize,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, _, done) = from("submit", submit)?.read()?;
        let (address, bytes) = (read_address(slice("address", address, address_len)?)?, slice("bytes", bytes, len)?);
        give_transfer(transfer, from("engine", engine)?.submit_send_to(&address, pool, bytes, &options, done)?);
        Ok(())
    }
    /// Asks for the end of a transfer.
    fn pt_cancel(engine: *mut Engine, transfer: Transfer) {
        from("engine", engine)?.cancel(transfer_id(transfer))
    }
    /// Shuts a peer out.
    fn pt_fence(engine: *mut Engine, address: *const u8, address_len: usize, submit: *const Submit) {
        let (_, _, done) = from("submit", submit)?.read()?;
        from("engine", engine)?.fence(&read_address(slice("address", address, address_len)?)?, done)
    }
    /// Lets a peer in again.
    fn pt_admit(engine: *mut Engine, address: *const u8, address_len: usize) {
        from("engine", engine)?.admit(&read_address(slice("address", address, address_len)?)?)
    }
    /// Makes keys for one peer.
    fn pt_desc_for(
        engine: *mut Engine, mr: *const Mr, address: *const u8, address_len: usize, desc: *mut *mut MrDesc,
    ) {
        if desc.is_null() {
            return Err(missing("desc"));
        }
        let address = read_address(slice("address", address, address_len)?)?;
        let made = from("engine", engine)?.desc_for(&from("mr", mr)?.handle, &address)?;
        give("desc", desc, Box::into_raw(Box::new(made)))
    }
    /// Connects ahead of time.
    fn pt_add_peer_group(
        engine: *mut Engine, addresses: *const *const u8, lens: *const usize, count: usize, submit: *const Submit,
        group: *mut *mut PeerGroup,
    ) {
        if group.is_null() {
            return Err(missing("group"));
        }
        let (options, _, done) = from("submit", submit)?.read()?;
        let peers = self::addresses("addresses", addresses, lens, count)?;
        let made = from("engine", engine)?.add_peer_group(&peers, &options, done)?;
        give("group", group, Box::into_raw(Box::new(made)))
    }
    /// Provides buffers for messages.
    fn pt_submit_recvs(
        engine: *mut Engine, pool: u32, len: usize, count: usize, per_peer: usize, callback: MessageCallback,
        context: *mut c_void,
    ) {
        let (callback, context) = (callback.ok_or_else(|| missing("callback"))?, Context(context));
        let options = RecvOptions { pool, per_peer: (per_peer > 0).then_some(per_peer) };
        from("engine", engine)?.submit_recvs_to(len, count, &options, move |from, bytes| {
            let (name, address) = (text(&from.name().to_string()), from.to_bytes());
            let received = Received {
                peer: name.as_ptr(),
                address: address.as_ptr(),
                address_len: address.len(),
                bytes: bytes.as_ptr().cast(),
                len: bytes.len(),
            };
            callback(context.pointer(), &raw const received);
        })
    }
    /// Waits for a count.
    fn pt_expect_imm(engine: *mut Engine, imm: u32, count: u64, expect: *const Expect, transfer: *mut Transfer) {
        let expect = from("expect", expect)?;
        let (deadline, done) = expect.read()?;
        let senders = addresses("senders", expect.senders, expect.sender_lens, expect.sender_count)?;
        let options = ExpectOptions { deadline, senders: &senders, take: expect.take != 0 };
        give_transfer(transfer, from("engine", engine)?.expect_imm(imm, count, &options, done)?);
        Ok(())
    }
    /// Gives the word that holds a count.
    fn pt_imm_word(engine: *mut Engine, imm: u32, word: *mut *const u64) {
        give("word", word, from("engine", engine)?.imm_word(imm))
    }
    /// Reserves immediates.
    fn pt_reserve_imms(
        engine: *mut Engine, owner: *const c_char, has_first: c_int, first: u32, count: u32, imms: *mut *mut ImmRange,
        begin: *mut u32,
    ) {
        if imms.is_null() || begin.is_null() {
            return Err(missing(if imms.is_null() { "imms" } else { "begin" }));
        }
        let first = (has_first != 0).then_some(first);
        let reserved = from("engine", engine)?.reserve_imms(&string("owner", owner)?, first, count)?;
        give("begin", begin, reserved.first())?;
        give("imms", imms, Box::into_raw(Box::new(reserved)))
    }
    /// Resets a counter with its senders.
    fn pt_submit_reset_imm(
        engine: *mut Engine, imm: u32, senders: *const *const u8, lens: *const usize, count: usize,
        submit: *const Submit, transfer: *mut Transfer,
    ) {
        let (options, _, done) = from("submit", submit)?.read()?;
        let senders = addresses("senders", senders, lens, count)?;
        give_transfer(transfer, from("engine", engine)?.submit_reset_imm(imm, &senders, &options, done)?);
        Ok(())
    }
    /// Ends the mirror of a counter.
    fn pt_unmirror_imm(engine: *mut Engine, imm: u32) {
        from("engine", engine)?.unmirror_imm(imm);
        Ok(())
    }
    /// Copies an engine's name.
    fn pt_address_name(address: *const u8, address_len: usize, name: *mut c_char, len: *mut usize) {
        let address = read_address(slice("address", address, address_len)?)?;
        copy_out(text(&address.name().to_string()).as_bytes_with_nul(), name.cast(), len)
    }
    /// Resets a counter.
    fn pt_reset_imm(engine: *mut Engine, imm: u32) {
        from("engine", engine)?.reset_imm(imm).map(|_| ())
    }
    /// Shows a counter in memory.
    fn pt_mirror_imm(engine: *mut Engine, imm: u32, mr: *const Mr, offset: u64) {
        from("engine", engine)?.mirror_imm(imm, &from("mr", mr)?.handle, offset)
    }
    /// Shows counters in memory.
    fn pt_mirror_imms(engine: *mut Engine, first: u32, count: u32, mr: *const Mr, offset: u64) {
        from("engine", engine)?.mirror_imms(first, count, &from("mr", mr)?.handle, offset)
    }
    /// Ends the mirrors of counters.
    fn pt_unmirror_imms(engine: *mut Engine, first: u32, count: u32) {
        from("engine", engine)?.unmirror_imms(first, count);
        Ok(())
    }
    /// Makes a watched word.
    fn pt_watcher_create(engine: *mut Engine, callback: WatchCallback, context: *mut c_void, watcher: *mut *mut UvmWatcher) {
        if watcher.is_null() {
            return Err(missing("watcher"));
        }
        let (engine, context) = (from("engine", engine)?, Context(context));
        let made = match callback {
            Some(callback) => engine.alloc_uvm_watcher(move |old, new| callback(context.pointer(), old, new))?,
            None => engine.alloc_uvm_word()?,
        };
        give("watcher", watcher, Box::into_raw(Box::new(made)))
    }
    /// Says how often a word is looked at.
    fn pt_watcher_set_pace(watcher: *const UvmWatcher, pace_us: u32) {
        from("watcher", watcher)?.set_pace((pace_us != DEFAULT_PACE).then_some(pace_us))
    }
    /// Has nobody look at a word.
    fn pt_watcher_pause(watcher: *const UvmWatcher) {
        from("watcher", watcher)?.pause();
        Ok(())
    }
}

/// PT_DEFAULT_PACE of the header.
const DEFAULT_PACE: u32 = u32::MAX;

fn read_address(bytes: &[u8]) -> Result<NetAddr, Error> {
    NetAddr::from_bytes(bytes).map_err(|error| Error::argument("address", error.to_string()))
}

fn transfer_id(transfer: Transfer) -> TransferId {
    bindings::transfer_id(transfer.engine, usize::try_from(transfer.group).unwrap_or(usize::MAX), transfer.id)
}

/// # Safety
/// Every pointer is null or valid, as the header says.
unsafe fn addresses(
    argument: &'static str,
    bytes: *const *const u8,
    lens: *const usize,
    count: usize,
) -> Result<Vec<NetAddr>, Error> {
    // SAFETY: the caller promises it, here and below.
    let (bytes, lens) = unsafe { (slice(argument, bytes, count)?, slice("lens", lens, count)?) };
    // SAFETY: as above.
    let read = |(bytes, len): (&*const u8, &usize)| read_address(unsafe { slice(argument, *bytes, *len)? });
    bytes.iter().zip(lens).map(read).collect()
}

/// The first byte of registered memory; null for null.
///
/// # Safety
/// Null, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pt_mr_address(mr: *const Mr) -> *mut c_void {
    // SAFETY: the caller promises that it is null or valid.
    unsafe { mr.as_ref() }.map_or(std::ptr::null_mut(), |mr| mr.handle.address() as *mut c_void)
}

/// The count of an immediate; 0 for null.
///
/// # Safety
/// Null, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pt_imm_count(engine: *const Engine, imm: u32) -> u64 {
    // SAFETY: the caller promises that it is null or valid.
    unsafe { engine.as_ref() }.map_or(0, |engine| engine.imm_count(imm))
}

/// The watched word; null for null.
///
/// # Safety
/// Null, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pt_watcher_word(watcher: *const UvmWatcher) -> *mut u64 {
    // SAFETY: the caller promises that it is null or valid.
    unsafe { watcher.as_ref() }.map_or(std::ptr::null_mut(), |watcher| watcher.address() as *mut u64)
}
