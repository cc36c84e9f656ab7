//! The emulator against the rules that are known of the real driver, a test for each, through raccl-sys as any
//! program uses it.

mod lab;
mod queues;
mod transfer;
