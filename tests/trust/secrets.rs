//! Who has the secret and who has not.

use std::time::Duration;

use raccl::{Config, Sum};

use crate::{
    support::{CHILD, launch, processes},
    wire::Scratch,
};

fn sums(config: Config) {
    let comm = config.connect().unwrap();
    let mut values = vec![comm.rank() as u64; 1000];
    comm.all_reduce(&mut values, Sum).unwrap();
    let size = comm.size() as u64;
    assert_eq!(values, vec![size * (size - 1) / 2; 1000]);
    comm.close().unwrap();
}

#[test]
fn processes_with_the_same_secret_form_a_group() {
    let file = Scratch::new("same");
    if std::env::var(CHILD).is_err() {
        file.write("5a".repeat(32).as_bytes());
    }
    let variables = [("RACCL_SECRET_FILE", file.text()), ("RACCL_INSECURE", "0")];
    launch("secrets::processes_with_the_same_secret_form_a_group", 3, &variables, sums);
}

#[test]
fn ranks_with_other_secrets_end_with_an_error_on_both_sides() {
    let texts = launch(
        "secrets::ranks_with_other_secrets_end_with_an_error_on_both_sides",
        3,
        &[("RACCL_INSECURE", "0")],
        |config| {
            // Rank 0's is another than that of ranks 1 and 2.
            let rank: u8 = std::env::var("RACCL_RANK").unwrap().parse().unwrap();
            let config = config.secret([rank.min(1); 32]).connect_timeout(Duration::from_secs(2));
            let text = config.connect().unwrap_err().to_string();
            assert!(text.contains(&format!("on rank {rank} failed")), "{text}");
            assert!(text.contains("another job secret than this rank"), "{text}");
            assert!(text.contains("give every rank of a job the same secret"), "{text}");
            if rank == 0 {
                assert!(text.contains("ranks 1 and 2 did not arrive"), "{text}");
            }
        },
    );
    assert!(texts.is_empty() || texts.len() == 3);
}

#[test]
fn without_a_secret_other_machines_are_not_called_unless_told_to() {
    let rank = |config: Config| config.rank(1).size(2).coordinator("192.0.2.1:7000");
    let text = rank(Config::new()).connect().unwrap_err().to_string();
    assert!(text.contains("without a job secret only loopback") && text.contains("RACCL_INSECURE"), "{text}");
    let text = rank(Config::new()).secret([1; 32]).connect_timeout(Duration::from_millis(200)).connect();
    assert!(text.unwrap_err().to_string().contains("cannot reach rank 0 at 192.0.2.1:7000"));
}

#[test]
fn without_a_secret_loopback_is_enough() {
    processes("secrets::without_a_secret_loopback_is_enough", 2, |comm| {
        assert_eq!(comm.size(), 2);
        comm.close().unwrap();
    });
}
