//! A file by which the ranks of one job on one machine find rank 0, for launchers that give no address.
//!
//! Rank 0 binds a port of the loopback interface and publishes it, with a fresh secret, in a file that only this user can
//! read. It holds a lock on the file for as long as the file is to count: a file that nobody has locked was left behind by a
//! job that died, and is passed over.
#![forbid(unsafe_code)]

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    config::{Secret, environment::Environment, file::read_bounded},
    error::{Cause, Error, Result},
    os,
};

/// Where the file of a job is or will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobFile {
    /// The user's runtime directory, used if it is really private.
    runtime: Option<PathBuf>,
    /// Where a private directory is made otherwise.
    temporary: PathBuf,
    /// The beginning of the file's name, the same for all ranks of the job and no other's.
    name: String,
}

impl JobFile {
    /// The file of the job that these parts tell from every other.
    pub(super) fn new(environment: &Environment, parts: &[Option<String>]) -> JobFile {
        let temporary = environment.path("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), |path| path.value);
        JobFile {
            runtime: environment.path("XDG_RUNTIME_DIR").map(|path| path.value),
            temporary,
            name: format!("raccl-{:016x}", fnv1a(parts)),
        }
    }

    /// Rank 0's side.
    pub(super) fn publish(&self) -> Result<(TcpListener, Published, Secret)> {
        let failed = |what: String| move |error: io::Error| bootstrap(0, what, error);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))
            .map_err(failed("no port can be bound on the loopback interface".to_owned()))?;
        let address =
            listener.local_addr().map_err(failed("the listener's address cannot be read".to_owned()))?;
        let secret = Secret::random().map_err(failed("no secret can be made".to_owned()))?;
        let path = self.path(0)?;
        let published = Published::write(path.clone(), &format!("{address} {}\n", secret.to_hex()))
            .map_err(failed(format!("the job's file {} cannot be written", path.display())))?;
        Ok((listener, published, secret))
    }

    /// The other ranks' side: waits for rank 0's address.
    pub(super) fn find(&self, rank: usize, deadline: Instant) -> Result<(String, Secret)> {
        let path = self.path(rank)?;
        let mut pause = Duration::from_millis(1);
        loop {
            let content = read_live(&path).map_err(|error| {
                bootstrap(rank, format!("the job's file {} cannot be read", path.display()), error)
            })?;
            if let Some(content) = content {
                return parse(&content).ok_or_else(|| Error::Bootstrap {
                    rank,
                    reason: format!("the job's file {} is malformed; remove it", path.display()),
                    source: None,
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Bootstrap {
                    rank,
                    reason: format!(
                        "rank 0 did not publish its address in {} before the connect timeout; does it join the group too? \
                         Or say where rank 0 listens with RACCL_COORDINATOR",
                        path.display()
                    ),
                    source: None,
                });
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// The path for this process's next group. All ranks form their groups in the same order, so the number tells one group
    /// of the job from the next, and nobody finds the file of the group before.
    fn path(&self, rank: usize) -> Result<PathBuf> {
        static GROUPS: AtomicUsize = AtomicUsize::new(0);
        let directory = self.directory().map_err(|error| {
            let reason = "there is no private directory for the job's file; say where rank 0 listens with RACCL_COORDINATOR";
            bootstrap(rank, reason.to_owned(), error)
        })?;
        // Relaxed: the number is all that is shared.
        let group = GROUPS.fetch_add(1, Ordering::Relaxed);
        Ok(directory.join(format!("{}-{group}", self.name)))
    }

    /// A directory that belongs to this user and that nobody else can enter.
    fn directory(&self) -> io::Result<PathBuf> {
        if let Some(runtime) = &self.runtime
            && check_private(runtime).is_ok()
        {
            return Ok(runtime.clone());
        }
        let directory = self.temporary.join(format!("raccl-{}", os::user::effective_id()));
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        check_private(&directory)?;
        Ok(directory)
    }
}

impl fmt::Display for JobFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directory = self.runtime.as_deref().unwrap_or(&self.temporary);
        write!(f, "a file {}-* in {}", self.name, directory.display())
    }
}

/// A file that counts as long as this lives.
#[derive(Debug)]
pub(crate) struct Published {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl Published {
    /// Writes the file in full before anybody can see it under its name.
    fn write(path: PathBuf, content: &str) -> io::Result<Published> {
        let draft = path.with_extension(format!("{}.draft", std::process::id()));
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.lock()?;
        let placed = file.write_all(content.as_bytes()).and_then(|()| fs::rename(&draft, &path));
        if let Err(error) = placed {
            // The first error is the one to report.
            let _ = fs::remove_file(&draft);
            return Err(error);
        }
        Ok(Published { path, file })
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // Somebody may have put another file in its place, which is not ours to remove.
        let ours = match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(file), Ok(path)) => (file.dev(), file.ino()) == (path.dev(), path.ino()),
            _ => false,
        };
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the job's file cannot be removed");
        }
    }
}

/// The content of a file that somebody has locked; `None` if there is no such file yet.
fn read_live(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        // Nobody holds it: it was left behind. Closing the file gives the lock back.
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => read_bounded(file, 1024).map(Some),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn parse(content: &[u8]) -> Option<(String, Secret)> {
    let text = str::from_utf8(content).ok()?;
    let (address, secret) = text.trim_end().split_once(' ')?;
    let address: SocketAddr = address.parse().ok()?;
    Some((address.to_string(), Secret::parse(secret.as_bytes()).ok()?))
}

fn check_private(directory: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(directory)?;
    let private =
        metadata.is_dir() && metadata.uid() == os::user::effective_id() && metadata.mode() & 0o077 == 0;
    if private {
        return Ok(());
    }
    let reason = format!("{} is not a directory of this user with mode 0700", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

fn bootstrap(rank: usize, reason: String, error: io::Error) -> Error {
    Error::Bootstrap { rank, reason, source: Some(Cause::from(error)) }
}

/// FNV-1a over the parts, with what keeps a missing part from an empty one and one part from the next. Every build computes
/// the same, which the standard library's hash does not promise.
fn fnv1a(parts: &[Option<String>]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut step = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    for part in parts {
        match part {
            Some(part) => part.bytes().chain([0xff]).for_each(&mut step),
            None => step(0xfe),
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn scratch(test: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("raccl-job-file-{test}-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("directory");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).expect("mode");
        directory
    }

    #[test]
    fn others_find_what_rank_0_publishes_until_it_is_dropped() {
        let path = scratch("publish").join("raccl-test");
        assert_eq!(read_live(&path).expect("nothing"), None);
        let published = Published::write(path.clone(), "127.0.0.1:7 x\n").expect("published");
        assert_eq!(read_live(&path).expect("read").as_deref(), Some(&b"127.0.0.1:7 x\n"[..]));
        assert_eq!(fs::metadata(&path).expect("metadata").mode() & 0o777, 0o600);
        drop(published);
        assert!(!path.exists());
        fs::remove_dir_all(path.parent().expect("parent")).expect("clean-up");
    }

    #[test]
    fn files_of_dead_jobs_are_passed_over_and_replaced() {
        let path = scratch("stale").join("raccl-test");
        fs::write(&path, "127.0.0.1:1 stale\n").expect("stale file");
        assert_eq!(read_live(&path).expect("stale"), None);
        let published = Published::write(path.clone(), "fresh").expect("published");
        assert_eq!(read_live(&path).expect("read").as_deref(), Some(&b"fresh"[..]));
        // A second one in its place is not removed by the first.
        let second = Published::write(path.clone(), "second").expect("second");
        drop(published);
        assert_eq!(read_live(&path).expect("read").as_deref(), Some(&b"second"[..]));
        drop(second);
        fs::remove_dir_all(path.parent().expect("parent")).expect("clean-up");
    }

    #[test]
    fn both_sides_agree_on_address_and_secret() {
        let directory = scratch("both");
        let file = |part: &str| JobFile {
            runtime: Some(directory.clone()),
            temporary: PathBuf::from("/nonexistent"),
            name: format!("raccl-{part}"),
        };
        let (listener, published, secret) = file("job").publish().expect("published");
        let content = read_live(&published.path).expect("read").expect("live");
        let (address, found) = parse(&content).expect("parsed");
        assert_eq!(address, listener.local_addr().expect("address").to_string());
        assert_eq!(found, secret);
        let error = file("other").find(3, Instant::now() + Duration::from_millis(20)).expect_err("nobody");
        assert!(error.to_string().contains("rank 0 did not publish"), "{error}");
        drop(published);
        fs::remove_dir_all(&directory).expect("clean-up");
    }

    #[test]
    fn directories_that_others_can_enter_are_not_used() {
        let directory = scratch("open");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("mode");
        assert!(check_private(&directory).is_err());
        assert!(check_private(Path::new("/")).is_err());
        let file =
            JobFile { runtime: Some(directory.clone()), temporary: directory.clone(), name: "n".to_owned() };
        let inside = file.directory().expect("directory");
        assert_eq!(inside, directory.join(format!("raccl-{}", os::user::effective_id())));
        assert!(check_private(&inside).is_ok());
        fs::remove_dir_all(&directory).expect("clean-up");
    }

    #[test]
    fn jobs_that_differ_in_any_part_have_different_names() {
        let part = |text: &str| Some(text.to_owned());
        let hashes = [
            fnv1a(&[part("a"), part("b")]),
            fnv1a(&[part("ab"), part("")]),
            fnv1a(&[part("ab"), None]),
            fnv1a(&[None, part("ab")]),
        ];
        for (i, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..i].contains(hash));
        }
    }

    #[test]
    fn malformed_content_is_refused() {
        for content in ["", "127.0.0.1:7", "127.0.0.1:7 short\n", "localhost:7 x", "\u{0}"] {
            assert_eq!(parse(content.as_bytes()), None);
        }
    }
}
