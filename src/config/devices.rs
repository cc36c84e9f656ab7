//! The matrix of RDMA devices: by which device, or devices, each rank reaches each other rank.
#![forbid(unsafe_code)]

use serde_json::Value;

use super::parse::shorten;

/// Which devices of each rank have a cable to which other rank: the N x N matrix that MLX and JACCL users have.
///
/// In the JSON form, entry `[i][j]` says how rank i reaches rank j: `null` or `[]` for not at all, a device name for one
/// cable, an array of names for several.
///
/// ```
/// use raccl::DeviceMatrix;
///
/// let matrix = DeviceMatrix::parse(r#"[[null, "rdma_en5"], [["rdma_en4"], null]]"#).unwrap();
/// assert_eq!(matrix.size(), 2);
/// assert_eq!(matrix.cables(1, 0), ["rdma_en4"]);
/// assert!(matrix.check_mesh().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMatrix {
    rows: Vec<Vec<Vec<String>>>,
}

impl DeviceMatrix {
    /// Reads the JSON form. A matrix that is read is square, has nothing on its diagonal, and has as many cables from i to j
    /// as from j to i.
    ///
    /// ```
    /// let error = raccl::DeviceMatrix::parse(r#"[[null, "rdma_en5"], [null, null]]"#).unwrap_err();
    /// assert!(error.contains("rank 0 has 1 cable to rank 1 but rank 1 has 0 cables to rank 0"));
    /// ```
    pub fn parse(json: &str) -> Result<DeviceMatrix, String> {
        let value: Value = serde_json::from_str(json).map_err(|error| format!("not JSON: {error}"))?;
        let Value::Array(rows) = value else { return Err(EXPECTED.to_owned()) };
        let rows =
            rows.iter().enumerate().map(|(rank, row)| read_row(rank, row)).collect::<Result<_, _>>()?;
        DeviceMatrix::from_rows(rows)
    }

    /// Makes a matrix of rows, with the checks of [`DeviceMatrix::parse`].
    ///
    /// ```
    /// let one_cable = |name: &str| vec![name.to_owned()];
    /// let rows = vec![vec![vec![], one_cable("mlx5_0")], vec![one_cable("mlx5_1"), vec![]]];
    /// assert_eq!(raccl::DeviceMatrix::from_rows(rows).unwrap().cables(0, 1), ["mlx5_0"]);
    /// ```
    pub fn from_rows(rows: Vec<Vec<Vec<String>>>) -> Result<DeviceMatrix, String> {
        let size = rows.len();
        if size == 0 {
            return Err("the matrix is empty; it needs one row a rank".to_owned());
        }
        for (rank, row) in rows.iter().enumerate() {
            if row.len() != size {
                let length = row.len();
                return Err(format!("row {rank} has {length} entries, expected {size}, one for each row"));
            }
            if let Some(name) = row[rank].first() {
                return Err(format!("entry [{rank}][{rank}] is {name:?}; a rank has no cable to itself"));
            }
            check_names(rank, row)?;
        }
        for (i, row) in rows.iter().enumerate() {
            for (j, there) in row.iter().enumerate().take(i) {
                let (there, back) = (there.len(), rows[j][i].len());
                if there != back {
                    return Err(format!(
                        "rank {j} has {} to rank {i} but rank {i} has {} to rank {j}; a cable has two ends",
                        cables(back),
                        cables(there)
                    ));
                }
            }
        }
        Ok(DeviceMatrix { rows })
    }

    /// The number of ranks.
    ///
    /// ```
    /// assert_eq!(raccl::DeviceMatrix::parse("[[null]]").unwrap().size(), 1);
    /// ```
    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// The devices by which rank `from` reaches rank `to`, one for each cable; none if there is no cable or no such rank.
    ///
    /// ```
    /// let matrix = raccl::DeviceMatrix::parse(r#"[[null, ["en5", "en6"]], [["en1", "en2"], null]]"#).unwrap();
    /// assert_eq!(matrix.cables(0, 1), ["en5", "en6"]);
    /// assert!(matrix.cables(0, 7).is_empty());
    /// ```
    pub fn cables(&self, from: usize, to: usize) -> &[String] {
        self.rows.get(from).and_then(|row| row.get(to)).map_or(&[], Vec::as_slice)
    }

    /// The same without the cables between ranks that are no neighbours on a ring of all.
    pub(crate) fn neighbours_only(mut self) -> DeviceMatrix {
        let size = self.size();
        for (one, row) in self.rows.iter_mut().enumerate() {
            for (other, devices) in row.iter_mut().enumerate() {
                let apart = one.abs_diff(other);
                if apart != 1 && apart + 1 != size {
                    devices.clear();
                }
            }
        }
        self
    }

    /// The cables between these ranks, which are numbered anew in this order.
    pub(crate) fn of_ranks(&self, ranks: &[usize]) -> DeviceMatrix {
        let cables = |from: usize| ranks.iter().map(|&to| self.cables(from, to).to_vec()).collect();
        DeviceMatrix { rows: ranks.iter().map(|&from| cables(from)).collect() }
    }

    /// A short text that two matrices have in common only if they are equal, as far as anybody meets in practice.
    pub(crate) fn fingerprint(&self) -> String {
        // FNV-1a over all names with their places.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let mut add = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        for entry in self.rows.iter().flatten() {
            entry.iter().for_each(|name| name.bytes().chain([0]).for_each(&mut add));
            add(1);
        }
        format!("{} ranks, {hash:016x}", self.size())
    }

    /// Whether every pair of ranks has at least one cable; if not, which pair has none.
    ///
    /// ```
    /// let line = r#"[[null, "a", null], ["a", null, "b"], [null, "b", null]]"#;
    /// let error = raccl::DeviceMatrix::parse(line).unwrap().check_mesh().unwrap_err();
    /// assert!(error.contains("ranks 0 and 2"));
    /// ```
    pub fn check_mesh(&self) -> Result<(), String> {
        for i in 0..self.size() {
            for j in i + 1..self.size() {
                if self.cables(i, j).is_empty() {
                    return Err(format!("ranks {i} and {j} have no cable; in a mesh every pair has one"));
                }
            }
        }
        Ok(())
    }

    /// Whether each rank has a cable to the next, the last to the first, and each neighbour the same number of them.
    ///
    /// ```
    /// let ring = r#"[[null, "a", "b"], ["b", null, "a"], ["a", "b", null]]"#;
    /// assert!(raccl::DeviceMatrix::parse(ring).unwrap().check_ring().is_ok());
    /// ```
    pub fn check_ring(&self) -> Result<(), String> {
        let size = self.size();
        if size == 1 {
            return Ok(());
        }
        let first = self.cables(0, 1).len();
        for i in 0..size {
            let next = (i + 1) % size;
            let count = self.cables(i, next).len();
            if count == 0 {
                return Err(format!("ranks {i} and {next} have no cable; in a ring neighbours have one"));
            }
            if count != first {
                return Err(format!(
                    "ranks 0 and 1 have {} but ranks {i} and {next} have {}; in a ring all neighbours have as many",
                    cables(first),
                    cables(count)
                ));
            }
        }
        Ok(())
    }
}

const EXPECTED: &str = "expected an array with one array a rank, whose entries are null, a device name or an array of device names";

/// Longer than any device name of Linux or macOS.
const LONGEST_NAME: usize = 64;

fn read_row(rank: usize, row: &Value) -> Result<Vec<Vec<String>>, String> {
    let Value::Array(entries) = row else { return Err(format!("row {rank}: {EXPECTED}")) };
    entries
        .iter()
        .enumerate()
        .map(|(peer, entry)| read_entry(entry).map_err(|reason| format!("entry [{rank}][{peer}]: {reason}")))
        .collect()
}

/// Reads null, a name or an array of names; hostfiles have the same entries.
pub(super) fn read_entry(entry: &Value) -> Result<Vec<String>, String> {
    let read_name = |name: &Value| match name {
        Value::String(name) => check_name(name).map(|()| name.clone()),
        other => Err(format!("{} is no device name", shorten(&other.to_string()))),
    };
    match entry {
        Value::Null => Ok(Vec::new()),
        Value::Array(names) => names.iter().map(read_name).collect(),
        name => Ok(vec![read_name(name)?]),
    }
}

fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("{:?} is no device name", shorten(name)));
    }
    Ok(())
}

/// A port has one cable, so a device appears once in an entry, though one device may lead to several ranks through a switch.
fn check_names(rank: usize, row: &[Vec<String>]) -> Result<(), String> {
    for (peer, names) in row.iter().enumerate() {
        for (k, name) in names.iter().enumerate() {
            check_name(name)?;
            if names[..k].contains(name) {
                return Err(format!("entry [{rank}][{peer}] names {name:?} twice"));
            }
        }
        if names.len() > MOST_CABLES {
            return Err(format!(
                "entry [{rank}][{peer}] has {}, at most {MOST_CABLES} are used",
                cables(names.len())
            ));
        }
    }
    Ok(())
}

/// Cables between two machines; a Mac has six Thunderbolt ports at most.
const MOST_CABLES: usize = 16;

fn cables(count: usize) -> String {
    if count == 1 { "1 cable".to_owned() } else { format!("{count} cables") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<DeviceMatrix, String> {
        DeviceMatrix::parse(json)
    }

    #[test]
    fn wrong_matrices_are_refused_with_the_place() {
        for (json, place) in [
            ("", "not JSON"),
            ("{}", "expected an array"),
            ("[]", "empty"),
            ("[1]", "row 0"),
            ("[[null, \"a\"]]", "row 0 has 2 entries, expected 1"),
            ("[[\"a\"]]", "[0][0]"),
            ("[[null, 7], [\"a\", null]]", "[0][1]: 7 is no device name"),
            ("[[null, \"\"], [\"a\", null]]", "[0][1]"),
            ("[[null, [\"a\", \"a\"]], [[\"b\", \"c\"], null]]", "twice"),
            (
                "[[null, [\"a\", \"b\"]], [\"c\", null]]",
                "rank 0 has 2 cables to rank 1 but rank 1 has 1 cable",
            ),
        ] {
            let error = parse(json).expect_err(json);
            assert!(error.contains(place), "{json}: {error}");
        }
    }

    #[test]
    fn rings_need_equal_cables() {
        let uneven = r#"[[null, ["a", "b"], "c"], [["a", "b"], null, "c"], ["a", "b", null]]"#;
        let error = parse(uneven).expect("consistent").check_ring().expect_err("uneven");
        assert!(error.contains("ranks 0 and 1 have 2 cables but ranks 1 and 2 have 1 cable"), "{error}");
        let line = r#"[[null, "a", null], ["a", null, "b"], [null, "b", null]]"#;
        assert!(parse(line).expect("consistent").check_ring().expect_err("open").contains("ranks 2 and 0"));
        assert!(parse("[[null]]").expect("alone").check_ring().is_ok());
        assert!(parse(r#"[[null, "a"], ["b", []]]"#).expect("pair").check_ring().is_ok());
    }

    #[test]
    fn neighbours_keep_their_cables() {
        let text =
            r#"[[null, "a", "b", "c"], ["a", null, "b", "c"], ["a", "b", null, "c"], ["a", "b", "c", null]]"#;
        let ring = parse(text).expect("matrix").neighbours_only();
        assert!(ring.check_ring().is_ok());
        assert_eq!((ring.cables(0, 2).len(), ring.cables(0, 3).len(), ring.cables(1, 3).len()), (0, 1, 0));
        let pair = r#"[[null, "a"], ["b", null]]"#;
        assert_eq!(parse(pair).expect("pair").neighbours_only(), parse(pair).expect("pair"));
    }

    #[test]
    fn different_matrices_have_different_fingerprints() {
        let texts = [
            "[[null]]",
            r#"[[null, "a"], ["b", null]]"#,
            r#"[[null, "b"], ["a", null]]"#,
            r#"[[null, ["a", "b"]], [["a", "b"], null]]"#,
            r#"[[null, ["b", "a"]], [["a", "b"], null]]"#,
        ];
        let mut prints: Vec<_> = texts.iter().map(|text| parse(text).expect(text).fingerprint()).collect();
        assert_eq!(parse(texts[1]).expect("same").fingerprint(), prints[1]);
        prints.sort();
        prints.dedup();
        assert_eq!(prints.len(), texts.len());
    }

    #[test]
    fn deep_nesting_is_refused() {
        assert!(parse(&"[".repeat(1_000_000)).is_err());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = parse(&text);
        }

        #[test]
        fn json_of_about_the_right_shape_never_panics(text in "\\[(\\[((null|\"a\"|\\[\"a\",\"b\"\\]|7),?){0,4}\\],?){0,4}\\]") {
            if let Ok(matrix) = parse(&text) {
                for i in 0..matrix.size() {
                    for j in 0..matrix.size() {
                        prop_assert_eq!(matrix.cables(i, j).len(), matrix.cables(j, i).len());
                    }
                }
                let _ = (matrix.check_mesh(), matrix.check_ring());
            }
        }
    }
}
