//! A configuration in words: what it says, and where each value comes from.
#![forbid(unsafe_code)]

use std::{fmt, time::Duration};

use super::{
    Bulk, Config, parse,
    setting::{DEFAULT, Setting},
};

impl Config {
    /// What the configuration says and where each value comes from, one setting a line.
    ///
    /// ```
    /// let vars = [("RACCL_RANK", "1"), ("RACCL_SIZE", "2"), ("RACCL_COORDINATOR", "node1:7000")];
    /// let text = raccl::Config::from_vars(vars).unwrap().explain();
    /// assert!(text.contains("rank 1 (RACCL_RANK) of 2 (RACCL_SIZE)"));
    /// assert!(text.contains("coordinator: node1:7000 (RACCL_COORDINATOR)"));
    /// ```
    pub fn explain(&self) -> String {
        let mut text = match (&self.rank, &self.size) {
            (None, None) => "a group of one\n".to_owned(),
            (rank, size) => format!(
                "rank {} of {}, told by {}\n",
                rank.as_ref().map_or("unknown".to_owned(), |rank| format!("{} ({})", rank.value, rank.name)),
                size.as_ref().map_or("unknown".to_owned(), |size| format!("{} ({})", size.value, size.name)),
                self.origin
            ),
        };
        let mut line = |what: &str, value: &str, name: &str| {
            text.push_str(&format!("{what}: {value} ({name})\n"));
        };
        let seconds = |setting: &Setting<Duration>| match setting.value {
            Duration::ZERO => "no limit".to_owned(),
            limit => format!("{limit:?}"),
        };
        match (&self.exchange, &self.listener, &self.coordinator) {
            (Some(_), _, _) => line("addresses", "exchanged by the program", "Config::exchange"),
            (_, Some(listener), _) => {
                let address =
                    listener.local_addr().map_or("unknown".to_owned(), |address| address.to_string());
                line("listener", &address, "Config::listener");
            }
            (_, _, Some(coordinator)) => line("coordinator", &coordinator.value, coordinator.name),
            (None, None, None) => {
                if let Some((what, value, name)) = self.meeting.explain() {
                    line(what, &value, name);
                }
            }
        }
        line("link", &self.link.value.to_string(), self.link.name);
        if self.interfaces.given() {
            line("interfaces", &self.interfaces.value.join(", "), self.interfaces.name);
        }
        if let Some(sockets) = &self.sockets {
            line("sockets", &sockets.value.to_string(), sockets.name);
        }
        line("timeout", &seconds(&self.timeout), self.timeout.name);
        line("late timeout", &seconds(&self.late_timeout), self.late_timeout.name);
        line("connect timeout", &seconds(&self.connect_timeout), self.connect_timeout.name);
        if let Some(algorithm) = &self.algorithm {
            line("algorithm", &algorithm.value, algorithm.name);
        }
        match &self.secret {
            Some(secret) => line("secret", "given", secret.name),
            None if self.insecure.value => line("secret", "none, and none is needed", self.insecure.name),
            None => line("secret", "none", DEFAULT),
        }
        if self.encrypt.given() {
            line("encrypt", &self.encrypt.value.to_string(), self.encrypt.name);
        }
        if let Some(devices) = &self.devices {
            line("devices", &parse::shorten(&devices.value), devices.name);
        }
        if self.prefer_ring.given() {
            line("prefer ring", &self.prefer_ring.value.to_string(), self.prefer_ring.name);
        }
        if let Some(path) = &self.verbs_library {
            line("verbs library", &path.value.display().to_string(), path.name);
        }
        if let Some(transport) = &self.verbs_transport {
            line("verbs transport", &transport.value.to_string(), transport.name);
        }
        if self.verbs_checksum.given() {
            line("verbs checksum", &self.verbs_checksum.value.to_string(), self.verbs_checksum.name);
        }
        if self.signals.given() {
            line("signals", &self.signals.value.to_string(), self.signals.name);
        }
        if self.degrade.given() {
            line("degrade", &self.degrade.value.to_string(), self.degrade.name);
        }
        if let Some(bulk) = &self.verbs_bulk {
            let shown = bulk.value.as_ref().map_or_else(|_| "malformed".to_owned(), Bulk::to_string);
            line("verbs bulk", &shown, bulk.name);
        }
        if self.verbs_keep_alive.given() {
            line("verbs keep-alive", &seconds(&self.verbs_keep_alive), self.verbs_keep_alive.name);
        }
        if let Some(job) = &self.job {
            line("job", &job.value, job.name);
        }
        if let Some(path) = &self.trace {
            line("trace", &path.value.display().to_string(), path.name);
        }
        text
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What explain shows is everything but the secret and the closure, which cannot or must not be shown.
        let explained = self.explain();
        let mut set = f.debug_set();
        set.entries(explained.lines()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_for_cables_is_shown_with_its_origin() {
        let vars = [("RACCL_SIGNALS", "0"), ("RACCL_DEGRADE", "1"), ("RACCL_VERBS_BULK", "16K*2")];
        let text = Config::from_vars(vars).unwrap().signals(false).explain();
        for line in
            ["signals: false (Config::signals)", "degrade: true (RACCL_DEGRADE)", "(RACCL_VERBS_BULK)"]
        {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!Config::new().explain().contains("signals"));
    }
}
