fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    let mut buffer = [0_u8; 4];
    let pending = comm.scope(|scope| scope.recv(&mut buffer, 0, 0))?;
    pending.wait().map(|_| ())
}
