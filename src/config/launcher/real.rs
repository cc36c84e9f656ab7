//! Tests under the real launchers of MPICH and Open MPI, which start this test program again as their ranks.
#![forbid(unsafe_code)]

use std::{
    env, fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::Duration,
};

use crate::config::{Config, Origin, Rendezvous};

const RANKS: usize = 4;

/// Where nobody listens, for nobody calls.
const COORDINATOR: &str = "127.0.0.1:7000";

/// Set for the ranks.
const LAUNCHED: &str = "RACCL_TEST_LAUNCHED";

/// What a rank does: it joins, checks that what it learnt is what the others learnt, and says so on a line of its own.
#[test]
#[ignore = "is run by the other tests, under a launcher"]
fn as_a_rank() {
    if env::var_os(LAUNCHED).is_none() {
        println!("skipped: no launcher started this");
        return;
    }
    let config = Config::from_env().expect("the launcher's variables");
    let (origin, local_rank) = (config.origin(), config.local_rank());
    let resolved = config.connect_timeout(Duration::from_secs(30)).resolve().expect("resolved");
    let (rank, size) = (resolved.rank, resolved.size);
    assert_eq!(size, RANKS);
    assert_eq!(local_rank.unwrap_or(rank), rank, "all ranks are on this machine");
    let secret = resolved.secret.as_ref().map_or([0; 32], |secret| *secret.bytes());
    let how = match resolved.rendezvous {
        Rendezvous::Coordinator(ref given) if resolved.secret.is_none() => {
            assert_eq!(given, COORDINATOR);
            "coordinator"
        }
        Rendezvous::Exchange(exchange) => {
            // Long enough to need many values of any launcher, and of another length on each rank.
            let blob = |rank: usize| [&secret[..], &vec![rank as u8; 3000 + rank]].concat();
            assert_eq!(exchange(blob(rank)).expect("exchanged"), (0..size).map(blob).collect::<Vec<_>>());
            "exchange"
        }
        Rendezvous::Listener(ref listener) => {
            meet_as_0(listener, &secret, size);
            "file"
        }
        Rendezvous::Coordinator(ref address) => {
            let mut stream = TcpStream::connect(address.as_str()).expect("rank 0 listens");
            stream.write_all(&secret).expect("write");
            "file"
        }
        Rendezvous::Alone => panic!("a group of {size} is not alone"),
    };
    // The test harness writes to the same line.
    println!("\nrank {rank} of {size} met by {how}, told by {origin}.");
}

fn meet_as_0(listener: &TcpListener, secret: &[u8], size: usize) {
    for _ in 1..size {
        let (mut stream, _) = listener.accept().expect("accept");
        let mut theirs = Vec::new();
        stream.read_to_end(&mut theirs).expect("read");
        assert_eq!(theirs, secret);
    }
}

#[test]
fn ranks_of_mpich_exchange_through_the_inherited_connection() {
    let Some(mpirun) = find("mpirun.mpich") else { return };
    check(&run(Command::new(mpirun), &[]), "exchange", Origin::Pmi);
}

#[test]
fn ranks_of_mpich_exchange_through_a_port() {
    let Some(mpirun) = find("mpirun.mpich") else { return };
    check(&run(Command::new(mpirun), &["-pmi-port"]), "exchange", Origin::Pmi);
}

#[test]
fn a_coordinator_is_enough_for_ranks_that_ask_the_launcher_for_their_number() {
    let Some(mpirun) = find("mpirun.mpich") else { return };
    let given = ["-pmi-port", "-genv", "RACCL_COORDINATOR", COORDINATOR];
    check(&run(Command::new(mpirun), &given), "coordinator", Origin::Pmi);
}

#[test]
fn ranks_of_openmpi_on_one_machine_meet_in_a_file() {
    let Some(mpirun) = find("mpirun.openmpi") else { return };
    let runtime = env::temp_dir().join(format!("raccl-openmpi-{}", std::process::id()));
    fs::create_dir_all(&runtime).expect("directory");
    let mut command = Command::new(mpirun);
    // Containers run everything as root, and the machine may have fewer cores than ranks.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("XDG_RUNTIME_DIR", "/nonexistent").env("TMPDIR", &runtime);
    check(&run(command, &["--oversubscribe"]), "file", Origin::OpenMpi);
    let leftovers: Vec<PathBuf> = fs::read_dir(&runtime)
        .expect("directory")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("raccl-")))
        .flat_map(|directory| fs::read_dir(directory).expect("private directory"))
        .map(|entry| entry.expect("entry").path())
        .collect();
    assert_eq!(leftovers, Vec::<PathBuf>::new(), "the job's file is removed");
    fs::remove_dir_all(&runtime).expect("clean-up");
}

fn run(mut mpirun: Command, options: &[&str]) -> Output {
    let test = "config::launcher::real::as_a_rank";
    mpirun.args(options).args(["-n", &RANKS.to_string()]);
    mpirun.arg(env::current_exe().expect("this program"));
    mpirun.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    // A launcher around the tests must not be taken for the one under test.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if ["RACCL_", "OMPI_", "PMI", "SLURM_", "MLX_", "JACCL_", "TORCHELASTIC_"]
            .iter()
            .any(|p| text.starts_with(p))
        {
            mpirun.env_remove(&name);
        }
    }
    mpirun.env(LAUNCHED, "1").stdin(Stdio::null()).output().expect("mpirun runs")
}

fn check(output: &Output, how: &str, origin: Origin) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    for rank in 0..RANKS {
        let line = format!("rank {rank} of {RANKS} met by {how}, told by {origin}.");
        assert_eq!(out.matches(&line).count(), 1, "{line}\n{out}\n{err}");
    }
}

/// The path of a program, or a word about why the test has nothing to do.
fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file());
    if found.is_none() {
        println!("skipped: {program} is not installed");
    }
    found
}
