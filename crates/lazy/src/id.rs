//! Names of layers, and the numbers by which the kernel asks for their files.

use std::fmt;
use std::str::FromStr;

/// A layer: the SHA-256 of its manifest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId([u8; 32]);

/// A text that names no layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no layer: expected 64 lowercase hex digits")]
pub struct IdError(String);

/// Number of the directory itself.
pub(crate) const ROOT: u64 = 1;

impl LayerId {
    /// Its name without `sha256:`, as directories and files have it.
    pub fn hex(&self) -> String {
        data_encoding::HEXLOWER.encode(&self.0)
    }

    /// The number of its file: part of the digest, so that it is the same in every process that serves the file.
    pub(crate) fn node(&self) -> u64 {
        match self.word(0) {
            // 0 is none and 1 is the directory.
            0 | ROOT => 2,
            node => node,
        }
    }

    /// What an open of the file is known by: another part of the digest, which tells layers apart that share a number.
    pub(crate) fn handle(&self) -> u64 {
        self.word(8)
    }

    fn word(&self, at: usize) -> u64 {
        self.0[at..at + 8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }
}

impl From<[u8; 32]> for LayerId {
    fn from(raw: [u8; 32]) -> Self {
        Self(raw)
    }
}

impl FromStr for LayerId {
    type Err = IdError;

    /// Reads a name with or without `sha256:`.
    fn from_str(text: &str) -> Result<Self, IdError> {
        let refuse = || IdError(text.chars().take(100).collect());
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        let raw = data_encoding::HEXLOWER.decode(hex.as_bytes()).map_err(|_| refuse())?;
        Ok(Self(raw.try_into().map_err(|_| refuse())?))
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for LayerId {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for LayerId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_numbers_are_neither_none_nor_the_directory() {
        let hex = format!("00000000000000010123456789abcdef{}", "f".repeat(32));
        let id: LayerId = format!("sha256:{hex}").parse().unwrap();
        assert_eq!((id.hex(), id.node(), id.handle()), (hex.clone(), 2, 0x0123_4567_89ab_cdef));
        assert_eq!(hex.replacen("01", "07", 1).parse::<LayerId>().unwrap().node(), 7);
        for bad in ["", "..", "sha256:", &hex[1..], &hex.to_uppercase(), &format!("{hex}0")] {
            assert!(bad.parse::<LayerId>().is_err(), "{bad}");
        }
    }
}
