//! The driver: what the exported functions do, in one process.
//!
//! Objects are allocated boxes whose first fields are those of the C structures; the pointers given out are theirs.
//! Work happens in the calls of the program alone, mostly in posting and polling. Locks are of this process and held
//! for the length of such a call.

mod completion;
mod device;
mod exports;
mod memory;
mod numbers;
mod pair;
mod receiver;
mod sender;
