//! Slurm's variables.
#![forbid(unsafe_code)]

use super::{Launched, Meeting};
use crate::{
    config::{Origin, environment::Environment, parse, setting::Setting},
    error::Result,
};

/// Reads them inside a step that `srun` started. The script of a batch job has a rank and a number of tasks too, but is none
/// of the tasks: it is left alone unless somebody says where rank 0 listens, because then it is meant to be a group.
pub(super) fn read(environment: &Environment) -> Result<Option<Launched>> {
    let in_step = environment.has("SLURM_STEP_ID") || environment.has("SLURM_STEPID");
    if !in_step && !environment.has("RACCL_COORDINATOR") {
        return Ok(None);
    }
    let rank = environment.rank("SLURM_PROCID")?;
    let size = match environment.ranks("SLURM_STEP_NUM_TASKS")? {
        Some(size) => Some(size),
        None => environment.ranks("SLURM_NTASKS")?,
    };
    let (Some(rank), Some(size)) = (rank, size) else { return Ok(None) };
    let local_rank = environment.rank("SLURM_LOCALID")?;
    let job_id = environment.parsed("SLURM_JOB_ID", id)?;
    let step_id = match environment.parsed("SLURM_STEP_ID", id)? {
        Some(step) => Some(step),
        None => environment.parsed("SLURM_STEPID", id)?,
    };
    let nodes = match environment.parsed("SLURM_STEP_NODELIST", first_host)? {
        Some(host) => Some(host),
        None => environment.parsed("SLURM_JOB_NODELIST", first_host)?,
    };
    let (meeting, job) = match (nodes, job_id) {
        (Some(host), Some(job)) => {
            let step = step_id.map_or(0, |step| step.value);
            let address = format!("{}:{}", host.value, port(job.value, step));
            let name = format!("slurm-{}.{step}", job.value);
            (Meeting::Coordinator(Setting::new(host.name, address)), Some(Setting::new(job.name, name)))
        }
        _ => {
            let reason = "Slurm gives an address only with SLURM_JOB_ID and SLURM_JOB_NODELIST, which are not both there";
            (Meeting::Missing(reason.to_owned()), None)
        }
    };
    Ok(Some(Launched {
        origin: Origin::Slurm,
        rank,
        size: Some(size),
        local_rank,
        local_size: None,
        job,
        meeting,
    }))
}

/// The port of a step's rank 0, below those that systems give out by themselves. Consecutive jobs and steps get different
/// ones, so that two steps on one node rarely meet; if they do, the job's name keeps their ranks apart.
fn port(job: u64, step: u64) -> u16 {
    const FIRST: u16 = 20000;
    const COUNT: u64 = 12000;
    let spread = job.wrapping_mul(101).wrapping_add(step);
    // The remainder is below 12000, so the sum fits.
    FIRST + (spread % COUNT) as u16
}

fn id(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| "expected a number".to_owned())
}

/// The first host of a list such as `node[01-03,7],login` or `rack[1-2]n[1-4]`.
fn first_host(list: &str) -> std::result::Result<String, String> {
    const EXPECTED: &str = "expected a list of nodes such as node[01-03,7],login";
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        rest = match rest[end..].strip_prefix('[') {
            Some(brackets) => {
                let (ranges, after) = brackets.split_once(']').ok_or(EXPECTED)?;
                let first = ranges.split([',', '-']).next().unwrap_or_default();
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(EXPECTED.to_owned());
                }
                host.push_str(first);
                after
            }
            None => break,
        };
    }
    parse::check_host(&host).map_err(|_| EXPECTED.to_owned())?;
    Ok(host)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-03,7],login", "node01"),
            ("node[7]", "node7"),
            ("rack[1-2]n[03-04].local,x", "rack1n03.local"),
            ("n[1,5-9]-ib", "n1-ib"),
        ] {
            assert_eq!(first_host(list), Ok(host.to_owned()), "{list}");
        }
        for list in ["", ",", "node[", "node[]", "node[a-b]", "node]", "[", "-x", "a b"] {
            assert!(first_host(list).is_err(), "{list}");
        }
    }

    #[test]
    fn steps_have_an_address_that_all_ranks_compute() {
        let vars = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_JOB_ID", "1000"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_NODELIST", "mac[1-4]"),
        ];
        let config = Config::from_vars(vars).expect("config");
        assert_eq!(config.origin(), Origin::Slurm);
        let text = config.explain();
        assert!(text.contains("rank 3 (SLURM_PROCID) of 4 (SLURM_STEP_NUM_TASKS)"), "{text}");
        assert!(text.contains("coordinator: mac1:25002 (SLURM_JOB_NODELIST)"), "{text}");
        assert!(text.contains("job: slurm-1000.2"), "{text}");
    }

    #[test]
    fn a_batch_script_is_no_task() {
        let script = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_JOB_ID", "1"),
            ("SLURM_JOB_NODELIST", "a"),
        ];
        assert_eq!(Config::from_vars(script).expect("config").origin(), Origin::Builder);
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("RACCL_COORDINATOR", "a:7000")];
        let config = Config::from_vars(script).expect("config");
        assert_eq!(config.origin(), Origin::Slurm);
        assert!(config.resolve().is_ok());
    }

    proptest! {
        #[test]
        fn no_list_panics(list in any::<String>(), near in "[a-z0-9\\[\\],-]{0,20}") {
            let _ = (first_host(&list), first_host(&near));
        }

        #[test]
        fn ports_are_in_the_documented_range(job: u64, step: u64) {
            prop_assert!((20000..32000).contains(&port(job, step)));
        }
    }
}
