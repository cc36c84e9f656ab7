//! A peer that lies while cables are connected: a relay changes what it says of its end.

use std::{
    env,
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use raccl_emulator::{Emulation, Layout};
use serde_json::{Value, json};

use crate::{
    support::{CHILD, HANG, cables::machine, free_address, launch_each},
    wire::relay,
};

/// Bytes of the length in front of an answer.
const PREFIX: usize = 4;

/// Two ranks that cannot be connected, since the frame of rank 1's offer is changed, and what each printed as the reason.
fn connecting(name: &str, lie: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) -> Vec<String> {
    let emulation = Emulation::create(&Layout::mesh().spec(2)).unwrap();
    let changed = Arc::new(AtomicUsize::new(0));
    let address = free_address();
    let relayed = relay(address.clone(), {
        let changed = Arc::clone(&changed);
        move |_, _, bytes| {
            let offer = br#"{"Ok":[{"#;
            let Some(at) = bytes.windows(offer.len()).position(|window| window == offer) else { return };
            // It is written in one piece, so that it comes in one.
            let from = at - PREFIX;
            let length = u32::from_le_bytes(bytes[from..at].try_into().unwrap()) as usize;
            let lie = lie(&bytes[at..at + length]);
            bytes.splice(from..at + length, lie);
            changed.fetch_add(1, Ordering::SeqCst);
        }
    });
    let variables = |rank| {
        let mut variables = machine(&emulation, rank);
        variables.push(("RACCL_COORDINATOR".to_owned(), if rank == 1 { &relayed } else { &address }.clone()));
        variables
    };
    let texts = launch_each(name, 2, variables, |_| unreachable!("the parent has no body"));
    assert_eq!(changed.load(Ordering::SeqCst), 1);
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
    assert_eq!(emulation.books().mistakes, Default::default());
    texts
}

/// The part of one of the ranks: prints why it has no group.
fn rank(name: &str) {
    launch_each(
        name,
        2,
        |_| unreachable!("this is no parent"),
        |config| {
            let error = config.connect_timeout(HANG).connect().unwrap_err();
            let mut text = error.to_string();
            let mut next = std::error::Error::source(&error);
            while let Some(source) = next {
                write!(text, ": {source}").unwrap();
                next = source.source();
            }
            println!("{text}");
        },
    );
}

#[test]
fn impossible_offers_are_refused_by_whoever_hears_them_and_everybody_is_told() {
    const NAME: &str = "lies::impossible_offers_are_refused_by_whoever_hears_them_and_everybody_is_told";
    if env::var(CHILD).is_ok() {
        return rank(NAME);
    }
    type Lie = fn(&mut Value);
    let lies: [(Lie, &str); 6] = [
        (|offer| offer["classes"] = json!([]), "rank 1 offers no queue pair"),
        (
            |offer| offer["classes"][0]["recv_slots"] = json!(1_u32 << 31),
            "rank 1 has 2147483648 receives of 4096 bytes, here they have 4096",
        ),
        (|offer| offer["classes"][1]["recv_slots"] = json!(0), "rank 1 has 0 receives of"),
        (|offer| offer["classes"][1]["slot_bytes"] = json!(1_u64 << 40), "receives of 1099511627776 bytes"),
        (|offer| offer["index"] = json!(7), "rank 1 knows of no cable 0 to rank 0"),
        (
            |offer| offer["device"] = json!("x".repeat(50_000)),
            "rank 1 names a device of cable 0 with 50000 bytes",
        ),
    ];
    for (lie, reason) in lies {
        let texts = connecting(NAME, move |answer| {
            let mut answer: Value = serde_json::from_slice(answer).unwrap();
            lie(&mut answer["Ok"][0]);
            let answer = serde_json::to_vec(&answer).unwrap();
            [&(answer.len() as u32).to_le_bytes()[..], &answer].concat()
        });
        assert!(texts[0].contains(reason), "{reason}: {}", texts[0]);
        assert!(texts[1].contains("rank 0 says: ") && texts[1].contains(reason), "{reason}: {}", texts[1]);
    }
}

#[test]
fn an_answer_longer_than_any_is_not_waited_for() {
    const NAME: &str = "lies::an_answer_longer_than_any_is_not_waited_for";
    if env::var(CHILD).is_ok() {
        return rank(NAME);
    }
    let texts = connecting(NAME, |answer| [&(2_u32 << 20).to_le_bytes()[..], answer].concat());
    assert!(texts[0].contains("an answer of 2097152 bytes"), "{}", texts[0]);
    for (rank, text) in texts.iter().enumerate() {
        let reason = format!("rank {} was lost while the cables were connected", 1 - rank);
        assert!(text.contains(&reason), "{text}");
    }
}
