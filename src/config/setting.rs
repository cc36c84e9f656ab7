//! A value together with the name under which the user gave it, so that errors speak of what the user wrote.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use super::parse::shorten;
use crate::error::{Cause, Error};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting<T> {
    pub(super) value: T,
    /// A variable's name, or `Config::` and a builder call's; `default` if the user gave nothing.
    pub(super) name: &'static str,
}

/// The name of a setting that the user did not give.
pub(super) const DEFAULT: &str = "default";

impl<T> Setting<T> {
    pub(super) fn new(name: &'static str, value: T) -> Setting<T> {
        Setting { value, name }
    }

    pub(super) fn default(value: T) -> Setting<T> {
        Setting { value, name: DEFAULT }
    }

    pub(super) fn given(&self) -> bool {
        self.name != DEFAULT
    }
}

impl<T: ToString> Setting<T> {
    pub(super) fn refuse(&self, reason: impl Into<String>) -> Error {
        refuse(self.name, &self.value.to_string(), reason)
    }
}

/// The error about a value that cannot be.
pub(super) fn refuse(name: &str, value: &str, reason: impl Into<String>) -> Error {
    Error::Config { what: name.to_owned(), value: shorten(value), reason: reason.into(), source: None }
}

/// The error about a value that led to another error.
pub(super) fn refuse_because(
    name: &str,
    value: &str,
    reason: impl Into<String>,
    source: impl Into<Cause>,
) -> Error {
    let source = Some(source.into());
    Error::Config { what: name.to_owned(), value: shorten(value), reason: reason.into(), source }
}
