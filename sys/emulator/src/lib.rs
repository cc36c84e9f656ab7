//! A software RDMA driver.
