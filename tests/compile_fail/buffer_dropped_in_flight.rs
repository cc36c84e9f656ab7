fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    comm.scope(|scope| {
        let buffer = vec![0_u8; 4];
        let pending = scope.send(&buffer, 0, 0)?;
        drop(buffer);
        pending.wait()
    })
}
