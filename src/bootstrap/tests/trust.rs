//! Groups with a job secret, and those who try to get in without it.

use std::net::Shutdown;

use super::{
    channel::{Broken, Pass},
    keys::{JobKeys, Place},
    message::Purpose,
    *,
};

fn secret(byte: u8) -> Option<Secret> {
    Some(Secret::new([byte; 32]))
}

/// Everyone of a group with a secret.
fn trusted(size: usize) -> Vec<Settings> {
    let mut everyone = everyone(size);
    everyone.iter_mut().for_each(|settings| settings.secret = secret(7));
    everyone
}

fn lobby_pass(byte: u8) -> Pass {
    Pass { place: Place::Lobby, key: JobKeys::new(Secret::new([byte; 32])).lobby() }
}

#[test]
fn groups_with_a_secret_form_and_every_data_connection_is_agreed_upon() {
    for size in [2, 3, 5] {
        let mut everyone = trusted(size);
        everyone.iter_mut().for_each(|settings| settings.sockets = 2);
        let group = formed(join_all(everyone));
        for joined in &group {
            for peer in 0..size {
                let expected = if peer == joined.rank { 0 } else { 2 };
                assert_eq!(joined.sessions[peer].len(), expected);
            }
        }
        check_connections(group);
    }
}

#[test]
fn a_supplied_exchange_is_no_substitute_for_the_secret() {
    let meetings = exchanges(3).into_iter().map(Meeting::Exchange).enumerate();
    let mut everyone: Vec<_> = meetings.map(|(rank, meeting)| settings(rank, 3, meeting)).collect();
    everyone.iter_mut().for_each(|settings| settings.secret = secret(7));
    check_connections(formed(join_all(everyone)));

    let meetings = exchanges(2).into_iter().map(Meeting::Exchange).enumerate();
    let mut everyone: Vec<_> = meetings.map(|(rank, meeting)| settings(rank, 2, meeting)).collect();
    for settings in &mut everyone {
        settings.secret = secret(settings.rank as u8);
        settings.connect_timeout = Duration::from_secs(1);
    }
    let texts = failed(join_all(everyone));
    assert!(
        texts[1].contains("cannot connect to rank 0") && texts[1].contains("another job secret"),
        "{}",
        texts[1]
    );
    assert!(texts[0].contains("rank 1 did not connect to rank 0"), "{}", texts[0]);
}

#[test]
fn another_secret_is_an_error_on_both_sides_that_says_what_to_do() {
    let mut everyone = trusted(2);
    everyone[1].secret = secret(8);
    everyone.iter_mut().for_each(|settings| settings.connect_timeout = Duration::from_secs(1));
    for text in failed(join_all(everyone)) {
        assert!(text.contains("another job secret") && text.contains("the same secret"), "{text}");
    }
}

#[test]
fn a_secret_on_one_side_only_is_an_error_on_both_sides_that_says_what_to_do() {
    for without in [0, 1] {
        let mut everyone = trusted(2);
        everyone[without].secret = None;
        everyone.iter_mut().for_each(|settings| settings.connect_timeout = Duration::from_secs(1));
        for text in failed(join_all(everyone)) {
            assert!(text.contains("job secret") && text.contains("RACCL_SECRET_FILE"), "{text}");
        }
    }
}

#[test]
fn with_a_secret_other_addresses_than_loopback_are_allowed() {
    let everywhere = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = everywhere.local_addr().unwrap().port();
    let zero = Settings { secret: secret(7), ..settings(0, 2, Meeting::Listener(everywhere)) };
    let address = format!("127.0.0.1:{port}");
    let one = Settings { secret: secret(7), ..settings(1, 2, Meeting::Coordinator(address)) };
    check_connections(formed(join_all(vec![zero, one])));
}

/// Everything that a caller says until it is answered, recorded by a relay in between.
#[test]
fn a_recorded_hello_lets_nobody_in() {
    // Rank 1 joins through a relay that keeps what it said.
    let mut everyone = trusted(3);
    let address = address_of(&everyone);
    let last = everyone.pop().unwrap();
    let mut first = everyone.pop().unwrap();
    let (relay, relayed) = coordinator();
    first.meeting = Meeting::Coordinator(relayed);
    let zero = everyone.pop().unwrap();
    let zero = thread::spawn(|| join(zero));
    let first = thread::spawn(|| join(first));
    let (mut caller, _) = relay.accept().unwrap();
    // Only this connection goes through it.
    drop(relay);
    let mut called = TcpStream::connect(&address).unwrap();
    let pass_on = |from: &mut TcpStream, to: &mut TcpStream, count: usize| {
        let mut bytes = vec![0; count];
        from.read_exact(&mut bytes).unwrap();
        to.write_all(&bytes).unwrap();
        bytes
    };
    let record = |from: &mut TcpStream, to: &mut TcpStream| {
        let length = pass_on(from, to, 2);
        let record = pass_on(from, to, usize::from(length[0]) + 256 * usize::from(length[1]));
        [length, record].concat()
    };
    // The call, its answer, the hello, and the answer to that.
    let mut said = pass_on(&mut caller, &mut called, 12 + channel::CALL_BYTES);
    pass_on(&mut called, &mut caller, 12 + channel::ANSWER_BYTES);
    said.extend(record(&mut caller, &mut called));
    record(&mut called, &mut caller);
    // The whole of it, again and again: it is answered, since the first part proves the key, but nobody arrives.
    for _ in 0..20 {
        let mut replay = TcpStream::connect(&address).unwrap();
        replay.write_all(&said).unwrap();
        let mut heard = Vec::new();
        let _ = replay.read_to_end(&mut heard);
        assert!(heard.len() <= 12 + 1 + 48, "{} bytes", heard.len());
    }
    // The real one goes on through the relay, and the group forms with it.
    let (mut back, mut forth) = (called.try_clone().unwrap(), caller.try_clone().unwrap());
    thread::spawn(move || std::io::copy(&mut back, &mut forth));
    thread::spawn(move || {
        let _ = std::io::copy(&mut caller, &mut called);
        let _ = called.shutdown(Shutdown::Both);
    });
    let last = join(last);
    check_connections(formed(vec![zero.join().unwrap(), first.join().unwrap(), last]));
}

#[test]
fn who_has_no_key_is_told_nothing_but_that() {
    let mut everyone = trusted(2);
    let address = address_of(&everyone);
    let last = everyone.pop().unwrap();
    let zero = everyone.pop().unwrap();
    let zero = thread::spawn(|| join(zero));
    let wrong = lobby_pass(8);
    let mut channel = Channel::caller(TcpStream::connect(&address).unwrap(), 1 << 20, Some(&wrong)).unwrap();
    channel.send(b"hello");
    assert!(matches!(channel.receive(), Err(Broken::Secret)));
    // Half a handshake, a length that claims everything, and one bit of a good call changed.
    let good = lobby_pass(7);
    for (count, flip) in [(40, 0), (73, 1), (12, 4), (30, 2)] {
        let mut raw = TcpStream::connect(&address).unwrap();
        let (mut call, other) = tcp_pair();
        let _caller = Channel::caller(other, 100, Some(&good)).map(|mut channel| {
            channel.flush();
            channel
        });
        let mut bytes = [0; 12 + channel::CALL_BYTES];
        call.read_exact(&mut bytes).unwrap();
        bytes[count - 1] ^= flip;
        raw.write_all(&bytes).unwrap();
        raw.write_all(&[0xff; 64]).unwrap();
        let mut heard = Vec::new();
        let _ = raw.read_to_end(&mut heard);
        assert!(heard.len() <= 12 + channel::ANSWER_BYTES, "{count} {flip}: {} bytes", heard.len());
    }
    let last = join(last);
    check_connections(formed(vec![zero.join().unwrap(), last]));
}

#[test]
fn a_key_for_one_place_opens_no_other() {
    let nonce = [9; 32];
    let keys = Arc::new(JobKeys::new(Secret::new([7; 32])).group(&nonce));
    let place = |index| Place::Pair { from: 2, to: 1, purpose: Purpose::Data(index) };
    let call = |claimed: Place, proved: Place, keys: &keys::GroupKeys| {
        let (one, two) = tcp_pair();
        [&one, &two].into_iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        let pass = Pass { place: claimed, key: keys.place(proved) };
        let mut caller = Channel::caller(one, 100, Some(&pass)).unwrap();
        let mut called = Channel::called(two, 100, Some(&self::keys(nonce)));
        caller.send(b"greeting");
        loop {
            match called.receive() {
                Ok(Some(frame)) => return Ok((called.place(), frame)),
                Ok(None) => drop(caller.receive()),
                Err(broken) => return Err(broken),
            }
        }
    };
    let (found, frame) = call(place(0), place(0), &keys).unwrap();
    assert_eq!((found, &frame[..]), (Some(place(0)), &b"greeting"[..]));
    assert!(matches!(call(place(1), place(0), &keys), Err(Broken::Secret)));
    assert!(matches!(call(Place::Lobby, place(0), &keys), Err(Broken::Secret)));
    let old = JobKeys::new(Secret::new([7; 32])).group(&[8; 32]);
    assert!(matches!(call(place(0), place(0), &old), Err(Broken::Secret)), "a key of an earlier group");
}

fn keys(nonce: [u8; 32]) -> Arc<keys::GroupKeys> {
    Arc::new(JobKeys::new(Secret::new([7; 32])).group(&nonce))
}

/// A connection, blocking at both ends.
fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let two = listener.accept().unwrap().0;
    (one, two)
}

#[test]
fn a_changed_byte_ends_a_control_connection() {
    let nonce = [9; 32];
    let group = keys(nonce);
    let pass = lobby_pass(7);
    for at in 0..3 + 16 + 4 + 5 {
        let (one, middle) = tcp_pair();
        let (mut out, two) = tcp_pair();
        one.set_nonblocking(true).unwrap();
        two.set_nonblocking(true).unwrap();
        let mut caller = Channel::caller(one, 100, Some(&pass)).unwrap();
        let mut called = Channel::called(two, 100, Some(&group));
        caller.flush();
        let mut middle = middle;
        let mut call = vec![0; 12 + channel::CALL_BYTES];
        middle.read_exact(&mut call).unwrap();
        out.write_all(&call).unwrap();
        let mut answer = vec![0; 12 + channel::ANSWER_BYTES];
        while called.receive().unwrap().is_none() && called.place().is_none() {}
        out.read_exact(&mut answer).unwrap();
        middle.write_all(&answer).unwrap();
        caller.send(b"hello");
        let mut frame = vec![0; 2 + 4 + 5 + 16];
        middle.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        loop {
            drop(caller.receive().unwrap());
            if middle.read_exact(&mut frame).is_ok() {
                break;
            }
        }
        if at < frame.len() {
            frame[at] ^= 0x40;
        }
        out.write_all(&frame).unwrap();
        // So that a length that was made larger has something to swallow.
        out.write_all(&[0; 1 << 16]).unwrap();
        let heard = loop {
            match called.receive() {
                Ok(None) => thread::yield_now(),
                other => break other,
            }
        };
        if at < frame.len() {
            assert!(matches!(heard, Err(Broken::Tampered)), "byte {at}: {heard:?}");
        } else {
            assert_eq!(heard.unwrap().unwrap(), b"hello");
        }
    }
}
