//! Greetings, heads and answers of tcp: a decoder never crashes, and what it accepts is encoded to the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| putget_transfer::fuzzing::stream(bytes));
