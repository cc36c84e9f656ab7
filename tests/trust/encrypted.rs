//! Collectives over encrypted links, and what happens when somebody changes their bytes.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use raccl::{Communicator, Error, Max, Sum};

use crate::{
    support::{CHILD, free_address, launch},
    wire::{Scratch, relay},
};

/// Where rank 1 finds rank 0.
const RELAY: &str = "TRUST_TEST_RELAY";

/// Every operation, at sizes that stay in a record, fill one, and need many.
fn check_everything(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    for count in [0, 1, 7, 1000, 4096, 4097, 100_000, 700_001] {
        let value = |rank: usize, i: usize| ((rank * 31 + i * 7) % 1000) as u64;
        let own: Vec<u64> = (0..count).map(|i| value(rank, i)).collect();
        let mut sum = own.clone();
        comm.all_reduce(&mut sum, Sum).unwrap();
        assert!(sum.iter().enumerate().all(|(i, &sum)| sum == (0..size).map(|r| value(r, i)).sum::<u64>()));

        let mut all = vec![0; count * size];
        comm.all_gather_into(&own, &mut all).unwrap();
        assert!(all.iter().enumerate().all(|(i, &found)| found == value(i / count, i % count)));

        let mut part = vec![0; count];
        comm.reduce_scatter_into(&all, &mut part, Max).unwrap();
        assert!(part.iter().enumerate().all(|(i, &found)| found == value(rank, i)));

        let mut told = if rank == size - 1 { own.clone() } else { vec![0; count] };
        comm.broadcast(&mut told, size - 1).unwrap();
        assert!(told.iter().enumerate().all(|(i, &found)| found == value(size - 1, i)));

        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut received = vec![0; count];
        comm.send_recv(&own, next, &mut received, previous, 3).unwrap();
        assert!(received.iter().enumerate().all(|(i, &found)| found == value(previous, i)));
        comm.barrier().unwrap();
    }
}

fn encrypted(name: &str, size: usize, sockets: usize) {
    let file = Scratch::new(name.rsplit(':').next().unwrap());
    if env::var(CHILD).is_err() {
        file.write(&[0x5a; 32]);
    }
    let variables = [("RACCL_SECRET_FILE", file.text()), ("RACCL_ENCRYPT", "1"), ("RACCL_INSECURE", "0")];
    launch(name, size, &variables, |config| {
        let comm = config.sockets(sockets).connect().unwrap();
        check_everything(&comm);
        comm.close().unwrap();
    });
}

#[test]
fn every_operation_is_right_over_encrypted_links() {
    encrypted("encrypted::every_operation_is_right_over_encrypted_links", 3, 1);
}

#[test]
fn every_operation_is_right_over_several_encrypted_sockets() {
    encrypted("encrypted::every_operation_is_right_over_several_encrypted_sockets", 2, 3);
}

#[test]
fn a_byte_that_is_changed_on_the_way_is_an_error_and_never_data() {
    const NAME: &str = "encrypted::a_byte_that_is_changed_on_the_way_is_an_error_and_never_data";
    /// How far into a connection the byte is: in the middle of a large payload, on a connection that carries nothing else so far
    /// but the handshake and headers.
    const FAR: usize = 300_000;
    let body = |config: raccl::Config| {
        let config = match env::var("RACCL_RANK").as_deref() {
            Ok("1") => config.coordinator(env::var(RELAY).unwrap()),
            _ => config,
        };
        let comm = config.timeout(Duration::from_secs(5)).connect().unwrap();
        let (rank, size) = (comm.rank(), comm.size());
        for round in 0..200u64 {
            let own = |rank: usize, i: u64| round * 1_000_003 + i * 17 + rank as u64;
            let mut values: Vec<u64> = (0..20_000).map(|i| own(rank, i)).collect();
            match comm.all_reduce(&mut values, Sum) {
                Ok(()) => {
                    let right =
                        |(i, &sum): (usize, &u64)| sum == (0..size).map(|r| own(r, i as u64)).sum::<u64>();
                    assert!(values.iter().enumerate().all(right), "wrong data in round {round}");
                }
                Err(error) => {
                    println!("ended in round {round}: {error}");
                    let known = matches!(
                        error,
                        Error::Protocol { .. }
                            | Error::PeerLost { .. }
                            | Error::Remote { .. }
                            | Error::Timeout { .. }
                    );
                    assert!(known, "{error:?}");
                    return;
                }
            }
        }
        panic!("nothing was noticed");
    };
    if env::var(CHILD).is_ok() {
        launch(NAME, 2, &[], body);
        return;
    }
    let file = Scratch::new("tampered");
    file.write(&[0x5a; 32]);
    let changed = Arc::new(AtomicUsize::new(0));
    let address = free_address();
    let relayed = relay(address.clone(), {
        let changed = Arc::clone(&changed);
        move |_, before, bytes| {
            if before < FAR && before + bytes.len() >= FAR {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
                changed.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let variables = [
        ("RACCL_SECRET_FILE", file.text()),
        ("RACCL_ENCRYPT", "1"),
        ("RACCL_INSECURE", "0"),
        ("RACCL_COORDINATOR", address.as_str()),
        (RELAY, relayed.as_str()),
    ];
    // Rank 1 finds rank 0 behind the relay.
    let texts = launch(NAME, 2, &variables, |_| unreachable!("the parent has no body"));
    assert_eq!(changed.load(Ordering::SeqCst), 1);
    for text in &texts {
        assert!(text.contains("ended in round"), "{text}");
    }
    assert!(texts[0].contains("does not open"), "{}", texts[0]);
}
