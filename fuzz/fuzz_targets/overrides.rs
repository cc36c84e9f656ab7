//! The override string: which algorithm for which operation and size.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| raccl::fuzzing::overrides(text));
