//! The environment: `NAME=VALUE` lines, with any launcher's names. Those that name a file are left out, since whatever
//! file the fuzzer comes up with would be read; the other targets have their content.
#![no_main]

const FILES: [&str; 5] = ["DEVICES", "FILE", "DIR", "HOME", "TMP"];

libfuzzer_sys::fuzz_target!(|text: &str| {
    let vars = text.lines().filter_map(|line| line.split_once('='));
    let vars = vars.filter(|(name, _)| !FILES.iter().any(|part| name.contains(part)));
    match raccl::Config::from_vars(vars) {
        Ok(config) => assert!(!config.explain().is_empty()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
