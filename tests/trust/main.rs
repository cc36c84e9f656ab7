//! Groups with a job secret, in processes, those who try to get in or to listen in, and members that lie.

#[path = "../support/mod.rs"]
mod support;

mod encrypted;
mod hostile;
mod lies;
mod secrets;
mod wire;
