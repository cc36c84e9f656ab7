//! Bytes to fields and back: little-endian integers, counted strings and lists, everything bounded.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// What is wrong with bytes that a stranger or a peer sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub(crate) struct Malformed(pub(crate) String);

/// Appends fields to a frame.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// A frame that starts with `tag`.
    pub(crate) fn tagged(tag: u8) -> Writer {
        Writer(vec![tag])
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Writer {
        self.raw(&[value])
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u128(&mut self, value: u128) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    /// A rank, size or other number that has been checked to be far below 2^32.
    pub(crate) fn number(&mut self, value: usize) -> &mut Writer {
        debug_assert!(u32::try_from(value).is_ok());
        self.u32(value as u32)
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.number(bytes.len()).raw(bytes)
    }

    /// A string, cut at a character boundary to what a [`Reader`] with the same limit accepts.
    pub(crate) fn string(&mut self, text: &str, limit: usize) -> &mut Writer {
        self.bytes(shortened(text, limit).as_bytes())
    }

    /// The address without its scope, which means nothing on another machine.
    pub(crate) fn address(&mut self, address: SocketAddr) -> &mut Writer {
        match address.ip() {
            IpAddr::V4(ip) => self.u8(4).raw(&ip.octets()),
            IpAddr::V6(ip) => self.u8(6).raw(&ip.octets()),
        };
        self.raw(&address.port().to_le_bytes())
    }
}

/// The longest beginning of `text` that has at most `limit` bytes.
pub(crate) fn shortened(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Takes fields off a frame. Every method is total: bytes that are not there are an error.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    /// What the frame is, for the error's text.
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Reader<'a> {
        Reader { rest: bytes, what }
    }

    /// Names the frame once its tag is known.
    pub(crate) fn rename(&mut self, what: &'static str) {
        self.what = what;
    }

    pub(crate) fn u8(&mut self, field: &str) -> Result<u8, Malformed> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self, field: &str) -> Result<u16, Malformed> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, field: &str) -> Result<u32, Malformed> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &str) -> Result<u64, Malformed> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self, field: &str) -> Result<u128, Malformed> {
        self.array(field).map(u128::from_le_bytes)
    }

    /// A number that must not exceed `limit`.
    pub(crate) fn number(&mut self, field: &str, limit: usize) -> Result<usize, Malformed> {
        let value = self.u32(field)? as usize;
        if value > limit {
            return Err(self.wrong(format!("{field} is {value}, at most {limit} is allowed")));
        }
        Ok(value)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Malformed> {
        match self.rest.split_first_chunk::<N>() {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(*taken)
            }
            None => Err(self.cut_off(field)),
        }
    }

    pub(crate) fn bytes(&mut self, field: &str, limit: usize) -> Result<&'a [u8], Malformed> {
        let length = self.number(field, limit)?;
        let (taken, rest) = self.rest.split_at_checked(length).ok_or_else(|| self.cut_off(field))?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn string(&mut self, field: &str, limit: usize) -> Result<String, Malformed> {
        let bytes = self.bytes(field, limit)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.wrong(format!("{field} is not UTF-8"))),
        }
    }

    /// A counted list. Nothing is allocated for elements that are not there.
    pub(crate) fn list<T>(
        &mut self,
        field: &str,
        limit: usize,
        mut element: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = self.number(field, limit)?;
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(element(self)?);
        }
        Ok(list)
    }

    pub(crate) fn address(&mut self, field: &str) -> Result<SocketAddr, Malformed> {
        let ip = match self.u8(field)? {
            4 => IpAddr::V4(Ipv4Addr::from(self.array::<4>(field)?)),
            6 => IpAddr::V6(Ipv6Addr::from(self.array::<16>(field)?)),
            other => return Err(self.wrong(format!("{field} has address family {other}"))),
        };
        Ok(SocketAddr::new(ip, self.u16(field)?))
    }

    /// Nothing may be left behind the last field.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        match self.rest.len() {
            0 => Ok(()),
            n => Err(self.wrong(format!("{n} bytes too long"))),
        }
    }

    pub(crate) fn wrong(&self, reason: impl std::fmt::Display) -> Malformed {
        Malformed(format!("{}: {reason}", self.what))
    }

    fn cut_off(&self, field: &str) -> Malformed {
        self.wrong(format!("cut off in {field}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_survive_the_wire() {
        let mut writer = Writer::tagged(9);
        let v6: SocketAddr = "[fe80::1]:65535".parse().unwrap();
        writer.u32(1).u64(2).u128(3).bytes(b"ab").string("grüße", 64).address(v6);
        let frame = writer.finish();
        let mut reader = Reader::new(&frame, "test");
        assert_eq!(reader.u8("tag"), Ok(9));
        assert_eq!((reader.u32("a"), reader.u64("b"), reader.u128("c")), (Ok(1), Ok(2), Ok(3)));
        assert_eq!(reader.bytes("d", 2), Ok(&b"ab"[..]));
        assert_eq!(reader.string("e", 64), Ok("grüße".to_owned()));
        assert_eq!(reader.address("f"), Ok(v6));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn a_count_beyond_its_limit_or_the_frame_is_refused() {
        let frame = [255, 255, 255, 255, 1];
        assert!(Reader::new(&frame, "test").bytes("x", 100).is_err());
        assert!(Reader::new(&frame, "test").bytes("x", usize::MAX).is_err());
        assert!(Reader::new(&frame, "test").list("x", usize::MAX, |r| r.u32("y")).is_err());
    }

    #[test]
    fn long_strings_are_cut_between_characters() {
        assert_eq!(shortened("aü", 2), "a");
        assert_eq!(shortened("aü", 3), "aü");
        assert_eq!(shortened("", 0), "");
    }
}
