//! The emulator against the rules that are known of the real driver, a test for each, through raccl-sys as any
//! program uses it.

mod addresses;
mod cables;
mod faults;
mod freeing;
mod interface;
mod lab;
mod limits;
mod programs;
mod queues;
mod regions;
mod transfer;
