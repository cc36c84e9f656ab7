//! Groups with a job secret, in processes, and those who try to get in or to listen in.

#[path = "../support/mod.rs"]
mod support;

mod encrypted;
mod hostile;
mod secrets;
mod wire;
