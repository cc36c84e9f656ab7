//! Rank 1 of three shrinks the group, and the others propose what they should not.

use std::thread::{self, JoinHandle};

use super::{
    super::{
        Meeting,
        channel::Broken,
        council::Word,
        monitor::tests::{Recorder, channels, start},
    },
    *,
};

/// Only a hang takes so long.
const HANG: Duration = Duration::from_secs(60);

fn charter() -> Charter {
    Charter::new(&Settings {
        rank: 1,
        size: 3,
        job: String::new(),
        meeting: Meeting::Coordinator(String::new()),
        bind: Vec::new(),
        sockets: 1,
        connect_timeout: HANG,
        digest: Vec::new(),
        blob: Vec::new(),
        host: 1,
        cores: vec![1],
        secret: None,
        insecure: false,
    })
}

/// What the test says and hears in the place of another rank.
struct Voice(Channel);

impl Voice {
    fn say(&mut self, word: Word) {
        self.send(Event::Council(word));
    }

    fn send(&mut self, event: Event) {
        self.0.send(&event.encode());
    }

    fn receive(&mut self) -> Result<Event, Broken> {
        let until = Instant::now() + HANG;
        loop {
            if let Some(frame) = self.0.receive()? {
                return Ok(Event::decode(&frame).unwrap());
            }
            assert!(Instant::now() < until, "nothing is said");
            thread::yield_now();
        }
    }

    fn hear(&mut self) -> Word {
        match self.receive().unwrap() {
            Event::Council(word) => word,
            other => panic!("{other:?}"),
        }
    }

    /// What has been said before this is answered, by which time all that was said here has been heard.
    fn ask(&mut self) -> Vec<Word> {
        self.send(Event::Ask);
        let mut words = Vec::new();
        loop {
            match self.receive().unwrap() {
                Event::Council(word) => words.push(word),
                Event::Arrived { .. } => return words,
                other => panic!("{other:?}"),
            }
        }
    }

    /// What is said until the connection is closed.
    fn hear_all(mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.receive().ok()).collect()
    }
}

/// Rank 1, in a call of `shrink` that has begun, and the voices of ranks 0 and 2.
fn shrinking() -> (Voice, Voice, JoinHandle<Result<Reformed>>) {
    let (zero, to_zero) = channels();
    let (two, to_two) = channels();
    let recorder = Recorder::answering(vec![]);
    let control = start(vec![Some(to_zero), None, Some(to_two)], &recorder);
    let survivor = thread::spawn(move || {
        let result = reform(&control, 1, &charter(), None);
        drop(recorder);
        result
    });
    let (mut zero, mut two) = (Voice(zero), Voice(two));
    for voice in [&mut zero, &mut two] {
        let word = voice.hear();
        assert!(matches!(&word, Word::Enter(Claim { attempt: 1, .. })), "{word:?}");
    }
    (zero, two, survivor)
}

fn claim(attempt: u32) -> Claim {
    Claim { attempt, member: Member::default() }
}

/// A group of these ranks, each in its first attempt.
fn proposal(nonce: u8, ranks: &[usize]) -> Proposal {
    let seat = |&identity: &usize| Seat { identity, claim: claim(1) };
    Proposal { nonce: [nonce; 32], seats: ranks.iter().map(seat).collect() }
}

fn members(proposal: &Proposal) -> Vec<usize> {
    proposal.seats.iter().map(|seat| seat.identity).collect()
}

/// Without anybody else there is a group of one.
fn alone(survivor: JoinHandle<Result<Reformed>>) {
    assert!(matches!(survivor.join().unwrap(), Ok(Reformed::Alone)));
}

#[test]
fn only_the_lowest_rank_is_accepted() {
    let (mut zero, mut two, survivor) = shrinking();
    two.say(Word::Enter(claim(1)));
    two.say(Word::Propose(proposal(2, &[1, 2])));
    let mut told = two.ask();
    zero.say(Word::Enter(claim(1)));
    told.extend(two.ask());
    zero.say(Word::Propose(proposal(1, &[0, 1, 2])));
    assert_eq!(zero.hear(), Word::Accept { nonce: [1; 32] });
    told.extend(two.ask());
    assert_eq!(told, []);
    // What was not accepted cannot be committed, and is answered with the wish to be in another.
    two.say(Word::Commit { nonce: [2; 32] });
    assert!(matches!(two.hear(), Word::Enter(Claim { attempt: 1, .. })));
    drop((zero, two));
    alone(survivor);
}

#[test]
fn who_is_the_lowest_proposes_and_accepts_nobody() {
    let (zero, mut two, survivor) = shrinking();
    two.say(Word::Enter(claim(1)));
    two.say(Word::Propose(proposal(2, &[1, 2])));
    drop(zero);
    match two.hear() {
        Word::Propose(proposal) => assert_eq!(members(&proposal), [1, 2]),
        other => panic!("{other:?}"),
    }
    assert_eq!(two.ask(), []);
    drop(two);
    alone(survivor);
}

#[test]
fn who_proposes_members_out_of_order_is_lost() {
    for ranks in [&[1, 0, 2][..], &[0, 2, 1], &[0, 1, 1, 2], &[2, 1, 0], &[0, 0]] {
        let (mut zero, mut two, survivor) = shrinking();
        two.say(Word::Enter(claim(1)));
        assert_eq!(two.ask(), []);
        zero.say(Word::Enter(claim(1)));
        zero.say(Word::Propose(proposal(1, ranks)));
        // The others go on without it.
        match two.hear() {
            Word::Propose(proposal) => assert_eq!(members(&proposal), [1, 2]),
            other => panic!("{ranks:?}: {other:?}"),
        }
        assert_eq!(zero.hear_all(), [], "{ranks:?}");
        drop(two);
        alone(survivor);
    }
}

#[test]
fn what_does_not_agree_with_what_was_heard_is_not_accepted() {
    let (zero, to_zero) = channels();
    let (_two, to_two) = channels();
    let recorder = Recorder::answering(vec![]);
    let control = start(vec![Some(to_zero), None, Some(to_two)], &recorder);
    let (group, charter) = (control.group().unwrap(), charter());
    let attempt = Attempt { group, rank: 1, charter: &charter, late: None, connecting: Duration::ZERO };
    let mut state = group.council().lock();
    state.own = Some(claim(1));
    state.claims = vec![Some(claim(1)), None, Some(claim(1))];
    let mut accepted = |proposal: Proposal, present: &[usize]| {
        state.proposals[0] = Some(proposal);
        attempt.follow(&mut state, 0, present);
        state.accepted
    };
    let mut later = proposal(1, &[0, 1, 2]);
    later.seats[2].claim.attempt = 2;
    let mut earlier = proposal(2, &[0, 1, 2]);
    earlier.seats[1].claim.attempt = 0;
    let strange = [
        (later, "rank 2 has not said that it has begun anew"),
        (earlier, "this rank has begun anew since"),
        (proposal(3, &[0, 2]), "without this rank"),
        (proposal(4, &[1, 2]), "without the one that proposes"),
        (proposal(5, &[0, 1, 7]), "a rank that there is not"),
        (proposal(6, &[1, 0, 2]), "out of order"),
        (proposal(7, &[0, 1, 1]), "a rank twice"),
        (proposal(8, &[]), "of nobody"),
    ];
    for (proposal, what) in strange {
        assert_eq!(accepted(proposal, &[0, 2]), None, "{what}");
    }
    assert_eq!(accepted(proposal(9, &[0, 1, 2]), &[0]), None, "with a rank that is gone");
    assert_eq!(accepted(proposal(10, &[0, 1, 2]), &[0, 2]), Some((0, [10; 32])));
    drop(state);
    assert_eq!(Voice(zero).hear(), Word::Accept { nonce: [10; 32] });
}
