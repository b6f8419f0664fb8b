//! The nvlink provider: device memory and host memory, inside one process and between processes.
//!
//! `cargo test` runs all of it with an imitation of the CUDA driver, which it compiles (without a C compiler it says so and
//! ends). On a machine with GPUs, `PUTGET_TRANSFER_TEST_CUDA=1` and `--ignored` run the same tests with the real one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[macro_use]
mod common;

use std::ffi::c_void;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::device::{DeviceMemory, MARGIN};
use common::process::{MEMORY, Other, move_pages, read, role, scattered_pages, serve};
use common::*;
use putget_transfer::{
    Builder, Device, DeviceGroup, Done, DownReason, Engine, Error, MrDesc, NetworkError, Options, Pages, Reason,
    Refusal, ScatterDst, Topology, TransferError, Via, WriteItem,
};

fn nvlink() -> Builder {
    Engine::builder()
        .group(DeviceGroup::nvlink(0))
        .heartbeat(Duration::from_millis(100), Duration::from_secs(3))
        .connect_timeout(Duration::from_secs(3))
        .grace(Duration::from_millis(500))
        .secret(b"between processes")
}

fn engines<const N: usize>() -> [Engine; N] {
    std::array::from_fn(|_| nvlink().build().unwrap())
}

/// Runs the tests below with the imitated driver.
#[test]
fn with_an_imitated_driver() {
    let folder = std::env::temp_dir().join(format!("putget_transfer_imitation_{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let compile = |source: &str, library: &str| {
        let source = format!("{}/tests/imitation/{source}", env!("CARGO_MANIFEST_DIR"));
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(folder.join(library)).args([&source, "-lpthread"]);
        compile.status()
    };
    match compile("cuda.c", "libcuda.so.1") {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => println!("skipped: there is no C compiler"),
        status => {
            assert!(status.unwrap().success() && compile("gdrapi.c", "libgdrapi.so.2").unwrap().success());
            let mut tests = Command::new(std::env::current_exe().unwrap());
            // One at a time: memory_in_pieces counts what the process has.
            tests.args(["--ignored", "--skip", "other_process", "--test-threads", "1"]).env(CUDA, "imitated");
            let ran = tests.env("LD_LIBRARY_PATH", &folder).output().unwrap();
            let text = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success() && text.contains("13 passed"), "{text}");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn without_a_driver_it_says_so() {
    if let Err(error) = Engine::builder().group(DeviceGroup::nvlink(0)).build() {
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains("CUDA"), "{error}");
    }
}

const CUDA: &str = "PUTGET_TRANSFER_TEST_CUDA";

fn enabled() -> bool {
    let enabled = std::env::var_os(CUDA).is_some();
    if !enabled {
        println!("skipped: {CUDA} is not set");
    }
    enabled
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn writes_of_all_kinds_land_and_count_once() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let bytes = noise(9 << 20, 1);
    let (from, to) = (DeviceMemory::new(9 << 20), DeviceMemory::new(10 << 20));
    from.write(&bytes);
    let ((src, own), (_dst, desc)) = (from.register(&a), to.register(&b));
    let (host_src, _) = a.alloc_mr(9 << 20).unwrap();
    host_src.write(0, &bytes).unwrap();
    let (host_dst, host_desc) = b.alloc_mr(10 << 20).unwrap();
    let options = within(LONG);
    let mut right = vec![0; 10 << 20];
    let lens = [0, 1, 100, 65536, 9 << 20];
    for (source, offset) in [(&src, 77), (&host_src, 78)] {
        for len in lens {
            let write = |desc, imm| {
                outcome(|done| a.submit_single_write(len, Some(imm), (source, 0), (desc, offset), &options, done))
            };
            assert_eq!((write(&desc, 1), write(&host_desc, 2)), (Ok(()), Ok(())), "{len}");
            right[offset as usize..][..len as usize].copy_from_slice(&bytes[..len as usize]);
            assert!(to.read() == right, "{len} bytes to device memory");
            let mut found = vec![0; right.len()];
            host_dst.read(0, &mut found).unwrap();
            assert!(found == right, "{len} bytes to host memory");
        }
    }
    assert_eq!((expect_count(&b, 1, 10), expect_count(&b, 2, 10)), (Ok(()), Ok(())));
    let (one, other): (Vec<_>, Vec<_>) = ((0..3000).collect(), (0..3000).map(|page| (page * 7) % 3000).collect());
    for (page_len, stride, offset) in [(1000, 1024, 3), (1024, 2048, 0), (1024, 1024, 4)] {
        let pages = (Pages { indices: &one, stride, offset }, Pages { indices: &other, stride: 1024, offset: 16 });
        let paged = |done| a.submit_paged_writes(page_len, Some(3), (&src, pages.0), (&desc, pages.1), &options, done);
        assert_eq!(outcome(paged), Ok(()));
        for (from, to) in one.iter().zip(&other) {
            let from = (from * stride + offset) as usize;
            right[(to * 1024 + 16) as usize..][..page_len as usize]
                .copy_from_slice(&bytes[from..][..page_len as usize]);
        }
        assert!(to.read() == right, "pages of {page_len} bytes");
    }
    assert_eq!(expect_count(&b, 3, 3), Ok(()));
    let dsts = [(&desc, 50), (&own, 20), (&host_desc, 9)].map(|(desc, len)| ScatterDst {
        len,
        src_offset: 9000,
        dst: (desc, 5),
    });
    assert_eq!(outcome(|done| a.submit_scatter(None, Some(4), &src, &dsts, &options, done)), Ok(()));
    assert_eq!(outcome(|done| a.submit_barrier(None, 4, &[&desc, &own], &options, done)), Ok(()));
    assert_eq!((expect_count(&b, 4, 3), expect_count(&a, 4, 2)), (Ok(()), Ok(())));
    assert_eq!((b.imm_count(1), b.imm_count(2), b.imm_count(3), b.imm_count(4), a.imm_count(4)), (10, 10, 3, 3, 2));
}

/// Kernels look at counters where they are: in an array in a GPU's memory, which the processor stores to.
#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn counters_are_an_array_in_device_memory() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let memory = DeviceMemory::new(4096);
    let (handle, desc) = memory.register(&b);
    if let Err(error) = b.mirror_imms(7, 4, &handle, 64) {
        // A machine with GPUs need not have GDRCopy.
        assert!(std::env::var(CUDA).unwrap() != "imitated" && matches!(error, Error::Unavailable { .. }), "{error}");
        return;
    }
    for (imm, count) in [(7, 1), (9, 3)] {
        for _ in 0..count {
            outcome(|done| a.submit_barrier(None, imm, &[&desc], &Options::default(), done)).unwrap();
        }
        expect_count(&b, imm, count).unwrap();
    }
    let words: Vec<_> =
        memory.read().chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words[8..12], [1, 0, 3, 0]);
    assert!(words[..8].iter().chain(&words[12..]).all(|word| *word == 0));
    assert!(matches!(b.mirror_imms(7, 4, &handle, 4072), Err(Error::Argument { argument: "offset", .. })));
    assert!(matches!(b.mirror_imms(u32::MAX, 2, &handle, 0), Err(Error::Argument { argument: "count", .. })));
    b.unmirror_imms(7, 4);
}

/// A GPU's memory goes over NVLink, and so does host memory that belongs to one write with it; host memory to others goes over TCP.
#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn nvlink_inside_the_machine_and_tcp_to_others() {
    if !enabled() {
        return;
    }
    let tcp = || DeviceGroup::tcp(&[Some("127.0.0.1")]);
    let build = || nvlink().group(tcp()).build().unwrap();
    let (a, b, c) = (build(), build(), Engine::builder().secret(b"between processes").group(tcp()).build().unwrap());
    let (from, to) = (DeviceMemory::new(8192), DeviceMemory::new(8192));
    let bytes = noise(8192, 5);
    from.write(&bytes);
    let ((src, _), (_to, to_b)) = (from.register(&a), to.register(&b));
    let (host, _) = a.alloc_mr(8192).unwrap();
    host.write(0, &bytes).unwrap();
    let ((at_b, host_b), (at_c, to_c)) = (b.alloc_mr(8192).unwrap(), c.alloc_mr(8192).unwrap());
    let item = |src, dst| WriteItem { len: 8192, src: (src, 0), dst: (dst, 0) };
    let items = [item(&host, &host_b), item(&src, &to_b), item(&host, &to_c)];
    let prepared = a.prepare_writes(&items, Via::default()).unwrap();
    outcome(|done| a.submit_prepared(&prepared, Some(1), &within(LONG), done)).unwrap();
    assert_eq!((expect_count(&b, 1, 1), expect_count(&c, 1, 1)), (Ok(()), Ok(())));
    assert!(to.read() == bytes && read(&at_b, 0, 8192) == bytes && read(&at_c, 0, 8192) == bytes);
    // A write that only NVLink carries does not go to a peer without it.
    let refused = a.submit_single_write(8, None, (&src, 0), (&to_c, 0), &Options::default(), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "dst", .. })), "{refused:?}");
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn the_nics_near_a_gpu_are_its_default() {
    if std::env::var(CUDA).as_deref() != Ok("imitated") {
        return;
    }
    // GPU 0 of the imitation is at 0000:02:00.0, behind one switch with mlx5_1.
    let sys = std::env::temp_dir().join(format!("putget_transfer_near_{}", std::process::id()));
    let (gpu, nic) = ("devices/pci0000:00/0000:00:01.0/0000:02:00.0", "devices/pci0000:00/0000:00:01.0/0000:03:00.0");
    let write = |path: String, text: &str| {
        let path = sys.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let link = |from: &str, to: &str| {
        std::fs::create_dir_all(sys.join(from).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(sys.join(to), sys.join(from)).unwrap();
    };
    for (path, file, text) in [(gpu, "numa_node", "1"), (gpu, "vendor", "0x10de"), (gpu, "class", "0x030200")] {
        write(format!("{path}/{file}"), text);
    }
    write(format!("{nic}/infiniband/mlx5_1/ports/1/state"), "4: ACTIVE");
    write("devices/system/node/node1/cpulist".into(), "2-3");
    link("bus/pci/devices/0000:02:00.0", gpu);
    link(&format!("{nic}/infiniband/mlx5_1/device"), nic);
    link("class/infiniband/mlx5_1", &format!("{nic}/infiniband/mlx5_1"));
    let topology = Topology::read(&sys);
    let group = DeviceGroup::verbs_near(&topology, Device::Cuda(0)).map(|group| format!("{group:?}"));
    let other = DeviceGroup::verbs_near(&topology, Device::Cuda(1)).map(drop);
    std::fs::remove_dir_all(&sys).unwrap();
    assert_eq!(group.unwrap(), "DeviceGroup(Verbs, Cuda(0), 1 NICs, processors Some([2, 3]))");
    assert!(matches!(other, Err(Error::Argument { argument: "gpu", .. })), "{other:?}");
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn reads_bring_device_memory_and_say_what_they_cannot() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let len = 3 << 20;
    let bytes = noise(len, 5);
    let (from, into) = (DeviceMemory::new(len), DeviceMemory::new(len));
    from.write(&bytes);
    let ((source, desc), (dst, _)) = (from.register(&b), into.register(&a));
    let (host, _) = a.alloc_mr(len).unwrap();
    let get =
        |desc: &MrDesc, dst, len| outcome(|done| a.submit_read(len, Some(1), (desc, 5), (dst, 9), &within(LONG), done));
    let mut right = vec![0; len];
    for size in [1, 100, 65536, len - 9] {
        assert_eq!((get(&desc, &dst, size as u64), get(&desc, &host, size as u64)), (Ok(()), Ok(())), "{size}");
        right[9..9 + size].copy_from_slice(&bytes[5..5 + size]);
        assert!(into.read() == right && read(&host, 0, len) == right, "{size}");
    }
    assert_eq!(expect_count(&b, 1, 8), Ok(()));
    // Host memory of another process is out of a GPU's reach.
    let (_host, host_desc) = b.alloc_mr(100).unwrap();
    let error = failure(get(&host_desc, &dst, 10));
    assert!(
        matches!(&error.reason, Reason::Network(NetworkError::Other(why)) if why.contains("host memory")),
        "{error}"
    );
    // Memory that was read from is given back, and an ended key is refused.
    b.dereg_mr(source).unwrap();
    let error = failure(get(&desc, &dst, 10));
    assert_eq!((error.reason, error.may_land), (Reason::Network(NetworkError::BadKey), false));
    assert!(into.read() == right);
    assert_eq!(b.imm_count(1), 8);
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn many_writes_at_a_time_and_messages() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let bytes = noise(8 << 20, 2);
    let (from, to) = (DeviceMemory::new(8 << 20), DeviceMemory::new(8 << 20));
    from.write(&bytes);
    let ((src, _), (_dst, desc)) = (from.register(&a), to.register(&b));
    let (sender, received) = channel();
    b.submit_recvs(10_000, 2, move |_, bytes| sender.send(bytes.to_vec()).unwrap()).unwrap();
    let flag = putget_transfer::Flag::new();
    for place in 0..2048 {
        let at = place * 4096;
        let done = Done::flag(&flag);
        a.submit_single_write(4096, Some(1), (&src, at), (&desc, at), &within(LONG), done).unwrap();
        if place % 16 == 0 {
            let done = Done::flag(&flag);
            a.submit_send(&b.main_address(), &bytes[at as usize..][..9000], &within(LONG), done).unwrap();
        }
    }
    assert_eq!(expect_count(&b, 1, 2048), Ok(()));
    assert!(to.read() == bytes);
    eventually("all are over", || flag.pending() == 0);
    assert_eq!((flag.failed(), b.imm_count(1)), (0, 2048));
    let mut found: Vec<_> = (0..128).map(|_| received.recv_timeout(LONG).unwrap()).collect();
    let mut sent: Vec<_> = (0..128).map(|index| bytes[index * 65536..][..9000].to_vec()).collect();
    found.sort();
    sent.sort();
    assert!(found == sent);
    let stranger = nvlink().secret(b"other").build().unwrap();
    let connect = |done| stranger.add_peer_group(&[b.main_address()], &Options::default(), done);
    assert_eq!(failure(outcome(connect)).reason, Refusal::Secret.into());
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn nothing_lands_once_a_registration_has_ended() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let (from, to) = (DeviceMemory::new(4 << 20), DeviceMemory::new(4 << 20));
    let (src, _) = from.register(&a);
    for round in 0..5_u8 {
        from.write(&vec![2 * round + 1; 4 << 20]);
        let (dst, desc) = to.register(&b);
        let flag = putget_transfer::Flag::new();
        for _ in 0..64 {
            let done = Done::flag(&flag);
            a.submit_single_write(1 << 20, Some(1), (&src, 0), (&desc, 0), &within(LONG), done).unwrap();
        }
        eventually("one is over", || flag.pending() < 64);
        b.dereg_mr(dst).unwrap();
        to.write(&vec![0; 4 << 20]);
        eventually("all are over", || flag.pending() == 0);
        assert!(to.read().iter().all(|byte| *byte == 0), "a write landed after the end of its registration");
        let late = |done| a.submit_single_write(1, Some(1), (&src, 0), (&desc, 0), &within(LONG), done);
        assert_eq!(failure(outcome(late)).reason, Reason::Network(NetworkError::BadKey));
    }
    // An engine that closes takes its registrations back, too.
    let (_dst, desc) = to.register(&b);
    from.write(&vec![99; 4 << 20]);
    let flag = putget_transfer::Flag::new();
    let burst = |count| {
        for _ in 0..count {
            let done = Done::flag(&flag);
            a.submit_single_write(1 << 20, None, (&src, 0), (&desc, 0), &within(LONG), done).unwrap();
        }
    };
    burst(1);
    eventually("the first is over", || flag.pending() == 0);
    burst(64);
    b.close();
    to.write(&vec![0; 4 << 20]);
    eventually("all are over", || flag.pending() == 0);
    assert!(to.read().iter().all(|byte| *byte == 0), "a write landed after the end of the engine");
    let [b] = engines();
    let (dst, desc) = b.alloc_mr(4096).unwrap();
    b.dereg_mr(dst).unwrap();
    let late = |done| a.submit_single_write(1, Some(1), (&src, 0), (&desc, 0), &within(LONG), done);
    assert_eq!(failure(outcome(late)).reason, Reason::Network(NetworkError::BadKey));
}

/// Descriptors of pieces that this process has, where the driver is the imitated one.
fn descriptors_of_pieces() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links
        .filter_map(|link| std::fs::read_link(link.path()).ok())
        .filter(|to| to.to_string_lossy().contains("imitated pieces"))
        .count()
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn memory_in_pieces() {
    if !enabled() {
        return;
    }
    let bytes = noise(45 << 20, 4);
    // Pieces more than are asked for at a time.
    let (from, to) = (DeviceMemory::in_pieces(9 << 20, 1), DeviceMemory::in_pieces(45 << 20, 1));
    from.write(&bytes[..9 << 20]);
    let before = descriptors_of_pieces();
    let options = within(LONG);
    {
        let [a, b] = engines();
        let ((src, own), (dst, desc)) = (from.register(&a), to.register(&b));
        let mut right = vec![0; 45 << 20];
        for (at, len) in [(0, 9 << 20), ((2 << 20) - MARGIN - 7, 14), ((45 << 20) - 3, 3), (20 << 20, 9 << 20)] {
            let write = |done| a.submit_single_write(len, Some(1), (&src, 0), (&desc, at as u64), &options, done);
            assert_eq!(outcome(write), Ok(()), "{len} bytes at {at}");
            right[at..at + len as usize].copy_from_slice(&bytes[..len as usize]);
        }
        let (one, other): (Vec<_>, Vec<_>) = ((0..3000).collect(), (0..3000).map(|page| (page * 7) % 3000).collect());
        let pages =
            (Pages { indices: &one, stride: 1000, offset: 3 }, Pages { indices: &other, stride: 1024, offset: 0 });
        let paged = |done| a.submit_paged_writes(1000, Some(1), (&src, pages.0), (&desc, pages.1), &options, done);
        assert_eq!(outcome(paged), Ok(()));
        for (from, to) in one.iter().zip(&other) {
            let (from, to) = ((from * 1000 + 3) as usize, (to * 1024) as usize);
            right[to..to + 1000].copy_from_slice(&bytes[from..from + 1000]);
        }
        assert_eq!(expect_count(&b, 1, 5), Ok(()));
        assert!(to.read() == right);
        let beyond = |done| a.submit_single_write(8, None, (&src, 0), (&desc, (45 << 20) - 7), &options, done);
        assert!(matches!(beyond(Done::ignore()), Err(Error::Argument { .. })));
        // The engine writes to its own pieces, too.
        let itself = |done| a.submit_single_write(9, Some(2), (&src, 0), (&own, 4 << 20), &options, done);
        assert_eq!((outcome(itself), expect_count(&a, 2, 1)), (Ok(()), Ok(())));
        assert!(from.read()[4 << 20..][..9] == bytes[..9]);
        b.dereg_mr(dst).unwrap();
        let late = |done| a.submit_single_write(1, None, (&src, 0), (&desc, 0), &options, done);
        assert_eq!(failure(outcome(late)).reason, Reason::Network(NetworkError::BadKey));
        // Registrations that end while their pieces are on their way.
        for round in 0..20 {
            let (dst, desc) = to.register(&b);
            let flag = putget_transfer::Flag::new();
            for _ in 0..4 {
                a.submit_single_write(9 << 20, None, (&src, 0), (&desc, 0), &options, Done::flag(&flag)).unwrap();
            }
            std::thread::sleep(Duration::from_micros(100 * round));
            b.dereg_mr(dst).unwrap();
            to.write_at(MARGIN, &[77; 64]);
            eventually("all are over", || flag.pending() == 0);
            assert!(to.read()[..64].iter().all(|byte| *byte == 77), "a write landed after the end of its registration");
        }
    }
    // Neither side keeps what it has sent or mapped.
    assert_eq!(descriptors_of_pieces(), before);
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn pieces_that_cannot_be_shared_are_refused_by_name() {
    if !enabled() {
        return;
    }
    let [a] = engines();
    let error = DeviceMemory::in_pieces(3 << 20, 0).try_register(&a, 3 << 20).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }) && error.to_string().contains("file descriptor"), "{error}");
    let memory = DeviceMemory::in_pieces(3 << 20, 1);
    let error = memory.try_register(&a, 9 << 20).unwrap_err();
    assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("len"), "{error}");
    memory.register(&a);
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn words_that_a_gpu_sees() {
    if !enabled() {
        return;
    }
    let [a, b] = engines();
    let (sender, seen) = channel();
    let watcher = b.alloc_uvm_watcher(move |old, new| sender.send((old, new)).unwrap_or(())).unwrap();
    let (mirror, _) = b.alloc_mr(4096).unwrap();
    b.mirror_imm(9, &mirror, 64).unwrap();
    let memory = DeviceMemory::new(4096);
    let (src, _) = memory.register(&a);
    let (_dst, desc) = b.alloc_mr(4096).unwrap();
    assert_eq!(outcome(|done| a.submit_single_write(8, Some(9), (&src, 0), (&desc, 0), &within(LONG), done)), Ok(()));
    assert_eq!(expect_count(&b, 9, 1), Ok(()));
    assert_eq!(mirror.load_word(64), Ok(1));
    // A stream stores to the watched word, as a kernel would: that works only with memory that is pinned.
    let mut stream = std::ptr::null_mut::<c_void>();
    cuda!(c"cuStreamCreate", &mut stream => *mut *mut c_void, 1 => u32);
    cuda!(c"cuStreamWriteValue64_v2", stream => *mut c_void, watcher.address() as u64 => u64, 5 => u64, 0 => u32);
    assert_eq!(seen.recv_timeout(LONG), Ok((0, 5)));
    cuda!(c"cuStreamDestroy_v2", stream => *mut c_void);
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    if role().is_none() {
        return;
    }
    let engine = nvlink().build().unwrap();
    let (memory, pieces) = (DeviceMemory::new(MEMORY), DeviceMemory::in_pieces(MEMORY, 1));
    let ((_handle, desc), (_pieces, pieces_desc)) = (memory.register(&engine), pieces.register(&engine));
    let (host, host_desc) = engine.alloc_mr(MEMORY).unwrap();
    serve(&engine, &[desc, host_desc, pieces_desc], || vec![memory.read(), read(&host, 0, MEMORY), pieces.read()]);
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn operations_between_processes() {
    if !enabled() {
        return;
    }
    let [a] = engines();
    let mut other = Other::start("device");
    let descs = other.descs.clone();
    let bytes = noise(MEMORY, 3);
    let memory = DeviceMemory::new(MEMORY);
    memory.write(&bytes);
    let (src, _) = memory.register(&a);
    let mut right = vec![vec![0; MEMORY]; descs.len()];
    let options = within(LONG);
    for (index, len) in [0, 1, 100, 65536, 5 << 20].into_iter().enumerate() {
        for (desc, right) in descs.iter().zip(&mut right) {
            let write = |done| a.submit_single_write(len, Some(1), (&src, 9), (desc, 77), &options, done);
            assert_eq!(outcome(write), Ok(()), "{len}");
            right[77..77 + len as usize].copy_from_slice(&bytes[9..9 + len as usize]);
        }
        other.check_all(1, 3 * index as u64 + 3, &right.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
    let (from, to) = scattered_pages();
    let pages = (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
    for (desc, right) in descs.iter().zip(&mut right) {
        let paged = |done| a.submit_paged_writes(1000, Some(2), (&src, pages.0), (desc, pages.1), &options, done);
        assert_eq!(outcome(paged), Ok(()));
        move_pages(&bytes, right);
    }
    let right: Vec<_> = right.iter().map(Vec::as_slice).collect();
    other.check_all(2, 3, &right);
    assert_eq!(outcome(|done| a.submit_barrier(None, 3, &[&descs[0]], &options, done)), Ok(()));
    other.check_all(3, 1, &right);
}

#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn kill_9_is_noticed_and_a_new_process_is_a_new_peer() {
    if !enabled() {
        return;
    }
    let (sender, events) = channel();
    let a = nvlink().on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap();
    let memory = DeviceMemory::new(1 << 20);
    let (src, _) = memory.register(&a);
    let write = |desc: &MrDesc| {
        outcome(|done| a.submit_single_write(1 << 20, Some(5), (&src, 0), (desc, 0), &within(LONG), done))
    };
    for _ in 0..2 {
        let other = Other::start("device");
        let (address, desc) = (other.address.clone(), other.descs[0].clone());
        assert!(other.descs.iter().all(|desc| write(desc) == Ok(())));
        assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
        // Nobody says goodbye, with writes under way.
        let flag = putget_transfer::Flag::new();
        for _ in 0..100 {
            a.submit_single_write(1 << 20, None, (&src, 0), (&desc, 0), &within(LONG), Done::flag(&flag)).unwrap();
        }
        drop(other);
        let started = Instant::now();
        Other::was_lost(&address, events.recv_timeout(LONG).unwrap());
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        eventually("all are over", || flag.pending() == 0);
        assert_eq!(write(&desc).unwrap_err().transfer_errors()[0].peer, address.name());
    }
}

/// The writer lets go of what it has mapped; on a busy machine the fence is told first that this takes long.
#[test]
#[ignore = "needs a CUDA driver, real or imitated"]
fn after_a_fence_nothing_lands_or_counts() {
    if !enabled() {
        return;
    }
    let ((sender, arrivals), (other_sender, events)) = (channel(), channel());
    let a = nvlink().grace(LONG).on_peer_event(move |event| other_sender.send(event).unwrap_or(())).build().unwrap();
    let b = nvlink().grace(LONG).on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap();
    let (from, to) = (DeviceMemory::new(1 << 20), DeviceMemory::new(1 << 20));
    from.write(&[0xaa; 1 << 20]);
    let ((src, _), (_dst, desc)) = (from.register(&a), to.register(&b));
    let mut failed = 0;
    for round in 0..rounds(8) {
        let (before, flag) = (b.imm_count(1), putget_transfer::Flag::new());
        for _ in 0..3000 {
            a.submit_single_write(1 << 20, Some(1), (&src, 0), (&desc, 0), &within(LONG), Done::flag(&flag)).unwrap();
        }
        eventually("some have come", || b.imm_count(1) >= before + 2);
        arrivals.try_iter().for_each(drop);
        if let Err(error) = outcome(|done| b.fence(&a.main_address(), done)) {
            let late = TransferError { peer: a.name(), nic: None, reason: DownReason::Fenced.into(), may_land: true };
            assert_eq!(error, Error::Transfer(vec![late]), "round {round}");
            while arrivals.recv_timeout(LONG).unwrap().down != Some(DownReason::Drained) {}
        }
        to.write(&[0x5c; 1 << 20]);
        let fenced = b.imm_count(1);
        eventually("all are over", || flag.pending() == 0);
        failed += flag.failed();
        assert!(to.read().iter().all(|byte| *byte == 0x5c) && b.imm_count(1) == fenced, "round {round}");
        assert!(arrivals.try_iter().all(|event| event.down.is_some()), "round {round}");
        while events.recv_timeout(LONG).unwrap().down.is_none() {}
        b.admit(&a.main_address()).unwrap();
    }
    assert!(failed > 0, "every fence came after the last write");
}
