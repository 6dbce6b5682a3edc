//! The manifest: what a layer is made of. Its SHA-256 is the layer's digest.

use crate::read::Reader;
use crate::{BLOCK, CHUNK, FormatError};
use corral_api::digest::Digest;

const MAGIC: &[u8; 8] = b"CORRALLY";
const VERSION: u32 = 1;
const WHAT: &str = "layer manifest";
const ENTRY: u64 = 36;
/// Chunks a manifest may have: 16 TiB of data, which is what 32-bit block numbers reach.
const MAX_CHUNKS: u32 = 1 << 27;

/// BLAKE3 of some bytes.
pub type Hash = [u8; 32];

/// One chunk of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Where it begins.
    pub offset: u64,
    /// Its bytes, padding not counted: 1 to [`CHUNK`].
    pub len: u32,
    /// BLAKE3 of these bytes.
    pub hash: Hash,
}

/// A layer's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Bytes of the metadata.
    pub meta_len: u64,
    /// BLAKE3 of the metadata.
    pub meta_hash: Hash,
    /// Bytes of the data, padding included.
    pub data_len: u64,
    /// The chunks, by offset, without gaps.
    pub chunks: Vec<Chunk>,
}

impl Manifest {
    /// Puts a manifest together from chunks in order: lengths and hashes.
    ///
    /// # Errors
    /// A length that no chunk has, or too many chunks.
    pub fn new(meta: &[u8], chunks: impl IntoIterator<Item = (u32, Hash)>) -> Result<Self, FormatError> {
        let mut table = Vec::new();
        let mut offset = 0;
        for (len, hash) in chunks {
            table.push(chunk_at(offset, len, hash)?);
            offset += u64::from(len).next_multiple_of(BLOCK);
        }
        if table.len() as u64 > u64::from(MAX_CHUNKS) {
            return Err(FormatError::Unsound { what: WHAT, reason: format!("{} chunks", table.len()) });
        }
        let meta_hash = *blake3::hash(meta).as_bytes();
        Ok(Self { meta_len: meta.len() as u64, meta_hash, data_len: offset, chunks: table })
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.chunks.len() * ENTRY as usize);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.chunks.len() as u32).to_le_bytes());
        out.extend(self.meta_len.to_le_bytes());
        out.extend(self.meta_hash);
        out.extend(self.data_len.to_le_bytes());
        for chunk in &self.chunks {
            out.extend(chunk.len.to_le_bytes());
            out.extend(chunk.hash);
        }
        out
    }

    /// Reads bytes that need not be sound.
    ///
    /// # Errors
    /// They are not a manifest of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::open(bytes, WHAT, MAGIC, VERSION)?;
        let count = reader.u32()?;
        let meta_len = reader.u64()?;
        let meta_hash = reader.take()?;
        let data_len = reader.u64()?;
        if count > MAX_CHUNKS {
            return Err(reader.unsound(format!("{count} chunks")));
        }
        reader.left_is(u64::from(count) * ENTRY)?;
        let mut chunks = Vec::with_capacity(count as usize);
        let mut offset = 0;
        for _ in 0..count {
            let chunk = chunk_at(offset, reader.u32()?, reader.take()?)?;
            offset += u64::from(chunk.len).next_multiple_of(BLOCK);
            chunks.push(chunk);
        }
        if offset != data_len {
            return Err(reader.unsound(format!("its chunks are {offset} bytes, not {data_len}")));
        }
        Ok(Self { meta_len, meta_hash, data_len, chunks })
    }

    /// The layer's digest.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.encode())
    }

    /// Numbers of the chunks that hold bytes `from..to` of the data.
    pub fn chunks_of(&self, from: u64, to: u64) -> std::ops::Range<usize> {
        if from >= to {
            return 0..0;
        }
        let first = self.chunks.partition_point(|c| c.offset <= from).saturating_sub(1);
        let end = self.chunks.partition_point(|c| c.offset < to);
        first.min(end)..end
    }

    /// What is stored of a layer: metadata and data.
    pub fn size(&self) -> u64 {
        self.meta_len + self.data_len
    }
}

fn chunk_at(offset: u64, len: u32, hash: Hash) -> Result<Chunk, FormatError> {
    if len == 0 || u64::from(len) > CHUNK {
        return Err(FormatError::Unsound { what: WHAT, reason: format!("a chunk of {len} bytes") });
    }
    Ok(Chunk { offset, len, hash })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn manifest(lens: &[u32]) -> Manifest {
        let chunks = lens.iter().enumerate().map(|(n, len)| (*len, [n as u8; 32]));
        Manifest::new(b"meta", chunks).unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        for lens in [&[][..], &[1], &[131_072, 5, 4096, 4097]] {
            let made = manifest(lens);
            assert_eq!(Manifest::decode(&made.encode()).unwrap(), made);
            assert_eq!(made.digest(), Digest::of(&made.encode()));
        }
        assert_eq!(manifest(&[131_072, 5, 4096, 4097]).data_len, 131_072 + 4096 + 4096 + 8192);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(Manifest::new(b"", [(0, [0; 32])]).is_err());
        assert!(Manifest::new(b"", [(131_073, [0; 32])]).is_err());
        let good = manifest(&[7, 8]).encode();
        for cut in 0..good.len() {
            assert!(Manifest::decode(&good[..cut]).is_err(), "{cut}");
        }
        let with = |at: usize, value: u8| {
            let mut bad = good.clone();
            bad[at] = value;
            Manifest::decode(&bad)
        };
        assert_eq!(with(0, b'X'), Err(FormatError::Magic(WHAT)));
        assert!(matches!(with(8, 2), Err(FormatError::Version { found: 2, .. })));
        assert!(matches!(with(12, 1), Err(FormatError::Length(_))));
        assert!(matches!(with(15, 0xff), Err(FormatError::Unsound { .. } | FormatError::Length(_))));
        assert!(matches!(with(56, 1), Err(FormatError::Unsound { .. })));
    }

    #[test]
    fn ranges_find_their_chunks() {
        let made = manifest(&[131_072, 5, 4096]);
        assert_eq!(made.chunks_of(0, 1), 0..1);
        assert_eq!(made.chunks_of(131_071, 131_073), 0..2);
        assert_eq!(made.chunks_of(131_072 + 4095, 131_072 + 4096), 1..2, "padding belongs to its chunk");
        assert_eq!(made.chunks_of(0, made.data_len), 0..3);
        assert_eq!(made.chunks_of(5, 5), 0..0);
        assert_eq!(made.chunks_of(made.data_len, made.data_len + 9), 2..3);
    }

    proptest! {
        #[test]
        fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut framed = MAGIC.to_vec();
            framed.extend(VERSION.to_le_bytes());
            framed.extend(&bytes);
            for input in [&bytes, &framed] {
                if let Ok(read) = Manifest::decode(input) {
                    prop_assert_eq!(&read.encode(), input);
                }
            }
        }
    }
}
