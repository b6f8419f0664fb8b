//! The rights of the process on its memory, as `/proc/self/maps` says.

use std::ops::Range;

use crate::error::Error;

/// A stretch of addresses, and whether it can be read and written.
struct Mapping {
    range: Range<u64>,
    readable: bool,
    writable: bool,
}

/// All mappings of this process, in the order of their addresses.
pub(crate) struct Mappings(Vec<Mapping>);

impl Mappings {
    /// None: the system does not say.
    pub fn read() -> Option<Self> {
        std::fs::read_to_string("/proc/self/maps").ok().map(|text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let mapping = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let ((start, end), rights) = (words.next()?.split_once('-')?, words.next()?.as_bytes());
            let address = |text| u64::from_str_radix(text, 16).ok();
            let (readable, writable) = (rights.first() == Some(&b'r'), rights.get(1) == Some(&b'w'));
            Some(Mapping { range: address(start)?..address(end)?, readable, writable })
        };
        Self(text.lines().filter_map(mapping).collect())
    }

    /// Checks that all of some memory can be read, and written unless it is `read_only`.
    pub fn check(&self, address: usize, len: u64, read_only: bool) -> Result<(), Error> {
        let (mut next, end) = (address as u64, (address as u64).saturating_add(len));
        let first = self.0.partition_point(|mapping| mapping.range.end <= next);
        for mapping in self.0.iter().skip(first) {
            if next >= end || mapping.range.start > next {
                break;
            }
            let lacks = if !mapping.readable { "read" } else { "written" };
            if !mapping.readable || !(mapping.writable || read_only) {
                let problem = format!("{len} bytes at {address:#x} came; from {next:#x} on they cannot be {lacks}");
                let way = if mapping.readable { ", so they are a source alone: register them read-only" } else { "" };
                return Err(Error::argument("memory", problem + way));
            }
            next = mapping.range.end;
        }
        if next < end {
            let problem = format!("{len} bytes at {address:#x} came; at {next:#x} the process has no memory");
            return Err(Error::argument("memory", problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00001000-00003000 rw-p 00000000 00:00 0\n\
00003000-00004000 rw-s 00000000 00:01 7     /memfd:x (deleted)\n\
00004000-00005000 r--p 00000000 08:01 9     /lib/with space.so\n\
00006000-00007000 ---p 00000000 00:00 0\n";

    #[test]
    fn memory_must_be_there_and_have_the_rights() {
        let mappings = Mappings::parse(TEXT);
        let problem = |address, len, read_only| match mappings.check(address, len, read_only) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        assert_eq!(problem(0x1000, 0x3000, false), "");
        assert_eq!(problem(0x2fff, 2, false), "");
        assert_eq!(problem(0x1000, 0x4000, true), "");
        assert!(problem(0x3000, 0x1001, false).contains("from 0x4000 on they cannot be written"));
        assert!(problem(0x4000, 0x1001, true).contains("at 0x5000 the process has no memory"));
        assert!(problem(0x0, 8, true).contains("at 0x0 the process has no memory"));
        assert!(problem(0x6000, 8, true).contains("cannot be read"));
        assert!(problem(0x7000, 8, true).contains("no memory"));
        assert!(problem(usize::MAX - 7, 8, true).contains("no memory"));
    }

    #[test]
    fn this_process_has_what_it_uses() {
        let bytes = vec![1_u8; 1 << 20];
        let found = Mappings::read().unwrap();
        assert_eq!(found.check(bytes.as_ptr() as usize, 1 << 20, false), Ok(()));
        // The code of a function.
        let code = this_process_has_what_it_uses as fn() as usize;
        assert_eq!(found.check(code, 1, true), Ok(()));
        assert!(found.check(code, 1, false).is_err());
    }
}
