//! Groups that form, and groups that do not, between threads of one process.

use std::{
    io::Write,
    net::SocketAddr,
    sync::{Arc, Barrier, Mutex, mpsc},
    thread,
};

use super::{message::Message, *};

mod processes;
mod trust;

const PATIENCE: Duration = Duration::from_secs(20);

fn settings(rank: usize, size: usize, meeting: Meeting) -> Settings {
    Settings {
        rank,
        size,
        job: "test".to_owned(),
        meeting,
        bind: Vec::new(),
        sockets: 1,
        connect_timeout: PATIENCE,
        digest: vec![("link".to_owned(), "tcp".to_owned())],
        blob: format!("from {rank}").into_bytes(),
        host: 1,
        cores: vec![1],
        secret: None,
        insecure: false,
    }
}

/// Where ranks meet: a listener for rank 0 and its address for the others.
fn coordinator() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Settings of all ranks of a group, rank 0 with a listener.
fn everyone(size: usize) -> Vec<Settings> {
    let (listener, address) = coordinator();
    let others = (1..size).map(|rank| settings(rank, size, Meeting::Coordinator(address.clone())));
    std::iter::once(settings(0, size, Meeting::Listener(listener))).chain(others).collect()
}

fn address_of(everyone: &[Settings]) -> String {
    match &everyone[0].meeting {
        Meeting::Listener(listener) => listener.local_addr().unwrap().to_string(),
        other => panic!("{other:?}"),
    }
}

fn join_all(everyone: Vec<Settings>) -> Vec<Result<Joined>> {
    let threads: Vec<_> = everyone.into_iter().map(|settings| thread::spawn(|| join(settings))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn formed(outcomes: Vec<Result<Joined>>) -> Vec<Joined> {
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Every error's text, of a group that no rank could join.
fn failed(outcomes: Vec<Result<Joined>>) -> Vec<String> {
    outcomes.into_iter().map(|outcome| outcome.expect_err("the group does not form").to_string()).collect()
}

/// Sends a few bytes over each data socket and each control connection and sees that they come out where they should.
fn check_connections(mut group: Vec<Joined>) {
    let size = group.len();
    for joined in &mut group {
        let rank = joined.rank;
        for (peer, sockets) in joined.data.iter_mut().enumerate() {
            for (index, socket) in sockets.iter_mut().enumerate() {
                socket.write_all(&[rank as u8, peer as u8, index as u8]).unwrap();
            }
        }
        for (peer, channel) in joined.control.channels.iter_mut().enumerate() {
            if let Some(channel) = channel {
                channel.send(&[rank as u8, peer as u8]);
            }
        }
    }
    for (rank, joined) in group.iter_mut().enumerate() {
        assert_eq!((joined.rank, joined.size, joined.data.len()), (rank, size, size));
        assert!(joined.data[rank].is_empty() && joined.control.channels[rank].is_none());
        for peer in (0..size).filter(|&peer| peer != rank) {
            for (index, socket) in joined.data[peer].iter_mut().enumerate() {
                let mut bytes = [0; 3];
                socket.set_nonblocking(false).unwrap();
                socket.read_exact(&mut bytes).unwrap();
                assert_eq!(bytes, [peer as u8, rank as u8, index as u8]);
            }
            let channel = joined.control.channels[peer].as_mut().unwrap();
            let frame = loop {
                if let Some(frame) = channel.receive().unwrap() {
                    break frame;
                }
            };
            assert_eq!(frame, [peer as u8, rank as u8]);
        }
    }
}

#[test]
fn groups_of_2_to_9_ranks_form_and_agree() {
    for size in 2..=9 {
        let group = formed(join_all(everyone(size)));
        for joined in &group {
            assert_eq!(joined.nonce, group[0].nonce);
            assert_eq!(joined.epoch, group[0].epoch);
            assert_ne!(joined.epoch, 0);
            assert_eq!(joined.blob, b"from 0");
            assert_eq!(joined.hosts, vec![1; size]);
        }
        check_connections(group);
    }
}

#[test]
fn data_sockets_come_in_the_same_order_at_both_ends() {
    let mut everyone = everyone(4);
    everyone.iter_mut().for_each(|settings| settings.sockets = 5);
    let group = formed(join_all(everyone));
    assert!(group[1].data[2].len() == 5 && group[0].data[3].len() == 5);
    check_connections(group);
}

#[test]
fn patience_without_end_is_no_overflow() {
    let mut everyone = everyone(3);
    everyone.iter_mut().for_each(|settings| settings.connect_timeout = Duration::MAX);
    check_connections(formed(join_all(everyone)));
}

#[test]
fn two_groups_have_different_nonces() {
    let nonce = || formed(join_all(everyone(2)))[0].nonce;
    assert_ne!(nonce(), nonce());
}

#[test]
fn ranks_may_come_long_before_rank_0() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let early: Vec<_> = (1..3)
        .map(|rank| {
            let settings = settings(rank, 3, Meeting::Coordinator(free.to_string()));
            thread::spawn(|| join(settings))
        })
        .collect();
    thread::sleep(Duration::from_millis(400));
    let zero = join(settings(0, 3, Meeting::Coordinator(free.to_string())));
    let others = early.into_iter().map(|thread| thread.join().unwrap());
    check_connections(formed(std::iter::once(zero).chain(others).collect()));
}

#[test]
fn a_name_with_two_address_families_and_ipv6_literals_work() {
    if TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meetings = [format!("localhost:{port}"), format!("[::1]:{port}"), format!("127.0.0.1:{port}")];
    let everyone = meetings.into_iter().enumerate();
    let everyone = everyone.map(|(rank, text)| settings(rank, 3, Meeting::Coordinator(text))).collect();
    check_connections(formed(join_all(everyone)));
}

/// Other systems have one loopback address only, until more are set up.
#[cfg(target_os = "linux")]
#[test]
fn named_addresses_are_used() {
    let mut everyone = everyone(3);
    for settings in &mut everyone {
        settings.bind = vec!["127.0.0.2".parse().unwrap(), "127.0.0.3".parse().unwrap()];
        settings.sockets = 2;
    }
    let group = formed(join_all(everyone));
    for (high, low) in [(1, 0), (2, 0), (2, 1)] {
        let peer = |index: usize| group[high].data[low][index].peer_addr().unwrap().ip().to_string();
        assert_eq!((peer(0), peer(1)), ("127.0.0.2".to_owned(), "127.0.0.3".to_owned()));
    }
    check_connections(group);
}

#[test]
fn a_missing_rank_is_named_to_everyone_who_came() {
    let mut everyone = everyone(4);
    everyone.remove(2);
    for settings in &mut everyone {
        settings.connect_timeout = Duration::from_secs(2);
    }
    for (text, rank) in failed(join_all(everyone)).into_iter().zip([0, 1, 3]) {
        assert!(text.contains("rank 2 did not arrive"), "{text}");
        assert!(text.contains(&format!("on rank {rank} failed")), "{text}");
    }
}

#[test]
fn a_rank_that_is_less_patient_than_rank_0_still_learns_who_is_missing() {
    let mut everyone = everyone(3);
    everyone.truncate(2);
    everyone[0].connect_timeout = Duration::from_secs(6);
    everyone[1].connect_timeout = Duration::from_millis(1500);
    let texts = failed(join_all(everyone));
    assert!(texts[0].contains("ranks 1 and 2 did not arrive"), "{}", texts[0]);
    assert!(texts[0].contains("rank 1: it had arrived from 127.0.0.1"), "{}", texts[0]);
    assert!(texts[1].contains("still waits for rank 2"), "{}", texts[1]);
}

#[test]
fn without_rank_0_the_address_and_the_last_error_are_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut settings = settings(1, 2, Meeting::Coordinator(free.to_string()));
    settings.connect_timeout = Duration::from_millis(300);
    let error = join(settings).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("cannot reach rank 0 at {free}")) && text.contains("refused"), "{text}");
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn the_first_of_two_equal_ranks_stays_and_the_second_is_told_why() {
    let mut everyone = everyone(4);
    let address = address_of(&everyone);
    let late = everyone.split_off(2);
    let first: Vec<_> = everyone.into_iter().map(|settings| thread::spawn(|| join(settings))).collect();
    // Asks in the name of rank 2 until rank 1 is not missed any more.
    loop {
        let mut hello = say_hello(&address, 2, &late[0]);
        let frame = hello.receive().unwrap().unwrap();
        match Message::decode(&frame, 4).unwrap() {
            Message::Waiting(waiting) if waiting.missing.contains(&1) => {
                thread::sleep(Duration::from_millis(5))
            }
            Message::Waiting(_) => break,
            other => panic!("{other:?}"),
        }
    }
    let double = join(settings(1, 4, Meeting::Coordinator(address.clone()))).unwrap_err().to_string();
    assert!(double.contains("rank 1 has already joined"), "{double}");
    let zero = join(settings(0, 4, Meeting::Coordinator(address))).unwrap_err().to_string();
    assert!(zero.contains("taken"), "{zero}");
    let mut group = formed(join_all(late));
    let first = first.into_iter().map(|thread| thread.join().unwrap()).collect();
    group.splice(0..0, formed(first));
    check_connections(group);
}

#[test]
fn a_rank_that_went_away_may_come_again() {
    let mut everyone = everyone(3);
    let address = address_of(&everyone);
    let last = everyone.pop().unwrap();
    let again = everyone.pop().unwrap();
    let zero = everyone.pop().unwrap();
    let zero = thread::spawn(|| join(zero));
    // Arrives, and goes as if its process had been killed.
    let mut hello = say_hello(&address, 1, &again);
    assert!(hello.receive().unwrap().is_some());
    drop(hello);
    let again = thread::spawn(|| join(again));
    let last = join(last);
    check_connections(formed(vec![zero.join().unwrap(), again.join().unwrap(), last]));
}

#[test]
fn different_sizes_end_everyone_with_both_values() {
    let mut everyone = everyone(3);
    everyone[1].size = 4;
    for text in failed(join_all(everyone)) {
        assert!(text.contains("rank 0 was told a size of 3, rank 1 a size of 4"), "{text}");
    }
}

#[test]
fn different_settings_end_everyone_with_both_values() {
    let mut everyone = everyone(4);
    everyone[2].digest[0].1 = "shm".to_owned();
    for text in failed(join_all(everyone)) {
        assert!(text.contains("link is \"tcp\" on rank 0 and \"shm\" on rank 2"), "{text}");
    }
}

#[test]
fn another_jobs_rank_and_a_rank_out_of_range_are_refused_and_the_group_forms() {
    let mut everyone = everyone(2);
    let address = address_of(&everyone);
    let last = everyone.pop().unwrap();
    let zero = everyone.pop().unwrap();
    let zero = thread::spawn(|| join(zero));
    let mut stray = settings(1, 2, Meeting::Coordinator(address.clone()));
    stray.job = "other".to_owned();
    let text = join(stray).unwrap_err().to_string();
    assert!(
        text.contains("refused this rank") && text.contains("\"other\"") && text.contains("\"test\""),
        "{text}"
    );
    // A sound process cannot say this, since its own settings are checked.
    let mut hello = say_hello(&address, 2, &last);
    let answer = Message::decode(&hello.receive().unwrap().unwrap(), 2).unwrap();
    assert!(matches!(&answer, Message::Refused { reason } if reason.contains("out of range")), "{answer:?}");
    let last = join(last);
    check_connections(formed(vec![zero.join().unwrap(), last]));
}

#[test]
fn another_version_is_told_so_and_the_group_forms() {
    let mut everyone = everyone(2);
    let address = address_of(&everyone);
    let last = everyone.pop().unwrap();
    let zero = everyone.pop().unwrap();
    let zero = thread::spawn(|| join(zero));
    let mut stray = TcpStream::connect(&address).unwrap();
    stray.write_all(b"\xF1raccl\r\n\x07\0\0\0and more that is not read").unwrap();
    let mut answer = [0; 12];
    stray.read_exact(&mut answer).unwrap();
    assert_eq!(answer[8..10], channel::VERSION.to_le_bytes());
    let last = join(last);
    check_connections(formed(vec![zero.join().unwrap(), last]));

    // And a rank 0 of another version ends its caller at once.
    let (listener, address) = coordinator();
    let caller = thread::spawn(|| join(settings(1, 2, Meeting::Coordinator(address))));
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(b"\xF1raccl\r\n\x07\0\0\0").unwrap();
    let text = caller.join().unwrap().unwrap_err().to_string();
    assert!(text.contains("version 7") && text.contains("version 1"), "{text}");
}

#[test]
fn strangers_do_not_keep_a_group_from_forming() {
    let everyone = everyone(4);
    let address: SocketAddr = address_of(&everyone).parse().unwrap();
    let started = Arc::new(Barrier::new(9));
    let (stop, stopped) = mpsc::channel::<()>();
    let stopped = Arc::new(Mutex::new(stopped));
    let strangers: Vec<_> = (0..8u8)
        .map(|kind| {
            let (started, stopped) = (started.clone(), stopped.clone());
            thread::spawn(move || {
                let mut held = Vec::new();
                for round in 0.. {
                    if let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
                        match kind % 4 {
                            // Says nothing.
                            0 => {}
                            // Says something else.
                            1 => drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
                            // Begins well and drips.
                            2 => drop(
                                stream.write_all(&b"\xF1raccl\r\n\x01\0\0\0\xff\xff"[..(2 + round % 13)]),
                            ),
                            // Begins well and goes on with rubbish.
                            _ => drop(
                                stream.write_all(b"\xF1raccl\r\n\x01\0\0\0\x05\0\0\0\x01\xff\xff\xff\xff"),
                            ),
                        }
                        held.push(stream);
                    }
                    if held.len() > 40 {
                        held.clear();
                    }
                    if round == 10 {
                        started.wait();
                    }
                    if round >= 10
                        && stopped.lock().unwrap().try_recv() == Err(mpsc::TryRecvError::Disconnected)
                    {
                        return;
                    }
                }
            })
        })
        .collect();
    started.wait();
    let group = formed(join_all(everyone));
    drop(stop);
    strangers.into_iter().for_each(|stranger| stranger.join().unwrap());
    check_connections(group);
}

#[test]
fn a_taken_port_is_named() {
    let (listener, address) = coordinator();
    let text = join(settings(0, 2, Meeting::Coordinator(address.clone()))).unwrap_err().to_string();
    let port = listener.local_addr().unwrap().port().to_string();
    assert!(
        text.contains(&address) && text.contains(&format!("port {port}")) && text.contains("taken"),
        "{text}"
    );
}

#[test]
fn without_a_secret_only_loopback_is_used() {
    let text = join(settings(1, 2, Meeting::Coordinator("192.0.2.1:7000".into()))).unwrap_err().to_string();
    assert!(text.contains("192.0.2.1:7000") && text.contains("RACCL_INSECURE"), "{text}");
    let text = join(settings(0, 2, Meeting::Coordinator("192.0.2.1:7000".into()))).unwrap_err().to_string();
    assert!(text.contains("RACCL_INSECURE"), "{text}");
    let everywhere = TcpListener::bind("0.0.0.0:0").unwrap();
    let text = join(settings(0, 2, Meeting::Listener(everywhere))).unwrap_err().to_string();
    assert!(text.contains("0.0.0.0") && text.contains("RACCL_INSECURE"), "{text}");
    let mut named = settings(1, 2, Meeting::Coordinator("127.0.0.1:7000".into()));
    named.bind = vec!["192.0.2.1".parse().unwrap()];
    assert!(join(named).unwrap_err().to_string().contains("RACCL_INSECURE"));
}

#[test]
fn settings_out_of_bounds_are_refused_before_anything_is_sent() {
    let wrong = |change: &dyn Fn(&mut Settings), word: &str| {
        let mut settings = settings(1, 2, Meeting::Coordinator("127.0.0.1:1".into()));
        change(&mut settings);
        let text = join(settings).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    };
    wrong(&|s| s.size = 1, "size");
    wrong(&|s| s.size = SIZE_LIMIT + 1, "size");
    wrong(&|s| s.rank = 2, "rank");
    wrong(&|s| s.sockets = 0, "sockets");
    wrong(&|s| s.sockets = SOCKETS_LIMIT + 1, "sockets");
    wrong(&|s| s.blob = vec![0; BLOB_LIMIT + 1], "tuning");
    wrong(&|s| s.job = "x".repeat(5000), "setting");
    wrong(&|s| s.digest = vec![("x".into(), "y".into()); 300], "settings");
    wrong(&|s| s.meeting = Meeting::Coordinator("nowhere".into()), "port is missing");
}

/// An all-gather between threads.
fn exchanges(size: usize) -> Vec<Exchange> {
    let gathered = Arc::new((Mutex::new(vec![Vec::new(); size]), Barrier::new(size)));
    let exchange = |rank: usize| -> Exchange {
        let gathered = Arc::clone(&gathered);
        Box::new(move |blob| {
            gathered.0.lock().unwrap()[rank] = blob;
            gathered.1.wait();
            Ok(gathered.0.lock().unwrap().clone())
        })
    };
    (0..size).map(exchange).collect()
}

#[test]
fn a_supplied_exchange_takes_the_place_of_the_coordinator() {
    for size in [2, 5] {
        let meetings = exchanges(size).into_iter().map(Meeting::Exchange).enumerate();
        let mut everyone: Vec<_> = meetings.map(|(rank, meeting)| settings(rank, size, meeting)).collect();
        everyone.iter_mut().for_each(|settings| settings.sockets = 2);
        let group = formed(join_all(everyone));
        assert!(group.iter().all(|joined| joined.blob == b"from 0" && joined.nonce == group[0].nonce));
        check_connections(group);
    }
}

#[test]
fn a_supplied_exchange_shows_differences_to_everyone() {
    let meetings = exchanges(3).into_iter().map(Meeting::Exchange).enumerate();
    let mut everyone: Vec<_> = meetings.map(|(rank, meeting)| settings(rank, 3, meeting)).collect();
    everyone[1].digest[0].1 = "shm".to_owned();
    for text in failed(join_all(everyone)) {
        assert!(text.contains("link is \"tcp\" on rank 0 and \"shm\" on rank 1"), "{text}");
    }
}

#[test]
fn a_supplied_exchange_that_fails_or_returns_rubbish_is_an_error() {
    type Answer = fn(Vec<u8>) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>>;
    let cases: [(Answer, &str); 5] = [
        (|_| Err("no network".into()), "no network"),
        (|own| Ok(vec![own]), "1 blobs in a group of 2"),
        (|own| Ok(vec![own, b"rubbish".to_vec()]), "rank 1 a malformed exchanged blob"),
        (|own| Ok(vec![own.clone(), own]), "rank 0's blob in rank 1's place"),
        (|own| Ok(vec![Vec::new(), own]), "malformed"),
    ];
    for (answer, word) in cases {
        let text = join(settings(0, 2, Meeting::Exchange(Box::new(answer)))).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_rank_that_dies_while_the_group_is_connected_ends_everyone() {
    let mut everyone = everyone(3);
    let address = address_of(&everyone);
    let dead = everyone.pop().unwrap();
    let others: Vec<_> = everyone.into_iter().map(|settings| thread::spawn(|| join(settings))).collect();
    let mut hello = say_hello(&address, 2, &dead);
    loop {
        let frame = hello.receive().unwrap().unwrap();
        if matches!(Message::decode(&frame, 3).unwrap(), Message::Roster(_)) {
            break;
        }
    }
    drop(hello);
    for text in failed(others.into_iter().map(|thread| thread.join().unwrap()).collect()) {
        assert!(text.contains("lost rank 2 while the group was connected"), "{text}");
    }
}

#[test]
fn a_rank_that_cannot_be_connected_to_is_named_to_everyone() {
    let mut everyone = everyone(3);
    everyone.iter_mut().for_each(|settings| settings.connect_timeout = Duration::from_secs(2));
    let address = address_of(&everyone);
    let deaf = everyone.remove(1);
    let others: Vec<_> = everyone.into_iter().map(|settings| thread::spawn(|| join(settings))).collect();
    let _hello = say_hello(&address, 1, &deaf);
    for text in failed(others.into_iter().map(|thread| thread.join().unwrap()).collect()) {
        assert!(text.contains(&format!("rank 2 cannot connect to rank 1 at {NOWHERE}")), "{text}");
    }
}

#[test]
fn a_rank_0_that_breaks_the_protocol_is_an_error_and_not_a_hang() {
    let waiting =
        |remaining| Message::Waiting(message::Waiting { remaining, missing: vec![7], count: 9 }).encode();
    let roster = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let members = vec![Member { host: 1, addresses, named: 0, cores: vec![1] }, Member::default()];
        Message::Roster(Roster { nonce: [0; 32], remaining: Duration::MAX, blob: vec![], members }).encode()
    };
    let small = {
        let members = vec![Member::default()];
        Message::Roster(Roster { nonce: [0; 32], remaining: Duration::ZERO, blob: vec![], members }).encode()
    };
    let cases: [(Vec<Vec<u8>>, &str); 9] = [
        (vec![], "cannot reach rank 0"),
        (vec![vec![]], "cannot reach rank 0"),
        (vec![vec![99]], "cannot reach rank 0"),
        (vec![waiting(Duration::MAX)], "still waits for ranks 7 and 8 more"),
        (vec![waiting(Duration::ZERO), vec![3]], "malformed refusal"),
        (vec![waiting(Duration::ZERO), small], "1 ranks instead of 2"),
        (vec![waiting(Duration::ZERO), Message::Go.encode()], "a go where the roster is expected"),
        (vec![roster(&["0.0.0.0:1", "192.0.2.1:1"])], "cannot connect to rank 0"),
        (vec![roster(&[NOWHERE]), Message::Go.encode()], "rank 0 sent a go"),
    ];
    for (frames, word) in cases {
        let (listener, address) = coordinator();
        let mut settings = settings(1, 2, Meeting::Coordinator(address));
        settings.connect_timeout = Duration::from_millis(700);
        let member = thread::spawn(|| join(settings));
        let mut channel = Channel::called(listener.accept().unwrap().0, 1 << 20, None);
        assert!(channel.receive().unwrap().is_some());
        frames.iter().for_each(|frame| channel.send(frame));
        let text = member.join().unwrap().unwrap_err().to_string();
        assert!(text.contains(word), "{word}: {text}");
    }
}

/// Nobody listens there.
const NOWHERE: &str = "127.0.0.1:9";

/// Says hello as a rank with the settings of `like`, and goes no further.
fn say_hello(address: &str, rank: usize, like: &Settings) -> Channel {
    let mut channel = Channel::caller(TcpStream::connect(address).unwrap(), 1 << 20, None).unwrap();
    let member =
        Member { host: like.host, addresses: vec![NOWHERE.parse().unwrap()], named: 0, cores: vec![1] };
    let Settings { size, job, digest, .. } = like;
    let hello = Hello { job: job.clone(), rank, size: *size, settings: digest.clone(), member };
    channel.send(&Message::Hello(hello).encode());
    channel
}
