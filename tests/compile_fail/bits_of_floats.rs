fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    comm.all_reduce(&mut [1.0_f32], raccl::BitAnd)
}
