//! File descriptors that a launcher left open for this process and named by number.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    sync::Mutex,
};

/// What the descriptor has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A socket.
    Socket,
    /// A pipe, a file or a socket to read from.
    Readable,
}

/// Takes a descriptor that was inherited from the launcher. It must be open and of the right kind, is closed on exec from
/// now on, and can be taken once in the life of the process.
///
/// The result is a duplicate: the number itself stays open, because if it were wrong it would be somebody else's.
pub(crate) fn take(fd: RawFd, kind: Kind) -> io::Result<OwnedFd> {
    // The numbers, with device and inode, for a number can come to stand for another file.
    static TAKEN: Mutex<Vec<(RawFd, u64, u64)>> = Mutex::new(Vec::new());

    if fd <= 2 {
        return Err(invalid("it must be above 2, for 0, 1 and 2 are the standard streams"));
    }
    // A thread that panicked here has left the list whole.
    let mut taken = TAKEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: F_GETFD takes no argument, touches no memory, and fails with EBADF for a number that is not open.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was open just now. The launcher opened it for this process to use by this number, so nobody
    // else in the process closes it; and the borrow ends within this function.
    let inherited = unsafe { BorrowedFd::borrow_raw(fd) };
    // The duplicate is made with close-on-exec set.
    let file = File::from(inherited.try_clone_to_owned()?);
    let metadata = file.metadata()?;
    let identity = (fd, metadata.dev(), metadata.ino());
    if taken.contains(&identity) {
        return Err(invalid("it was used before; an inherited descriptor serves one time in a process"));
    }
    let file_type = metadata.file_type();
    let fits = match kind {
        Kind::Socket => file_type.is_socket(),
        Kind::Readable => file_type.is_fifo() || file_type.is_file() || file_type.is_socket(),
    };
    if !fits {
        return Err(invalid(match kind {
            Kind::Socket => "it is not a socket",
            Kind::Readable => "it is neither a pipe nor a file nor a socket",
        }));
    }
    set_close_on_exec(inherited, flags)?;
    taken.push(identity);
    Ok(file.into())
}

fn set_close_on_exec(fd: impl AsFd, flags: libc::c_int) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: F_SETFD changes a flag of an open descriptor and touches no memory.
    let status = unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) };
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
    };

    use super::*;

    #[test]
    fn a_descriptor_is_taken_once_and_still_works() {
        let (ours, mut theirs) = UnixStream::pair().expect("pair");
        let mut taken = UnixStream::from(take(ours.as_raw_fd(), Kind::Socket).expect("taken"));
        theirs.write_all(b"x").expect("write");
        let mut byte = [0];
        taken.read_exact(&mut byte).expect("read");
        let again = take(ours.as_raw_fd(), Kind::Socket).expect_err("second time");
        assert!(again.to_string().contains("used before"));
    }

    #[test]
    fn wrong_descriptors_are_refused() {
        let (reader, _writer) = io::pipe().expect("pipe");
        assert!(
            take(reader.as_raw_fd(), Kind::Socket).expect_err("pipe").to_string().contains("not a socket")
        );
        assert!(take(1, Kind::Readable).is_err());
        assert!(take(-1, Kind::Readable).is_err());
        assert_eq!(take(1 << 20, Kind::Readable).expect_err("closed").raw_os_error(), Some(libc::EBADF));
        let null = File::open("/dev/null").expect("null");
        assert!(take(null.as_raw_fd(), Kind::Readable).is_err());
    }
}
