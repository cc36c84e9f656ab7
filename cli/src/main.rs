//! The `raccl` command.
fn main() {}
