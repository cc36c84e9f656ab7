//! What ranks say to each other before the group is formed, and the blob that an exchange carries.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| raccl::fuzzing::message(bytes));
