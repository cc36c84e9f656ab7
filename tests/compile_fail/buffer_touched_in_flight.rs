fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    let mut buffer = [0_u8; 4];
    comm.scope(|scope| {
        let pending = scope.recv(&mut buffer, 0, 0)?;
        buffer[0] = 1;
        pending.wait().map(|_| ())
    })
}
