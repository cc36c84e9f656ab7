//! The smallest program: every rank says hello, and all add up their ranks.

fn main() -> raccl::Result<()> {
    let comm = raccl::Config::from_env()?.connect()?;
    let mut values = vec![comm.rank() as f32; 8];
    comm.all_reduce(&mut values, raccl::Sum)?;
    println!("hello from rank {} of {}: {:?}", comm.rank(), comm.size(), values);
    comm.close()
}
