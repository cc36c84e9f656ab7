//! Device matrices: which device of which rank is cabled to which other rank.
#![no_main]

libfuzzer_sys::fuzz_target!(|json: &str| {
    let Ok(matrix) = raccl::DeviceMatrix::parse(json) else { return };
    let _ = (matrix.check_mesh(), matrix.check_ring());
    for from in 0..matrix.size() {
        assert!(matrix.cables(from, from).is_empty(), "a rank is not cabled to itself");
        for to in 0..matrix.size() {
            assert!(matrix.cables(from, to).iter().all(|device| !device.is_empty()));
        }
    }
});
