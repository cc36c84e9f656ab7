//! Collective communications for small clusters of strong machines.
