//! The C ABI of RDMA verbs, loaded at run time.
