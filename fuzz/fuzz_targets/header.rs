//! The header in front of every message of a link.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| raccl::fuzzing::header(bytes));
