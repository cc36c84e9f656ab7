//! Memory is not known to devices any more when `with_registered` has returned, so nothing that was started on it may be left.

fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    let mut memory = vec![0_u8; 1 << 20];
    comm.scope(|scope| {
        let pending = comm.with_registered(&mut memory, |memory| scope.recv(memory, 0, 0))??;
        pending.wait()?;
        Ok(())
    })
}
