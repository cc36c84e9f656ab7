//! Cuts what a rank writes into lines, in bounded memory.

/// A line longer than this comes out in pieces of this length, each as a line of its own.
pub(super) const LONGEST: usize = 1 << 20;

/// The unfinished line of one stream.
#[derive(Debug, Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// Takes what was read and hands out every line that is complete by now, without its newline.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut line: impl FnMut(&[u8])) {
        while let Some(end) = bytes.iter().position(|&b| b == b'\n') {
            self.append(&bytes[..end], &mut line);
            line(&self.partial);
            self.partial.clear();
            bytes = &bytes[end + 1..];
        }
        self.append(bytes, &mut line);
    }

    /// The beginning of a line whose end has not arrived.
    pub(super) fn unfinished(&self) -> &[u8] {
        &self.partial
    }

    /// Hands that out as well. What arrives next continues it.
    pub(super) fn take_unfinished(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.partial)
    }

    /// Adds to the unfinished line, and cuts it whenever there is more than the longest piece.
    fn append(&mut self, mut bytes: &[u8], line: &mut impl FnMut(&[u8])) {
        while self.partial.len() + bytes.len() > LONGEST {
            let (now, rest) = bytes.split_at(LONGEST - self.partial.len());
            self.partial.extend_from_slice(now);
            line(&self.partial);
            self.partial.clear();
            bytes = rest;
        }
        self.partial.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out when `text` arrives in pieces of `piece` bytes.
    fn cut(text: &[u8], piece: usize) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut out = Vec::new();
        for part in text.chunks(piece) {
            lines.feed(part, |line| out.push(line.to_vec()));
        }
        out.extend(Some(lines.take_unfinished()).filter(|last| !last.is_empty()));
        out
    }

    #[test]
    fn lines_do_not_depend_on_how_they_arrive() {
        let text = b"one\n\ntwo \xff\r\nlast";
        for piece in 1..=text.len() {
            assert_eq!(cut(text, piece), [&b"one"[..], b"", b"two \xff\r", b"last"], "pieces of {piece}");
        }
        assert_eq!(cut(b"whole\n", 3), [b"whole"]);
    }

    #[test]
    fn a_long_line_is_cut_and_loses_nothing() {
        for (length, pieces) in [(LONGEST, 1), (LONGEST + 1, 2), (3 * LONGEST + 17, 4)] {
            let mut text = vec![b'x'; length];
            text.push(b'\n');
            let out = cut(&text, 4096);
            assert_eq!(out.len(), pieces);
            assert!(out.iter().all(|piece| piece.len() <= LONGEST));
            assert_eq!(out.concat().len(), length);
        }
    }
}
