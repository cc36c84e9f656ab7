//! PMI's variables, which the launchers of MPICH and Intel MPI set, and the meeting of ranks through the launcher.
#![forbid(unsafe_code)]

use std::{fmt, io, os::fd::RawFd, time::Instant};

use super::{Launched, Meeting, Met};
use crate::{
    config::{
        Origin, Rendezvous, Secret,
        environment::Environment,
        parse::Endpoint,
        pmi::{Connection, Space},
    },
    error::{Cause, Error, Result},
    os::inherit,
};

pub(super) fn read(environment: &Environment) -> Result<Option<Launched>> {
    let id = environment.rank("PMI_ID")?;
    let port = environment.parsed("PMI_PORT", str::parse::<Endpoint>)?;
    let access = match (environment.descriptor("PMI_FD")?, port, &id) {
        (Some(descriptor), _, _) => Some(Access::Descriptor(descriptor.value)),
        (None, Some(port), Some(id)) => Some(Access::Port(port.value, id.value)),
        _ => None,
    };
    let rank = match environment.rank("PMI_RANK")? {
        Some(rank) => Some(rank),
        // With a port, rank and size may have to be asked for; the id is the rank.
        None => id.filter(|_| access.is_some()),
    };
    let size = environment.ranks("PMI_SIZE")?;
    let Some(rank) = rank.filter(|_| size.is_some() || access.is_some()) else { return Ok(None) };
    let meeting = match access {
        Some(access) => Meeting::Pmi(Launcher { access, connection: None }),
        None => Meeting::Missing("PMI_RANK is set but neither PMI_FD nor PMI_PORT".to_owned()),
    };
    Ok(Some(Launched {
        origin: Origin::Pmi,
        rank,
        size,
        local_rank: environment.rank("MPI_LOCALRANKID")?,
        local_size: environment.ranks("MPI_LOCALNRANKS")?,
        job: None,
        meeting,
    }))
}

/// The launcher, as far as it has been spoken to.
#[derive(Debug)]
pub(in crate::config) struct Launcher {
    access: Access,
    /// The connection, if it had to be made early to learn the size.
    connection: Option<Connection>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Access {
    /// An inherited socket.
    Descriptor(RawFd),
    /// Where the launcher listens, and this process's number.
    Port(Endpoint, usize),
}

impl Launcher {
    /// Asks for the number of ranks, which is not in the environment when the launcher is reached by port.
    pub(in crate::config) fn ask_size(&mut self, rank: usize, deadline: Instant) -> Result<Option<usize>> {
        let Access::Port(port, id) = &self.access else { return Ok(None) };
        let (connection, told, size) =
            connect(port, *id, deadline).map_err(|error| self.failed(rank, error))?;
        if told != rank {
            let reason = format!("the launcher at {port} says that this is rank {told}");
            return Err(Error::Bootstrap { rank, reason, source: None });
        }
        self.connection = Some(connection);
        Ok(Some(size))
    }

    /// Gets everyone a secret that rank 0 makes, and prepares the exchange of addresses.
    pub(super) fn meet(self, rank: usize, size: usize, deadline: Instant) -> Result<Met> {
        let Launcher { access, connection } = self;
        let launcher = Launcher { access, connection: None };
        let prepare = || -> io::Result<(Space, Secret)> {
            let connection = match connection {
                Some(connection) => connection,
                None => launcher.open(deadline)?,
            };
            let mut space = connection.init()?;
            let shared = space.broadcast(rank, || Ok(Secret::random()?.to_hex().into_bytes()))?;
            let secret = Secret::parse(&shared)
                .map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))?;
            Ok((space, secret))
        };
        let (mut space, secret) = prepare().map_err(|error| launcher.failed(rank, error))?;
        let exchange = Rendezvous::Exchange(Box::new(move |mine| {
            let gathered = space.all_gather(rank, size, mine)?;
            // The launcher watches the process itself, so it can be told at once that no more is needed.
            space.finalize()?;
            Ok(gathered)
        }));
        Ok(Met { secret: Some(secret), ..Met::from(exchange) })
    }

    /// Ends what was begun, if nothing more is wanted: the launcher ends the job when a process just hangs up.
    pub(super) fn dismiss(mut self, rank: usize) -> Result<()> {
        match self.connection.take() {
            Some(connection) => {
                connection.init().and_then(Space::finalize).map_err(|error| self.failed(rank, error))
            }
            None => Ok(()),
        }
    }

    fn open(&self, deadline: Instant) -> io::Result<Connection> {
        match &self.access {
            Access::Descriptor(descriptor) => {
                let socket = inherit::take(*descriptor, inherit::Kind::Socket)?;
                Ok(Connection::inherited(socket, deadline))
            }
            Access::Port(port, id) => connect(port, *id, deadline).map(|(connection, _, _)| connection),
        }
    }

    fn failed(&self, rank: usize, error: io::Error) -> Error {
        let reason = format!(
            "addresses cannot be exchanged through the launcher ({self}), which one group of a process can do; \
             for more of them, or beside an MPI library, say where rank 0 listens with RACCL_COORDINATOR"
        );
        Error::Bootstrap { rank, reason, source: Some(Cause::from(error)) }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.access {
            Access::Descriptor(descriptor) => write!(f, "PMI_FD {descriptor}"),
            Access::Port(port, id) => write!(f, "PMI_PORT {port}, PMI_ID {id}"),
        }
    }
}

fn connect(port: &Endpoint, id: usize, deadline: Instant) -> io::Result<(Connection, usize, usize)> {
    Connection::connect(&port.lookup()?, id, deadline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn rank_size_and_launcher_are_recognised() {
        let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("PMI_FD", "8"), ("MPI_LOCALRANKID", "1")];
        let config = Config::from_vars(hydra).expect("config");
        assert_eq!(config.origin(), Origin::Pmi);
        assert_eq!(config.local_rank(), Some(1));
        let text = config.explain();
        assert!(text.contains("rank 1 (PMI_RANK) of 4 (PMI_SIZE), told by PMI"), "{text}");
        assert!(text.contains("addresses: exchanged through PMI_FD 8"), "{text}");
        let by_port = Config::from_vars([("PMI_ID", "1"), ("PMI_PORT", "node1:7000")]).expect("config");
        assert!(by_port.explain().contains("rank 1 (PMI_ID) of unknown"), "{}", by_port.explain());
    }

    #[test]
    fn a_coordinator_makes_the_launcher_unnecessary() {
        let vars = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("RACCL_COORDINATOR", "node1:7000")];
        assert!(Config::from_vars(vars).expect("config").resolve().is_ok());
        let error =
            Config::from_vars(vars[..2].iter().copied()).expect("config").resolve().expect_err("no way");
        assert!(error.to_string().contains("PMI_FD"), "{error}");
    }

    #[test]
    fn a_descriptor_that_is_no_socket_is_an_error() {
        let vars = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("PMI_FD", "999999")];
        let error = Config::from_vars(vars).expect("config").resolve().expect_err("closed");
        assert!(matches!(&error, Error::Bootstrap { rank: 1, source: Some(_), .. }), "{error:?}");
        assert!(Config::from_vars([("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_FD", "1")]).is_err());
    }
}
