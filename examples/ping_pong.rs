//! How long a message takes: rank 0 sends to rank 1, which sends it back.
//!
//! `MPI_Send` and `MPI_Recv`, with sizes from 0 bytes up. Ranks beyond the first two wait in the last barrier. With one rank,
//! it sends to itself. Usage: `ping_pong [LARGEST BYTES]`.
//!
//! ```sh
//! cargo run --release -- launch -n 2 -- target/release/examples/ping_pong 16777216
//! ```

use std::{error::Error, time::Instant};

use raccl::Config;

const PING: u64 = 1;
const PONG: u64 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let largest: usize = std::env::args().nth(1).map_or(Ok(1 << 20), |bytes| bytes.parse())?;
    let comm = Config::from_env()?.connect()?;
    let other = if comm.size() > 1 { 1 } else { 0 };
    let sizes =
        std::iter::successors(Some(1_usize), |size| size.checked_mul(8)).take_while(|&size| size <= largest);
    let mut checked = 0_u64;
    for bytes in std::iter::once(0).chain(sizes) {
        let rounds = if bytes <= 4096 { 200 } else { 10 };
        let sent: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
        let mut received = vec![0_u8; bytes];
        let begin = Instant::now();
        for _ in 0..rounds {
            if comm.rank() == 0 {
                comm.send(&sent, other, PING)?;
                if other == 0 {
                    comm.recv(&mut received, 0, PING)?;
                    comm.send(&received, 0, PONG)?;
                }
                let count = comm.recv(&mut received, other, PONG)?;
                if received != sent || count != bytes {
                    return Err(format!("{count} bytes came back of {bytes}, or others").into());
                }
            } else if comm.rank() == 1 {
                comm.recv(&mut received, 0, PING)?;
                comm.send(&received, 0, PONG)?;
            }
        }
        checked += rounds as u64 * bytes as u64;
        if comm.rank() == 0 {
            let round_trip = begin.elapsed().as_secs_f64() / f64::from(rounds);
            let rate = 2.0 * bytes as f64 / round_trip / 1e9;
            println!("{bytes:>9} bytes: {:>10.2} us there and back, {rate:.3} GB/s", round_trip * 1e6);
        }
    }
    comm.barrier()?;
    if comm.rank() == 0 {
        println!("answer: {checked}");
        println!("ok");
    }
    comm.close()?;
    Ok(())
}
