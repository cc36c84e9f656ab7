//! A peer that says what it likes while cables are connected: the answers, their lengths, and whether what they offer is possible.
#![no_main]

libfuzzer_sys::fuzz_target!(|script: &[u8]| raccl::fuzzing::offers(script));
