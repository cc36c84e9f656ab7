//! How ranks find each other, and the control connections that watch them.

pub(crate) mod watcher;
