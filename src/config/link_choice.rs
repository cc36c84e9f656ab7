//! Which link kind is asked for.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

use crate::link::LinkKind;

/// Which kind of link the pairs of a group use.
///
/// ```
/// use raccl::{LinkChoice, LinkKind};
///
/// assert_eq!("auto".parse(), Ok(LinkChoice::Auto));
/// assert_eq!("tcp".parse(), Ok(LinkChoice::Only(LinkKind::Tcp)));
/// assert!("carrier-pigeon".parse::<LinkChoice>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LinkChoice {
    /// Each pair of ranks takes the best kind it has.
    #[default]
    Auto,
    /// Every pair takes this kind; that it is not there is an error.
    Only(LinkKind),
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkChoice::Auto => f.pad("auto"),
            LinkChoice::Only(kind) => kind.fmt(f),
        }
    }
}

impl FromStr for LinkChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<LinkChoice, String> {
        match text {
            "auto" => Ok(LinkChoice::Auto),
            kind => kind
                .parse()
                .map(LinkChoice::Only)
                .map_err(|_| "expected auto, shm, verbs, tcp or local".to_owned()),
        }
    }
}

impl From<LinkKind> for LinkChoice {
    fn from(kind: LinkKind) -> LinkChoice {
        LinkChoice::Only(kind)
    }
}
