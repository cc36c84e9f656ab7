//! Memory that a device may be writing to cannot be given back.

fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    let mut buffer = comm.allocate::<u8>(1 << 20)?;
    comm.scope(|scope| {
        let pending = scope.recv(&mut buffer, 0, 0)?;
        drop(buffer);
        pending.wait()?;
        Ok(())
    })
}
