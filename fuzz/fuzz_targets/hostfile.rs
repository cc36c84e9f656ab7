//! Hostfiles, plain and JSON.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(hosts) = raccl::hostfile::parse(text) {
        assert!(hosts.iter().all(|host| !host.name().is_empty()));
        let _ = raccl::hostfile::devices(&hosts);
    }
});
