//! Two ranks that meet, with somebody in between: the whole handshake, and the first frames after it.
#![no_main]

libfuzzer_sys::fuzz_target!(|script: &[u8]| raccl::fuzzing::handshake(script));
