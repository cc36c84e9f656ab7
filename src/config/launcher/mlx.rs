//! The variables of MLX and JACCL, which `mlx.launch` sets. They complete the `RACCL_*` names one by one.
#![forbid(unsafe_code)]

use std::path::Path;

use crate::{
    config::{
        Config, DeviceMatrix, Origin,
        environment::{Environment, MOST_SOCKETS, ReadFile, endpoint, text},
        hostfile,
        parse::{self, Endpoint},
        setting::{Setting, refuse, refuse_because},
    },
    error::Result,
};

/// Fills in what is open, if this process has a rank from here or from `RACCL_RANK`. A matrix of devices that happens to be
/// set in a shell does not make a lone program part of a group.
pub(super) fn complete(
    environment: &Environment,
    read_file: ReadFile<'_>,
    config: &mut Config,
) -> Result<()> {
    if config.rank.is_none() {
        config.rank = first(environment.rank("JACCL_RANK")?, || environment.rank("MLX_RANK"))?;
        if config.rank.is_none() {
            return Ok(());
        }
        config.origin = Origin::Mlx;
    }
    let ring = ["JACCL_RING", "MLX_JACCL_RING"].into_iter().find(|name| environment.has(name));
    if let Some(name) = ring {
        config.prefer_ring = Setting::new(name, true);
    }
    if config.devices.is_none() {
        config.devices = first(environment.parsed("JACCL_IBV_DEVICES", text)?, || {
            environment.parsed("MLX_IBV_DEVICES", text)
        })?;
    }
    let hosts = read_hostfile(environment, read_file)?;
    if config.size.is_none() {
        config.size = size(environment, read_file, hosts.as_ref(), config.devices.as_ref())?;
    }
    if config.coordinator.is_none() {
        config.coordinator = coordinator(environment, hosts.as_ref())?;
    }
    if let (Some(hosts), Some(rank)) = (&hosts, &config.rank)
        && let Some(mine) = hosts.value.get(rank.value)
    {
        listen(mine, hosts.name, config);
    }
    Ok(())
}

type Hosts = Vec<Vec<Endpoint>>;

/// The addresses of each rank; `mlx.launch` writes an empty file for a group of one.
fn read_hostfile(environment: &Environment, read_file: ReadFile<'_>) -> Result<Option<Setting<Hosts>>> {
    let Some(path) = environment.path("MLX_HOSTFILE") else { return Ok(None) };
    let shown = path.value.display().to_string();
    let text = read_file(&path.value)
        .map_err(|error| refuse_because(path.name, &shown, "the file cannot be read", error))?;
    let hosts = if text.trim().is_empty() {
        Vec::new()
    } else {
        hostfile::parse_ring(&text).map_err(|reason| refuse(path.name, &shown, reason))?
    };
    Ok(Some(Setting::new(path.name, hosts)))
}

fn size(
    environment: &Environment,
    read_file: ReadFile<'_>,
    hosts: Option<&Setting<Hosts>>,
    devices: Option<&Setting<String>>,
) -> Result<Option<Setting<usize>>> {
    if let Some(size) = environment.ranks("MLX_WORLD_SIZE")? {
        return Ok(Some(size));
    }
    if let Some(hosts) = hosts {
        return Ok(Some(Setting::new(hosts.name, hosts.value.len().max(1))));
    }
    let Some(devices) = devices else { return Ok(None) };
    let text = if devices.value.trim_start().starts_with('[') {
        devices.value.clone()
    } else {
        read_file(Path::new(&devices.value))
            .map_err(|error| refuse_because(devices.name, &devices.value, "the file cannot be read", error))?
    };
    let matrix = DeviceMatrix::parse(&text).map_err(|reason| devices.refuse(reason))?;
    Ok(Some(Setting::new(devices.name, matrix.size())))
}

fn coordinator(environment: &Environment, hosts: Option<&Setting<Hosts>>) -> Result<Option<Setting<String>>> {
    for name in ["JACCL_COORDINATOR", "MLX_JACCL_COORDINATOR"] {
        if let Some(coordinator) = environment.parsed(name, endpoint)? {
            return Ok(Some(coordinator));
        }
    }
    // A group of one needs nobody to listen.
    if let Some(hosts) = hosts.filter(|hosts| hosts.value.len() > 1)
        && let Some(address) = hosts.value[0].first()
    {
        return Ok(Some(Setting::new(hosts.name, address.to_string())));
    }
    let host =
        environment.parsed("NCCL_HOST_IP", |host| parse::check_host(host).map(|()| host.to_owned()))?;
    let port = environment.port("NCCL_PORT")?;
    let (Some(host), Some(port)) = (host, port) else { return Ok(None) };
    let endpoint = Endpoint { host: host.value, port: port.value };
    Ok(Some(Setting::new(host.name, endpoint.to_string())))
}

/// The rank listens at the addresses that its entry lists, with as many sockets as it has ports at one of them.
fn listen(mine: &[Endpoint], name: &'static str, config: &mut Config) {
    if !config.interfaces.given() {
        let mut addresses: Vec<String> = Vec::new();
        for Endpoint { host, .. } in mine {
            if parse::scoped_address(host).is_some() && !addresses.contains(host) {
                addresses.push(host.clone());
            }
        }
        if !addresses.is_empty() {
            config.interfaces = Setting::new(name, addresses);
        }
    }
    if config.sockets.is_none()
        && let Some(first) = mine.first()
    {
        let ports = mine.iter().filter(|endpoint| endpoint.host == first.host).count();
        if ports > 1 {
            config.sockets = Some(Setting::new(name, ports.min(MOST_SOCKETS)));
        }
    }
}

fn first<T>(one: Option<T>, or: impl FnOnce() -> Result<Option<T>>) -> Result<Option<T>> {
    match one {
        Some(one) => Ok(Some(one)),
        None => or(),
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsString, io};

    use super::*;
    use crate::config::environment::from_environment;

    const MATRIX: &str = r#"[[null, "a", "b"], ["b", null, "a"], ["a", "b", null]]"#;
    const HOSTS: &str = r#"[["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5002", "10.0.0.2:5003"]]"#;

    fn config(vars: &[(&str, &str)]) -> Result<Config> {
        let vars = vars.iter().map(|&(name, value)| (OsString::from(name), OsString::from(value)));
        from_environment(&Environment::new(vars), &|path| match path.to_str() {
            Some("/matrix") => Ok(MATRIX.to_owned()),
            Some("/hosts") => Ok(HOSTS.to_owned()),
            Some("/empty") => Ok("\n".to_owned()),
            Some("/broken") => Ok("[[\"10.0.0.1\"]]".to_owned()),
            _ => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn place(config: &Config) -> (usize, usize) {
        (config.rank.as_ref().expect("rank").value, config.size.as_ref().expect("size").value)
    }

    #[test]
    fn jaccl_has_its_size_from_the_matrix() {
        let vars =
            [("MLX_RANK", "2"), ("MLX_JACCL_COORDINATOR", "10.0.0.1:32323"), ("MLX_IBV_DEVICES", "/matrix")];
        let found = config(&vars).expect("config");
        assert_eq!(place(&found), (2, 3));
        assert_eq!(found.origin(), Origin::Mlx);
        assert_eq!(found.coordinator.expect("coordinator").value, "10.0.0.1:32323");
        assert_eq!(found.devices.expect("devices").value, "/matrix");
        assert!(!found.prefer_ring.value);
        let newer = [
            ("JACCL_RANK", "1"),
            ("JACCL_COORDINATOR", "a:1"),
            ("JACCL_IBV_DEVICES", "/matrix"),
            ("JACCL_RING", ""),
        ];
        let found = config(&newer).expect("config");
        assert_eq!(place(&found), (1, 3));
        assert!(found.prefer_ring.value);
    }

    #[test]
    fn the_ring_has_everything_from_the_hostfile() {
        let found = config(&[("MLX_RANK", "1"), ("MLX_HOSTFILE", "/hosts")]).expect("config");
        assert_eq!(place(&found), (1, 2));
        assert_eq!(found.coordinator.expect("coordinator").value, "10.0.0.1:5000");
        assert_eq!(found.interfaces.value, ["10.0.0.2"]);
        assert_eq!(found.sockets.expect("sockets").value, 2);
    }

    #[test]
    fn an_empty_hostfile_is_a_group_of_one() {
        let found = config(&[("MLX_RANK", "0"), ("MLX_HOSTFILE", "/empty")]).expect("config");
        assert_eq!(place(&found), (0, 1));
        assert!(found.resolve().is_ok());
    }

    #[test]
    fn nccl_names_give_a_coordinator() {
        let vars =
            [("MLX_RANK", "0"), ("MLX_WORLD_SIZE", "2"), ("NCCL_HOST_IP", "fd00::1"), ("NCCL_PORT", "12345")];
        let found = config(&vars).expect("config");
        assert_eq!(found.coordinator.expect("coordinator").value, "[fd00::1]:12345");
    }

    #[test]
    fn ours_go_first_name_by_name() {
        let vars = [
            ("RACCL_RANK", "0"),
            ("MLX_RANK", "1"),
            ("MLX_HOSTFILE", "/hosts"),
            ("RACCL_COORDINATOR", "b:2"),
        ];
        let found = config(&vars).expect("config");
        assert_eq!(place(&found), (0, 2));
        assert_eq!(found.coordinator.expect("coordinator").value, "b:2");
    }

    #[test]
    fn a_lone_program_is_not_disturbed_by_a_matrix() {
        let found = config(&[("MLX_IBV_DEVICES", "/matrix"), ("MLX_HOSTFILE", "/missing")]).expect("config");
        assert_eq!(found.origin(), Origin::Builder);
        assert!(found.resolve().is_ok());
    }

    #[test]
    fn broken_files_are_errors_that_name_the_variable() {
        for (name, path, reason) in [
            ("MLX_HOSTFILE", "/missing", "cannot be read"),
            ("MLX_HOSTFILE", "/broken", "host:port"),
            ("MLX_IBV_DEVICES", "/missing", "cannot be read"),
            ("MLX_IBV_DEVICES", "/broken", "entry [0][0]"),
        ] {
            let error = config(&[("MLX_RANK", "0"), (name, path)]).expect_err(path).to_string();
            assert!(error.contains(name) && error.contains(path) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_rank_without_any_size_says_what_is_missing() {
        let error = config(&[("MLX_RANK", "0")]).expect("config").resolve().expect_err("no size").to_string();
        assert!(error.contains("MLX_RANK is \"0\"") && error.contains("RACCL_SIZE"), "{error}");
    }
}
