//! Relays between ranks, and the files that ranks read their secret from.

use std::{
    env, fs,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

/// A file of its own for each test, gone with it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        Scratch(env::temp_dir().join(format!("raccl-trust-{name}-{}", std::process::id())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.0).unwrap();
        file.write_all(bytes).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test that failed before it wrote anything has no file.
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens, and passes on to `target` what callers say, in chunks that `change` sees first, with the number of the connection
/// and the bytes that went before. The other way nothing is changed. It ends with the process.
pub(crate) fn relay(
    target: String,
    change: impl Fn(usize, usize, &mut Vec<u8>) + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let change = Arc::new(change);
    thread::spawn(move || {
        for (number, caller) in listener.incoming().map_while(|caller| caller.ok()).enumerate() {
            let Ok(called) = TcpStream::connect(&target) else { continue };
            let (one, two) = (caller.try_clone().unwrap(), called.try_clone().unwrap());
            let change = Arc::clone(&change);
            thread::spawn(move || pass(caller, called, |before, bytes| change(number, before, bytes)));
            thread::spawn(move || pass(two, one, |_, _| {}));
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(usize, &mut Vec<u8>)) {
    let mut buffer = vec![0; 64 << 10];
    let mut before = 0;
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..count].to_vec();
        change(before, &mut bytes);
        before += count;
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    // Either end may be gone already.
    let _ = to.shutdown(Shutdown::Write);
}
