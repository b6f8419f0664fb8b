//! NetAddr and MrDesc: a decoder never crashes, and what it accepts is encoded to the same bytes.
#![no_main]

use putget_transfer::{MrDesc, NetAddr};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(address) = NetAddr::from_bytes(bytes) {
        assert_eq!(address.to_bytes(), bytes);
    }
    if let Ok(region) = MrDesc::from_bytes(bytes) {
        assert_eq!(region.to_bytes(), bytes);
    }
});
