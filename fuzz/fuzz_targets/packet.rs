//! The header in front of what one work request carries through a cable.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| raccl::fuzzing::packet(bytes));
