//! Readers for the small notations of settings: `30s`, `64M`, `host:port`, `yes`.
//!
//! All of them are total: any text gives a value or a sentence that says what is expected. The command uses the same
//! readers for its arguments, so a duration or a size means the same everywhere.
//!
//! ```
//! use std::time::Duration;
//! assert_eq!(raccl::parse::duration("1.5m"), Ok(Duration::from_secs(90)));
//! assert_eq!(raccl::parse::size("64M"), Ok(64 << 20));
//! ```
#![forbid(unsafe_code)]

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs},
    str::FromStr,
    time::Duration,
};

/// The longest duration that settings accept, ten years, so that adding one to the present never overflows.
pub const LONGEST_DURATION: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Reads a duration: a decimal number and a unit of `us`, `ms`, `s`, `m`, `h`; or a plain `0`.
///
/// ```
/// use std::time::Duration;
/// use raccl::parse::duration;
///
/// assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
/// assert_eq!(duration("0"), Ok(Duration::ZERO));
/// assert!(duration("30").unwrap_err().contains("unit"));
/// ```
pub fn duration(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str = "expected a number and a unit, such as 250ms, 30s, 1.5m or 2h, or 0";
    let text = text.trim();
    let (number, unit) = split_number(text);
    let (whole, fraction) = decimal(number).ok_or(EXPECTED)?;
    let nanos_of_unit: u128 = match unit {
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" if whole == 0 && fraction.numerator == 0 => return Ok(Duration::ZERO),
        "" => return Err(format!("the unit is missing: {number}s, {number}ms or {number}m?")),
        _ => return Err(EXPECTED.to_owned()),
    };
    // Both factors are below 2^64, so neither product can overflow.
    let nanos = u128::from(whole) * nanos_of_unit + fraction.of(nanos_of_unit);
    if nanos > LONGEST_DURATION.as_nanos() {
        return Err("more than ten years; use 0 for no limit where that is allowed".to_owned());
    }
    Ok(Duration::new((nanos / 1_000_000_000) as u64, (nanos % 1_000_000_000) as u32))
}

/// Reads a number of bytes: a decimal number and nothing or one of `K`, `M`, `G`, `T` (powers of 1024), with or without
/// `B` or `iB`, in any case.
///
/// ```
/// use raccl::parse::size;
///
/// assert_eq!(size("4"), Ok(4));
/// assert_eq!(size("1.5k"), Ok(1536));
/// assert_eq!(size("2GiB"), Ok(2 << 30));
/// assert!(size("0.3").is_err());
/// ```
pub fn size(text: &str) -> Result<u64, String> {
    const EXPECTED: &str = "expected a number of bytes such as 512, 64K, 1.5M or 2G (powers of 1024)";
    let (number, unit) = split_number(text.trim());
    let (whole, fraction) = decimal(number).ok_or(EXPECTED)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(EXPECTED.to_owned()),
    };
    if !fraction.is_whole(1 << shift) {
        return Err("not a whole number of bytes".to_owned());
    }
    let bytes = (u128::from(whole) << shift) + fraction.of(1 << shift);
    u64::try_from(bytes).map_err(|_| "more bytes than any machine has".to_owned())
}

/// Reads `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`, in any case.
///
/// ```
/// assert_eq!(raccl::parse::boolean("Yes"), Ok(true));
/// assert!(raccl::parse::boolean("maybe").is_err());
/// ```
pub fn boolean(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("expected 1, true, yes, on or 0, false, no, off".to_owned()),
    }
}

/// A host and a port: `node1:7000`, `10.0.0.1:7000`, `[fe80::1%en5]:7000`.
///
/// ```
/// let endpoint: raccl::parse::Endpoint = "[fe80::1%en5]:7000".parse().unwrap();
/// assert_eq!(endpoint.host, "fe80::1%en5");
/// assert_eq!(endpoint.to_string(), "[fe80::1%en5]:7000");
/// assert!("fe80::1:7000".parse::<raccl::parse::Endpoint>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// A name or an address, without brackets; an IPv6 address may have a scope.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

impl Endpoint {
    /// Puts a host that was given without a port together with one.
    ///
    /// ```
    /// let endpoint = raccl::parse::Endpoint::new("::1", 7000).unwrap();
    /// assert_eq!(endpoint.to_string(), "[::1]:7000");
    /// ```
    pub fn new(host: &str, port: u16) -> Result<Endpoint, String> {
        check_host(host)?;
        if port == 0 {
            return Err("the port must be from 1 to 65535".to_owned());
        }
        Ok(Endpoint { host: host.to_owned(), port })
    }

    /// Looks the host up. Scopes may be names (`%en5`) or numbers (`%4`).
    ///
    /// ```
    /// let endpoint: raccl::parse::Endpoint = "127.0.0.1:7000".parse().unwrap();
    /// assert_eq!(endpoint.lookup().unwrap(), ["127.0.0.1:7000".parse().unwrap()]);
    /// ```
    pub fn lookup(&self) -> io::Result<Vec<SocketAddr>> {
        // The system's resolver understands scopes in host names, the standard library's own parser does not.
        Ok((self.host.as_str(), self.port).to_socket_addrs()?.collect())
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        const EXPECTED: &str = "expected host:port, such as node1:7000, 10.0.0.1:7000 or [fe80::1%en5]:7000";
        let text = text.trim();
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once("]:").ok_or(EXPECTED)?;
                if !host.contains(':') {
                    return Err("only IPv6 addresses go into brackets".to_owned());
                }
                (host, port)
            }
            None => {
                let (host, port) = text.rsplit_once(':').ok_or(EXPECTED)?;
                if host.contains(':') {
                    return Err(format!("an IPv6 address goes into brackets: [{host}]:{port}"));
                }
                (host, port)
            }
        };
        if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(EXPECTED.to_owned());
        }
        Endpoint::new(host, port.parse().map_err(|_| "the port must be from 1 to 65535")?)
    }
}

/// Reads a list of items between commas or white space.
pub(crate) fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|item| !item.is_empty())
}

/// Says what is wrong with a host name or address, if anything.
pub(crate) fn check_host(host: &str) -> Result<(), String> {
    if host.contains(':') {
        let (address, scope) = host.split_once('%').map_or((host, None), |(a, s)| (a, Some(s)));
        if address.parse::<Ipv6Addr>().is_err() {
            return Err(format!("{address:?} is no IPv6 address"));
        }
        return match scope {
            Some(scope) if !is_word(scope, 64) => Err(format!("{scope:?} is no scope of an IPv6 address")),
            _ => Ok(()),
        };
    }
    let looks_numeric = host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if !is_word(host, 253) || host.starts_with('-') || (looks_numeric && host.parse::<Ipv4Addr>().is_err()) {
        return Err(format!("{:?} is neither a host name nor an address", shorten(host)));
    }
    Ok(())
}

/// An address, with the scope that a link-local IPv6 address needs; port 0.
pub(crate) fn scoped_address(text: &str) -> Option<(IpAddr, Option<&str>)> {
    match text.split_once('%') {
        Some((address, scope)) if is_word(scope, 64) => {
            Some((IpAddr::V6(address.parse::<Ipv6Addr>().ok()?), Some(scope)))
        }
        Some(_) => None,
        None => Some((text.parse().ok()?, None)),
    }
}

/// Cuts a value to a length fit for an error message.
pub(crate) fn shorten(value: &str) -> String {
    const LONGEST: usize = 120;
    if value.chars().count() <= LONGEST {
        return value.to_owned();
    }
    let mut short: String = value.chars().take(LONGEST).collect();
    short.push('…');
    short
}

fn is_word(text: &str, longest: usize) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    !text.is_empty() && text.len() <= longest && text.bytes().all(allowed)
}

fn split_number(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim_start())
}

/// The digits after the point: numerator / 10^digits, with at most 18 digits.
struct Fraction {
    numerator: u64,
    denominator: u64,
}

impl Fraction {
    fn of(&self, unit: u128) -> u128 {
        u128::from(self.numerator) * unit / u128::from(self.denominator)
    }

    fn is_whole(&self, unit: u128) -> bool {
        (u128::from(self.numerator) * unit).is_multiple_of(u128::from(self.denominator))
    }
}

fn decimal(text: &str) -> Option<(u64, Fraction)> {
    let (whole, digits) = text.split_once('.').unwrap_or((text, ""));
    if whole.is_empty() && digits.is_empty() {
        return None;
    }
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(digits) || digits.len() > 18 {
        return None;
    }
    let whole = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let numerator = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    Some((whole, Fraction { numerator, denominator: 10u64.pow(digits.len() as u32) }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration(" 2 h "), Ok(Duration::from_secs(7200)));
        assert_eq!(duration(".5s"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("0.000"), Ok(Duration::ZERO));
        for bad in
            ["", "s", ".", "1", "-1s", "1e3s", "1x", "1.2.3s", "99999999999999999999s", "100000000h", "٣s"]
        {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_powers_of_1024_and_whole() {
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("64mib"), Ok(64 << 20));
        assert_eq!(size("0.5K"), Ok(512));
        assert_eq!(size("18446744073709551615"), Ok(u64::MAX));
        for bad in ["", "K", "1.3", "0.0001K", "18446744073709551616", "99999999999T", "-4", "4 4", "1Q"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn endpoints_name_a_host_and_a_port() {
        for good in ["node1:1", "10.0.0.1:65535", "[::1]:80", "[fe80::1%en5]:7000", "a_b-c.local:7"] {
            assert_eq!(good.parse::<Endpoint>().expect(good).to_string(), good);
        }
        for bad in [
            "",
            "node1",
            "node1:",
            ":7000",
            "node1:0",
            "node1:65536",
            "node1:+7",
            "::1:7000",
            "[::1]7000",
            "[::1]",
            "[node1]:7000",
            "1.2.3:7000",
            "300.1.1.1:7",
            "a b:7000",
            "-oProxy:7",
            "[fe80::1%]:7",
            "[fe80::1%e n]:7",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn scoped_addresses_are_looked_up() {
        let endpoint: Endpoint = "[::1]:7000".parse().expect("endpoint");
        assert_eq!(endpoint.lookup().expect("lookup"), ["[::1]:7000".parse().expect("address")]);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = (duration(&text), size(&text), boolean(&text), text.parse::<Endpoint>());
            let _ = (check_host(&text), scoped_address(&text), list(&text).count());
            prop_assert!(shorten(&text).chars().count() <= 121);
        }

        #[test]
        fn nearly_right_text_does_not_panic(text in "[0-9]{0,22}[.]?[0-9]{0,22} ?[a-zµ%:]{0,3}") {
            if let Ok(duration) = duration(&text) {
                prop_assert!(duration <= LONGEST_DURATION);
            }
            let _ = size(&text);
        }

        #[test]
        fn durations_round_trip(millis in 0u64..10_000_000_000) {
            prop_assert_eq!(duration(&format!("{millis}ms")), Ok(Duration::from_millis(millis)));
            let seconds = format!("{}.{:03}s", millis / 1000, millis % 1000);
            prop_assert_eq!(duration(&seconds), Ok(Duration::from_millis(millis)));
        }

        #[test]
        fn endpoints_round_trip(text in "(\\[[0-9a-f:]{2,12}(%[a-z0-9]{1,4})?\\]|[a-z0-9.-]{1,12}):[0-9]{1,5}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
            }
        }
    }
}
