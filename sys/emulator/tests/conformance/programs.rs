//! Programs that know nothing of this project.

use std::process::Command;

use raccl_emulator::{Emulation, Layout};

use crate::lab::library_file;

#[test]
#[ignore = "needs infiniband/verbs.h: `ci/bindings --check` finds it and runs this"]
fn a_program_in_c_runs_on_the_emulator() {
    let include = std::env::var("RACCL_VERBS_INCLUDE").unwrap_or_else(|_| "/usr/include".into());
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let emulation = Emulation::create(&Layout::mesh().spec(2)).unwrap();
    let program = emulation.spec_file().with_file_name("ping");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/ping.c");
    let library = library_file();
    let folder = library.parent().expect("it is a file in a folder").display().to_string();
    let built = Command::new(&compiler)
        // Unoptimised, the header refers to functions that only extensions have.
        .args(["-O1", "-Wall", "-Werror", "-I", &include, "-o"])
        .arg(&program)
        .arg(source)
        .arg(&library)
        .arg(format!("-Wl,-rpath,{folder}"))
        .output()
        .unwrap();
    assert!(built.status.success(), "{compiler}: {}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&program).envs(emulation.environment_of_all()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "m0.rdma_en2 and m1.rdma_en2\n");
    let books = emulation.books();
    assert!(books.live.is_zero());
    assert_eq!((books.made.queue_pairs, books.mistakes), (2, Default::default()));
}
