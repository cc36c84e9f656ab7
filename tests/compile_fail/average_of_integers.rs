fn main() -> raccl::Result<()> {
    let comm = raccl::Config::new().connect()?;
    comm.all_reduce(&mut [1_i32], raccl::Avg)
}
