//! Processes that are told to end, or end by themselves, while they hold devices: the emulated driver, like Apple's, never gets
//! back what a process that was killed held.

use std::{
    env, fs,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use raccl::{Communicator, Config, Custom, Error, Sum};
use raccl_emulator::{Emulation, Fault, Layout, Spec};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{
    fleet::{End, Fleet, say},
    kills::{BOUND, lost, report, seed},
    operations::Operations,
    support::{child, free_address, random::Random, setting},
};

/// What interrupts a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interruption {
    /// A signal to one rank, in the middle of calls or while the group forms.
    Signal(i32),
    /// The same signal to all.
    SignalToAll(i32),
    /// One rank calls something else than the others, and leaves with the error.
    Error,
    /// One rank panics between two calls.
    Panic,
    /// A cable is cut.
    Cut,
    /// One rank ends the group.
    Abort,
}

impl Interruption {
    fn draw(random: &mut Random) -> Interruption {
        let signal = [SIGTERM, SIGINT][random.below(2)];
        match random.below(10) {
            0..3 => Interruption::Signal(signal),
            3 => Interruption::SignalToAll(signal),
            4 | 5 => Interruption::Error,
            6 | 7 => Interruption::Panic,
            8 => Interruption::Cut,
            _ => Interruption::Abort,
        }
    }
}

#[test]
fn nothing_is_left_open_however_a_group_is_interrupted() {
    const NAME: &str = "signals::nothing_is_left_open_however_a_group_is_interrupted";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    let (cycles, seed) = (setting("RACCL_TEST_INTERRUPTIONS", 20), seed());
    for seed in seed..seed + cycles as u64 {
        interrupt(NAME, seed);
    }
}

fn interrupt(name: &str, seed: u64) {
    let mut random = Random::new(seed);
    let size = 2 + random.below(2);
    let interruption = Interruption::draw(&mut random);
    let victim = random.below(size);
    // Forming the group takes some tens of milliseconds.
    let early = random.below(3) == 0;
    let delay = Duration::from_micros(random.below(if early { 60_000 } else { 20_000 }) as u64);
    let story =
        format!("seed {seed}: {interruption:?}, rank {victim} of {size}, early {early}, after {delay:?}");
    println!("{story}");
    let spec = Layout::mesh().cables(1 + random.below(2)).latency_ns(2000).spec(size);
    let cables = spec.cables.len();
    let emulation = Emulation::create(&spec).unwrap();
    let calls = if early { 0 } else { random.below(200) };
    let what = format!("{interruption:?} {victim} {calls}");
    // Those who look for a rank that is gone already are not to take long.
    let patience = if early { "2s" } else { "60s" };
    let variables = [
        ("RACCL_TEST_SEED", seed.to_string()),
        ("RACCL_TEST_INTERRUPTION", what),
        ("RACCL_CONNECT_TIMEOUT", patience.to_owned()),
    ];
    let mut fleet = Fleet::start_on(Some(&emulation), name, size, &variables);
    if !early {
        fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
    }
    let mut struck = Vec::new();
    match interruption {
        Interruption::Signal(_) => struck.push(victim),
        Interruption::SignalToAll(_) => struck.extend(0..size),
        _ => {}
    }
    if let Interruption::Signal(signal) | Interruption::SignalToAll(signal) = interruption {
        thread::sleep(delay);
        struck.iter().for_each(|&rank| fleet.signal(rank, &signal.to_string()));
    }
    if interruption == Interruption::Cut {
        thread::sleep(delay);
        emulation.inject(&Fault::Cut { cable: random.below(cables), message: None }).unwrap();
    }
    let ends = fleet.finish(BOUND);
    for (rank, end) in ends.iter().enumerate() {
        let ended = end.status.unwrap_or_else(|| panic!("{story}: rank {rank} had to be killed: {ends:#?}"));
        match interruption {
            Interruption::Signal(signal) if rank == victim => {
                assert_eq!(ended.signal(), Some(signal), "{story}: {end:#?}");
            }
            Interruption::Signal(_) if !early => {
                assert_eq!(end.heard("lost"), Some(victim.to_string().as_str()), "{story}: {end:#?}");
                let text = end.heard("text").unwrap_or_default();
                assert!(text.contains(&format!("lost rank {victim}")), "{story}: {end:#?}");
            }
            // The last may have ended by the death of the first.
            Interruption::SignalToAll(signal) => {
                assert!(ended.signal() == Some(signal) || end.heard("text").is_some(), "{story}: {end:#?}");
            }
            _ => assert!(!ended.success() || end.heard("text").is_some(), "{story}: {end:#?}"),
        }
    }
    let books = emulation.books();
    assert!(books.live.is_zero(), "{story}: {:?} is left\n{ends:#?}", books.live);
    assert_eq!(books.mistakes, Default::default(), "{story}");
    assert!(early || books.made.queue_pairs >= 2, "{story}: {books:?}");
}

/// A rank that works until something happens.
fn work(config: Config) {
    let plan = env::var("RACCL_TEST_INTERRUPTION").unwrap();
    let mut words = plan.rsplitn(3, ' ');
    let (calls, victim, kind) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let calls: usize = calls.parse().unwrap();
    let comm = match config.connect() {
        Ok(comm) => comm,
        Err(error) => return say(&format!("text {error}")),
    };
    say("joined");
    let is_victim = victim.parse() == Ok(comm.rank());
    let mut operations = Operations::new(seed(), 100_000);
    let mut result = Ok(());
    for call in 0.. {
        if is_victim && call == calls {
            match kind {
                "Panic" => panic!("as planned"),
                "Error" => {
                    // The others may wait for a message of this rank meanwhile.
                    let short = Duration::from_millis(200);
                    let hasty = comm.with_timeout(short).with_late_timeout(short);
                    result = hasty.all_reduce(&mut [1_u8; 7], Sum);
                }
                "Abort" => comm.abort(),
                _ => {}
            }
        }
        result = result.and_then(|()| operations.next(&comm));
        if result.is_err() {
            break;
        }
    }
    report(&result.unwrap_err());
}

/// What keeps a rank from leaving, for longer than a signal waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// The others are stopped, and do not answer its goodbye.
    Answer,
    /// What they have sent does not come.
    Arrivals,
    /// What it has sent does not leave.
    Departure,
    /// What it has sent does not arrive.
    Confirmation,
}

/// The file that lets a rank go on.
const GO: &str = "RACCL_TEST_GO";

#[test]
fn a_signal_in_the_middle_of_leaving_frees_the_devices() {
    const NAME: &str = "signals::a_signal_in_the_middle_of_leaving_frees_the_devices";
    if let Some(config) = child(NAME) {
        return leave(config.connect().unwrap());
    }
    let waits = [Wait::Answer, Wait::Arrivals, Wait::Departure, Wait::Confirmation];
    for (wait, size) in waits.into_iter().flat_map(|wait| [(wait, 2), (wait, 3)]) {
        for degrade in [false, true] {
            interrupt_leaving(NAME, wait, size, degrade);
        }
    }
}

/// Over cables the end of a stream is told by the rank itself, and one that was killed has told it to nobody.
#[test]
fn a_rank_that_is_killed_in_the_middle_of_leaving_is_lost_to_those_who_need_it() {
    const NAME: &str = "signals::a_rank_that_is_killed_in_the_middle_of_leaving_is_lost_to_those_who_need_it";
    if let Some(config) = child(NAME) {
        return leave(config.connect().unwrap());
    }
    for degrade in [false, true] {
        let Leaving { story, mut fleet, .. } = Leaving::begin(NAME, Wait::Departure, 3, degrade);
        fleet.kill(0);
        for end in &fleet.finish(BOUND)[1..] {
            end.assert_well(&story);
            assert_eq!(end.heard("lost"), Some("0"), "{story}: {end:#?}");
        }
    }
}

/// A group whose rank 0 is in the middle of leaving.
struct Leaving {
    story: String,
    spec: Spec,
    emulation: Emulation,
    fleet: Fleet,
}

impl Leaving {
    fn begin(name: &str, wait: Wait, size: usize, degrade: bool) -> Leaving {
        let story = format!("{wait:?}, {size} ranks, degrade {degrade}");
        println!("{story}");
        let mut spec = Layout::mesh().cables(2).spec(size);
        // So that it is clear through which one a message goes.
        spec.limits.queue_pairs = 1;
        let emulation = Emulation::create(&spec).unwrap();
        let go = emulation.spec_file().with_file_name("go");
        let variables = [
            (GO, go.display().to_string()),
            ("RACCL_TEST_WAIT", format!("{wait:?}")),
            ("RACCL_DEGRADE", u8::from(degrade).to_string()),
        ];
        let mut fleet = Fleet::start_on(Some(&emulation), name, size, &variables);
        let others: Vec<usize> = (1..size).collect();
        fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
        for (cable, ends) in spec.cables.iter().map(|cable| &cable.ends).enumerate() {
            let Some(own) = ends.iter().position(|end| end.machine == 0) else { continue };
            let fault = match wait {
                Wait::Answer => continue,
                Wait::Arrivals => Fault::Stall { cable, end: 1 - own, message: 0 },
                Wait::Departure => Fault::Stall { cable, end: own, message: 0 },
                Wait::Confirmation => Fault::Lose { cable, end: own, message: 0, every: Some(1) },
            };
            emulation.inject(&fault).unwrap();
        }
        if wait == Wait::Answer {
            others.iter().for_each(|&rank| fleet.signal(rank, "STOP"));
        }
        others.iter().for_each(|rank| fs::write(go.with_extension(rank.to_string()), "").unwrap());
        if wait != Wait::Answer {
            fleet.wait_for("sent", &others);
        }
        fs::write(go.with_extension("0"), "").unwrap();
        fleet.wait_for("leaving", &[0]);
        // Wherever it is found, what is tested has to hold; in the middle of leaving it is hardest.
        thread::sleep(Duration::from_millis(100));
        Leaving { story, spec, emulation, fleet }
    }
}

fn interrupt_leaving(name: &str, wait: Wait, size: usize, degrade: bool) {
    let Leaving { story, spec, emulation, mut fleet } = Leaving::begin(name, wait, size, degrade);
    fleet.signal(0, "TERM");
    fleet.wait_for_end(0);
    let left: Vec<_> = (spec.cables.iter().flat_map(|cable| &cable.ends))
        .filter(|end| end.machine == 0)
        .map(|end| emulation.books_of(0, &end.device).unwrap().live)
        .filter(|live| !live.is_zero())
        .collect();
    (1..size).for_each(|rank| fleet.signal(rank, "CONT"));
    let ends = fleet.finish(BOUND);
    assert!(left.is_empty(), "{story}: {left:?} is left; {ends:#?}");
    assert_eq!(ends[0].status.and_then(|status| status.signal()), Some(SIGTERM), "{story}: {ends:#?}");
    for end in &ends[1..] {
        end.assert_well(&story);
        assert_eq!(end.heard("lost"), Some("0"), "{story}: {end:#?}");
    }
    assert!(emulation.books().live.is_zero(), "{story}: {:?} is left; {ends:#?}", emulation.books().live);
}

/// Rank 0 leaves as soon as it may; the others wait for what it does not send.
fn leave(comm: Communicator) {
    let wait = env::var("RACCL_TEST_WAIT").unwrap();
    say("joined");
    wait_to_go(comm.rank());
    if comm.rank() > 0 {
        if wait == format!("{:?}", Wait::Arrivals) {
            comm.send(&[1_u8], 0, 1).unwrap();
        }
        say("sent");
        return report(&comm.recv(&mut [0_u8], 0, 0).unwrap_err());
    }
    if [Wait::Departure, Wait::Confirmation].map(|wait| format!("{wait:?}")).contains(&wait) {
        (1..comm.size()).for_each(|peer| comm.send(&[1_u8], peer, 1).unwrap());
    }
    say("leaving");
    if comm.size() == 2 {
        // The signal says more than this does.
        let _ = comm.close();
    }
}

fn wait_to_go(rank: usize) {
    let go = PathBuf::from(env::var_os(GO).unwrap()).with_extension(rank.to_string());
    while !go.exists() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Of two groups with a cable each, one cannot let go of it, and the other is in the middle of leaving.
#[test]
fn a_group_that_cannot_free_its_devices_does_not_keep_another_from_it() {
    const NAME: &str = "signals::a_group_that_cannot_free_its_devices_does_not_keep_another_from_it";
    if let Some(config) = child(NAME) {
        let given = |variable| env::var(variable).unwrap();
        let other = Config::from_env()
            .unwrap()
            .coordinator(given("RACCL_TEST_OTHER"))
            .devices(given("RACCL_TEST_SECOND"));
        let stuck_one = config.devices(given("RACCL_TEST_FIRST")).connect().unwrap();
        let leaving = other.connect().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| stuck(&stuck_one));
            wait_to_go(leaving.rank());
            say("leaving");
            // The signal says more than this does.
            let _ = leaving.close();
        });
        return;
    }
    let emulation = Emulation::create(&Layout::mesh().cables(2).spec(2)).unwrap();
    let go = emulation.spec_file().with_file_name("go");
    let names = emulation.spec().device_names();
    let matrix =
        |cable: usize| format!(r#"[[null, "{}"], ["{}", null]]"#, names[0][1][cable], names[1][0][cable]);
    let variables = [
        (GO, go.display().to_string()),
        ("RACCL_TEST_OTHER", free_address()),
        ("RACCL_TEST_FIRST", matrix(0)),
        ("RACCL_TEST_SECOND", matrix(1)),
    ];
    let mut fleet = Fleet::start_on(Some(&emulation), NAME, 2, &variables);
    fleet.wait_for("stuck", &[0]);
    fleet.signal(1, "STOP");
    fs::write(go.with_extension("0"), "").unwrap();
    fleet.wait_for("leaving", &[0]);
    thread::sleep(Duration::from_millis(100));
    fleet.signal(0, "TERM");
    fleet.wait_for_end(0);
    let left = [0, 1].map(|cable: usize| emulation.books_of(0, &names[0][1][cable]).unwrap().live);
    fleet.kill(1);
    let ends = fleet.finish(BOUND);
    assert_eq!(ends[0].status.and_then(|status| status.signal()), Some(SIGTERM), "{ends:#?}");
    assert!(!left[0].is_zero(), "the first group was not stuck: {ends:#?}");
    assert!(left[1].is_zero(), "{:?} is left; {ends:#?}", left[1]);
}

/// The signals of these two for which this process has a handler.
fn handled() -> [bool; 2] {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
    [SIGTERM, SIGINT].map(|signal| caught & 1 << (signal - 1) != 0)
}

/// Runs `body` in two processes that are joined by cables, and returns how they ended.
fn pair(name: &str, body: impl FnOnce(Config), during: impl FnOnce(&mut Fleet)) -> Option<Vec<End>> {
    if let Some(config) = child(name) {
        body(config);
        return None;
    }
    let emulation = Emulation::create(&Layout::mesh().spec(2)).unwrap();
    let mut fleet = Fleet::start_on(Some(&emulation), name, 2, &[]);
    during(&mut fleet);
    let ends = fleet.finish(BOUND);
    assert!(emulation.books().live.is_zero(), "{:?} is left; {ends:#?}", emulation.books().live);
    Some(ends)
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "looks in /proc")]
fn handlers_are_there_while_a_device_is_open_and_only_then() {
    const NAME: &str = "signals::handlers_are_there_while_a_device_is_open_and_only_then";
    let body = |config: Config| {
        assert_eq!(handled(), [false; 2]);
        let without = Config::new().connect().unwrap();
        without.barrier().unwrap();
        assert_eq!(handled(), [false; 2]);
        let comm = config.connect().unwrap();
        assert_eq!(handled(), [true; 2]);
        comm.barrier().unwrap();
        comm.close().unwrap();
        assert_eq!(handled(), [false; 2]);
    };
    let Some(ends) = pair(NAME, body, |_| {}) else { return };
    ends.iter().for_each(|end| end.assert_well("handlers"));
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "looks in /proc")]
fn who_wants_no_handler_has_none() {
    const NAME: &str = "signals::who_wants_no_handler_has_none";
    let body = |config: Config| {
        let comm = config.signals(false).connect().unwrap();
        assert_eq!(handled(), [false; 2]);
        comm.close().unwrap();
    };
    let Some(ends) = pair(NAME, body, |_| {}) else { return };
    ends.iter().for_each(|end| end.assert_well("no handlers"));
}

#[test]
fn a_handler_of_the_program_stays_and_is_called() {
    const NAME: &str = "signals::a_handler_of_the_program_stays_and_is_called";
    let body = |config: Config| {
        let called = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGTERM, Arc::clone(&called)).unwrap();
        let comm = config.connect().unwrap();
        say("joined");
        while !called.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        // The group goes on, and is closed as the program likes.
        let mut values = [comm.rank() as u32 + 1];
        comm.all_reduce(&mut values, Sum).unwrap();
        assert_eq!(values, [3]);
        comm.close().unwrap();
    };
    let during = |fleet: &mut Fleet| {
        fleet.wait_for("joined", &[0, 1]);
        (0..2).for_each(|rank| fleet.signal(rank, "TERM"));
    };
    let Some(ends) = pair(NAME, body, during) else { return };
    ends.iter().for_each(|end| end.assert_well("own handler"));
}

#[test]
fn a_rank_that_computes_is_ended_as_one_that_waits_is() {
    const NAME: &str = "signals::a_rank_that_computes_is_ended_as_one_that_waits_is";
    let body = |config: Config| {
        let comm = config.connect().unwrap();
        say("joined");
        if comm.rank() == 0 {
            thread::sleep(BOUND);
            return;
        }
        let error = comm.recv(&mut [0_u8], 0, 0).unwrap_err();
        assert_eq!(lost(&error), Some(0), "{error}");
        assert!(error.to_string().contains("ended by SIGTERM"), "{error}");
    };
    let during = |fleet: &mut Fleet| {
        fleet.wait_for("joined", &[0, 1]);
        fleet.signal(0, "TERM");
    };
    let Some(ends) = pair(NAME, body, during) else { return };
    assert_eq!(ends[0].status.and_then(|status| status.signal()), Some(SIGTERM), "{ends:#?}");
    ends[1].assert_well("the other");
}

/// An operation of the user's that takes for ever keeps the devices from being freed; the signal waits for it only so long, and
/// a second one not at all.
#[test]
fn a_signal_ends_a_process_that_cannot_free_its_devices_too() {
    const NAME: &str = "signals::a_signal_ends_a_process_that_cannot_free_its_devices_too";
    if let Some(config) = child(NAME) {
        let comm = config.connect().unwrap();
        stuck(&comm);
        return;
    }
    for second in [None, Some(SIGINT)] {
        // The first signal ends the process in a second; a machine may be so slow that the second one comes after that.
        let came_first = (0..20).any(|_| {
            let emulation = Emulation::create(&Layout::mesh().spec(2)).unwrap();
            let mut fleet = Fleet::start_on(Some(&emulation), NAME, 2, &[]);
            fleet.wait_for("stuck", &[0]);
            fleet.signal(0, "TERM");
            if let Some(second) = second {
                fleet.signal(0, &second.to_string());
            }
            let ends = fleet.finish(BOUND);
            let signal = ends[0].status.unwrap_or_else(|| panic!("{ends:#?}")).signal();
            assert!(signal == Some(SIGTERM) || signal == second, "{ends:#?}");
            signal == second.or(Some(SIGTERM))
        });
        assert!(came_first, "the second signal waited for the first");
    }
}

fn stuck(comm: &Communicator) {
    let slow = |one: &u32, other: &u32| {
        if comm.rank() == 0 {
            say("stuck");
            thread::sleep(BOUND);
        }
        one + other
    };
    // The other rank may have the result before it hears of the signal.
    let result = comm.all_reduce(&mut [1_u32], Custom::new(slow)).and_then(|()| comm.barrier());
    assert!(matches!(result, Err(Error::PeerLost { peer: 0, .. })), "{result:?}");
}
