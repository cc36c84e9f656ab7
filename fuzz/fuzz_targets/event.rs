//! What members of a formed group say to each other on control connections.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| raccl::fuzzing::event(bytes));
