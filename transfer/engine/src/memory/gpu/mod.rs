//! The facts about a GPU that a NIC needs: where it is, and its memory as a file that the kernel's drivers understand (DMA-BUF).

mod ffi;

use std::os::fd::OwnedFd;

use crate::error::Error;
use ffi::Driver;

/// Bytes that the start and the end of a DMA-BUF are multiples of: the largest page of any host that has such GPUs.
const PAGE: u64 = 64 << 10;

/// The address on PCI of a GPU, by its number in CUDA, such as `0000:3b:00.0`.
///
/// # Errors
/// [`Error::Unavailable`] without the driver or the GPU.
pub(crate) fn pci_address(ordinal: u16) -> Result<String, Error> {
    let found = Driver::open().and_then(|driver| driver.pci_address(ordinal));
    found.map_err(|why| Error::Unavailable { what: format!("CUDA device {ordinal}"), why })
}

/// Memory of a GPU as a DMA-BUF.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    pub file: OwnedFd,
    /// Where in the file the memory begins.
    pub offset: u64,
}

/// Makes a DMA-BUF of some memory of a GPU. What comes back if that cannot be is why.
pub(crate) fn dma_buf(ordinal: u16, address: u64, len: u64) -> Result<DmaBuf, String> {
    let start = address / PAGE * PAGE;
    let end = address.checked_add(len).map_or(u64::MAX, |end| end.next_multiple_of(PAGE));
    let file = Driver::open()?.dma_buf(ordinal, start, (end - start) as usize)?;
    Ok(DmaBuf { file, offset: address - start })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::process::Command;

    use super::*;

    #[test]
    fn without_a_driver_it_says_so() {
        // Where there is a driver, there is no such GPU.
        let (found, memory) = (pci_address(999), dma_buf(999, 1 << 40, 4096));
        assert!(matches!(found, Err(Error::Unavailable { .. })), "{found:?}");
        assert!(memory.is_err_and(|why| why.contains("libcuda") || why.contains("cuDeviceGet")));
    }

    const IMITATED: &str = "PUTGET_TRANSFER_TEST_GPU";

    /// Runs the test below with the imitated driver.
    #[test]
    fn with_an_imitated_driver() {
        let folder = std::env::temp_dir().join(format!("putget_transfer_gpu_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imitation/cuda.c");
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(folder.join("libcuda.so.1")).args([source, "-lpthread"]);
        match compile.status() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => println!("skipped: there is no C compiler"),
            status => {
                assert!(status.unwrap().success());
                let mut test = Command::new(std::env::current_exe().unwrap());
                test.args(["--ignored", "--exact", "memory::gpu::tests::memory_is_a_file_of_whole_pages"]);
                let ran = test.env("LD_LIBRARY_PATH", &folder).env(IMITATED, "yes").output().unwrap();
                let text = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
                assert!(ran.status.success() && text.contains("1 passed"), "{text}");
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    #[ignore = "started by the test above"]
    fn memory_is_a_file_of_whole_pages() {
        if std::env::var_os(IMITATED).is_none() {
            return;
        }
        assert_eq!(pci_address(1).unwrap(), "0000:03:00.0");
        let found = dma_buf(1, (1 << 40) + 0x1_2345, 0x1_0000).unwrap();
        assert_eq!(found.offset, 0x2345);
        let (mut file, mut text) = (std::fs::File::from(found.file), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        // The range that the driver was asked for: start and length, in whole pages around the memory.
        assert_eq!(text, format!("{} {}", (1_u64 << 40) + 0x1_0000, 0x2_0000));
    }
}
