//! Groups of real processes, some of which are killed or stopped.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, ChildStdin, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use super::super::{control::Control, monitor::tests::Recorder};
use super::*;

/// How long a process may take for anything. Only a hang takes longer.
const HANG: Duration = Duration::from_secs(60);

/// One rank in a process of its own.
struct Rank {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Rank {
    fn start(rank: usize, size: usize, address: &str, timeout: Duration) -> Rank {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "bootstrap::tests::processes::one_rank", "--ignored", "--nocapture"])
            .env("BOOTSTRAP_TEST", format!("{rank} {size} {address} {}", timeout.as_millis()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (line, lines) = mpsc::channel();
        thread::spawn(move || {
            for text in stdout.lines().map_while(|text| text.ok()) {
                // The first line shares its beginning with what the test harness prints.
                if let Some((_, text)) = text.split_once("> ") {
                    let _ = line.send(text.to_owned());
                }
            }
        });
        Rank { stdin: child.stdin.take(), child, lines }
    }

    /// The next thing it says.
    fn says(&self) -> String {
        self.lines.recv_timeout(HANG).expect("the process still speaks")
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Makes it leave in order.
    fn leave(&mut self) {
        drop(self.stdin.take());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended long ago.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(size: usize, timeout: Duration) -> Vec<Rank> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    (0..size).map(|rank| Rank::start(rank, size, &address, timeout)).collect()
}

#[test]
#[ignore = "one process of the other tests here, which start it"]
fn one_rank() {
    let Ok(order) = env::var("BOOTSTRAP_TEST") else { return };
    let mut words = order.split(' ');
    let mut number = || words.next().unwrap().to_owned();
    let (rank, size) = (number().parse().unwrap(), number().parse().unwrap());
    let mut settings = settings(rank, size, Meeting::Coordinator(number()));
    settings.connect_timeout = Duration::from_millis(number().parse().unwrap());
    let joined = match join(settings) {
        Ok(joined) => joined,
        Err(error) => {
            println!("\n> failed: {error}");
            return;
        }
    };
    let recorder = Recorder::answering(vec![rank as u64]);
    let control = Control::start(joined.control, rank, recorder.clone()).unwrap();
    println!("\n> formed");
    let leaving = Arc::new(AtomicBool::new(false));
    thread::spawn({
        let leaving = leaving.clone();
        move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            leaving.store(true, Ordering::Release);
        }
    });
    let mut said_goodbye = false;
    let mut answers = 0;
    while answers < size - 1 {
        for note in recorder.taken() {
            answers += usize::from(note.starts_with("answered"));
            println!("> {note}");
        }
        if leaving.load(Ordering::Acquire) && !said_goodbye {
            said_goodbye = true;
            (0..size).filter(|&peer| peer != rank).for_each(|peer| control.goodbye(peer));
        }
        thread::sleep(Duration::from_millis(1));
    }
    control.close(|| true);
    println!("> left");
}

#[test]
fn processes_form_a_group_and_leave_it_one_after_the_other_without_losing_anybody() {
    let mut ranks = start(4, PATIENCE);
    for rank in &ranks {
        assert_eq!(rank.says(), "formed");
    }
    for leaver in [2, 0, 3, 1] {
        ranks[leaver].leave();
        loop {
            match ranks[leaver].says() {
                text if text == "left" => break,
                text => assert!(!text.contains("lost"), "{text}"),
            }
        }
    }
}

#[test]
fn a_killed_process_is_lost_to_every_other_one() {
    for victim in [0, 2] {
        let mut ranks = start(4, PATIENCE);
        for rank in &ranks {
            assert_eq!(rank.says(), "formed");
        }
        ranks[victim].child.kill().unwrap();
        for (_, rank) in ranks.iter().enumerate().filter(|&(rank, _)| rank != victim) {
            let text = rank.says();
            assert!(text.starts_with(&format!("lost {victim}: its connection")), "{text}");
        }
    }
}

#[test]
fn a_stopped_process_is_not_lost() {
    let mut ranks = start(3, PATIENCE);
    for rank in &ranks {
        assert_eq!(rank.says(), "formed");
    }
    ranks[1].signal("-STOP");
    // Longer than a machine that has vanished goes unnoticed.
    thread::sleep(Duration::from_secs(5));
    ranks[1].signal("-CONT");
    ranks.iter_mut().for_each(Rank::leave);
    for rank in &ranks {
        loop {
            match rank.says() {
                text if text == "left" => break,
                text => assert!(!text.contains("lost"), "{text}"),
            }
        }
    }
}

#[test]
fn a_process_killed_at_any_moment_of_joining_leaves_nobody_waiting_for_ever() {
    for round in 0..12u64 {
        let mut ranks = start(3, Duration::from_millis(1500));
        let victim = (round % 3) as usize;
        thread::sleep(Duration::from_millis(round * round / 2));
        ranks[victim].child.kill().unwrap();
        for (number, rank) in ranks.iter().enumerate().filter(|&(rank, _)| rank != victim) {
            let mut text = rank.says();
            if text == "formed" {
                text = rank.says();
                assert!(text.starts_with(&format!("lost {victim}")), "round {round}, rank {number}: {text}");
            } else {
                assert!(
                    text.starts_with("failed: forming the group"),
                    "round {round}, rank {number}: {text}"
                );
            }
        }
    }
}

#[test]
fn making_and_leaving_200_groups_leaks_neither_descriptors_nor_threads() {
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", "bootstrap::tests::processes::two_hundred_groups", "--ignored"])
        .env("BOOTSTRAP_TEST", "200")
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

/// Needs a process of its own, since others' descriptors would be counted.
#[test]
#[ignore = "the process of the test before, which starts it"]
fn two_hundred_groups() {
    let Ok(rounds) = env::var("BOOTSTRAP_TEST") else { return };
    let before = descriptors_and_threads();
    for round in 0..rounds.parse().unwrap() {
        let group = formed(join_all(everyone(3)));
        let recorders: Vec<_> = (0..3).map(|rank| Recorder::answering(vec![rank])).collect();
        let controls: Vec<_> = group
            .into_iter()
            .map(|joined| {
                Control::start(joined.control, joined.rank, recorders[joined.rank].clone()).unwrap()
            })
            .collect();
        for (rank, control) in controls.iter().enumerate() {
            (0..3).filter(|&peer| peer != rank).for_each(|peer| control.goodbye(peer));
        }
        for recorder in &recorders {
            let mut answers = 0;
            while answers < 2 {
                answers += usize::from(recorder.next().starts_with("answered"));
            }
        }
        drop(controls);
        // The monitor closes what is left a moment later.
        let patience = Instant::now() + HANG;
        while descriptors_and_threads().iter().zip(&before).any(|(now, before)| now > before) {
            assert!(
                Instant::now() < patience,
                "round {round}: {:?} after {before:?}",
                descriptors_and_threads()
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn descriptors_and_threads() -> [usize; 2] {
    ["/dev/fd", "/proc/self/task"].map(|folder| std::fs::read_dir(folder).map_or(0, Iterator::count))
}
