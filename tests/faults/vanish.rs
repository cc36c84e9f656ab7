//! Machines that vanish without closing their sockets: two network namespaces, joined by a cable that is pulled.

use std::{
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use raccl::Config;

use crate::{
    fleet::{Fleet, now, say},
    kills::{BOUND, Times, check, report},
    support::{child, rank_command},
};

/// Two machines: rank 0 behind a switch, rank 1 plugged into it. Gone when dropped.
struct Machines {
    names: [String; 2],
}

impl Machines {
    /// `None`, with the reason printed, where namespaces cannot be made.
    fn new() -> Option<Machines> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("raccl-{}-{number}{end}", process::id());
        let machines = Machines { names: [name('a'), name('b')] };
        let [a, b] = &machines.names;
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link add cable type veth peer name plug netns {b}"),
            format!("-n {a} link add switch type bridge"),
            format!("-n {a} link set cable master switch"),
            format!("-n {a} addr add 10.77.0.1/24 dev switch"),
            format!("-n {b} addr add 10.77.0.2/24 dev plug"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link set cable up"),
            format!("-n {a} link set switch up"),
            format!("-n {b} link set plug up"),
        ];
        for step in steps {
            if let Err(reason) = ip(&step) {
                println!("skipped: this needs the rights to make network namespaces: ip {step}: {reason}");
                return None;
            }
        }
        Some(machines)
    }

    /// Unplugs rank 1 from the switch: no error comes back from anywhere, frames are just lost.
    fn unplug(&self) {
        ip(&format!("-n {} link set cable nomaster", self.names[0])).unwrap();
    }

    /// Takes the interface of rank 1 down: rank 1's kernel knows, rank 0's does not.
    fn take_down(&self) {
        ip(&format!("-n {} link set plug down", self.names[1])).unwrap();
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            // It does not exist if making it has failed.
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// A rank in a machine of its own.
fn on(machine: &str, name: &str, rank: usize, mode: &str) -> Command {
    let there = rank_command(name, rank, 2, "10.77.0.1:7171");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", machine]).arg(there.get_program()).args(there.get_args());
    for (name, value) in there.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.env("RACCL_TEST_MODE", mode);
    command.stdin(process::Stdio::null()).stdout(process::Stdio::piped()).stderr(process::Stdio::piped());
    command
}

/// `busy`: data are under way all the time. `idle`: both wait for what does not come.
fn vanishes(name: &str, mode: &str, pull: impl Fn(&Machines)) {
    let Some(machines) = Machines::new() else { return };
    let commands = machines.names.iter().enumerate().map(|(rank, machine)| on(machine, name, rank, mode));
    let mut fleet = Fleet::run(commands.collect());
    fleet.wait_for("working", &[0, 1]);
    thread::sleep(Duration::from_millis(200));
    let at = now();
    pull(&machines);
    let ends = fleet.finish(BOUND);
    let mut times = Times::new();
    for (rank, end) in ends.iter().enumerate() {
        times.add(check(end, rank, 1 - rank, 0).saturating_sub(at));
    }
    times.show(&format!("{mode}: from the cable to the error on both sides"));
}

fn work(config: Config) {
    let comm = config.connect().unwrap();
    comm.barrier().unwrap();
    say("working");
    let busy = std::env::var("RACCL_TEST_MODE").unwrap() == "busy";
    let mut values = vec![1_u32; 100_000];
    let error = loop {
        let result = match busy {
            true => comm.all_reduce(&mut values, raccl::Max),
            false => comm.recv(&mut values, 1 - comm.rank(), 0).map(|_| ()),
        };
        if let Err(error) = result {
            break error;
        }
    };
    say(&format!("at {}", now()));
    report(&error);
}

#[test]
fn a_machine_that_vanishes_in_the_middle_of_a_transfer_is_lost() {
    const NAME: &str = "vanish::a_machine_that_vanishes_in_the_middle_of_a_transfer_is_lost";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    vanishes(NAME, "busy", Machines::unplug);
}

#[test]
fn a_machine_that_vanishes_while_everybody_waits_is_lost() {
    const NAME: &str = "vanish::a_machine_that_vanishes_while_everybody_waits_is_lost";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    vanishes(NAME, "idle", Machines::unplug);
}

#[test]
fn a_machine_whose_interface_goes_down_is_lost() {
    const NAME: &str = "vanish::a_machine_whose_interface_goes_down_is_lost";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    vanishes(NAME, "idle", Machines::take_down);
}
