//! Where a layer's chunks lie in a shared store. Not part of the digest, so never trusted.

use crate::FormatError;
use crate::manifest::Hash;
use crate::read::{self, Reader};

const MAGIC: &[u8; 8] = b"CORRALPL";
const VERSION: u32 = 1;
const WHAT: &str = "table of places";
/// Bytes of the BLAKE3 at the end: against damage, not against malice.
const CHECKSUM: usize = 32;
/// Where one chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of its pack.
    pub pack: u32,
    /// First byte there.
    pub offset: u64,
    /// Bytes there; as many as the chunk has where it is not compressed.
    pub stored: u32,
}

/// Where all chunks of a layer lie, in the manifest's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Places {
    /// Names of the packs.
    pub packs: Vec<Hash>,
    /// One for each chunk.
    pub chunks: Vec<Place>,
}

impl Places {
    /// Its bytes as they lie on a node.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(20 + self.packs.len() * 32 + self.chunks.len() * 16);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.packs.len() as u32).to_le_bytes());
        out.extend((self.chunks.len() as u32).to_le_bytes());
        for pack in &self.packs {
            out.extend(pack);
        }
        for place in &self.chunks {
            out.extend(place.pack.to_le_bytes());
            out.extend(place.offset.to_le_bytes());
            out.extend(place.stored.to_le_bytes());
        }
        out.extend(blake3::hash(&out).as_bytes());
        out
    }

    /// Reads bytes that need not be sound.
    ///
    /// # Errors
    /// They are not such a table.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let (bytes, sum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(FormatError::Length(WHAT))?;
        let mut reader = Reader::open(bytes, WHAT, MAGIC, VERSION)?;
        if blake3::hash(bytes).as_bytes() != sum {
            return Err(reader.unsound("its checksum is wrong"));
        }
        let (packs, chunks) = (reader.u32()?, reader.u32()?);
        reader.left_is(u64::from(packs) * 32 + u64::from(chunks) * 16)?;
        let packs: Vec<Hash> = (0..packs).map(|_| reader.take()).collect::<Result<_, _>>()?;
        let mut table = Vec::with_capacity(chunks as usize);
        for _ in 0..chunks {
            let place = Place { pack: reader.u32()?, offset: reader.u64()?, stored: reader.u32()? };
            if place.pack as usize >= packs.len() || place.offset.checked_add(place.stored.into()).is_none() {
                return Err(reader.unsound(format!("a chunk in pack {} of {}", place.pack, packs.len())));
            }
            table.push(place);
        }
        Ok(Self { packs, chunks: table })
    }

    /// As one frame, for a store.
    pub fn pack(&self) -> Vec<u8> {
        read::pack(&self.encode())
    }

    /// Reads a frame of a store whose layer is not known, of at most `most` bytes unpacked.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn unpack_any(frame: &[u8], most: usize) -> Result<Self, FormatError> {
        Self::decode(&read::unpack(frame, WHAT, most)?)
    }

    /// Reads a frame of a store, for a layer of so many chunks.
    ///
    /// # Errors
    /// As [`Self::decode`], or it is the table of another layer.
    pub fn unpack(frame: &[u8], chunks: usize) -> Result<Self, FormatError> {
        // At worst every chunk lies in a pack of its own.
        let places = Self::decode(&read::unpack(frame, WHAT, 20 + chunks * (32 + 16) + CHECKSUM)?)?;
        if places.chunks.len() == chunks { Ok(places) } else { Err(FormatError::Length(WHAT)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_cannot_be_is_refused() {
        let place = |pack, offset, stored| Place { pack, offset, stored };
        let made = Places { packs: vec![[1; 32], [2; 32]], chunks: vec![place(0, 0, 9), place(1, 1 << 40, 131_072)] };
        assert_eq!(Places::unpack(&made.pack(), 2).unwrap(), made);
        assert_eq!(Places::decode(&Places::default().encode()).unwrap(), Places::default());
        let good = made.encode();
        for cut in 0..good.len() {
            assert!(Places::decode(&good[..cut]).is_err(), "{cut}");
        }
        let beyond = Places { chunks: vec![place(2, 0, 1)], ..made.clone() };
        assert!(matches!(Places::decode(&beyond.encode()), Err(FormatError::Unsound { .. })));
        let over = Places { chunks: vec![place(0, u64::MAX, 1)], ..made };
        assert!(matches!(Places::decode(&over.encode()), Err(FormatError::Unsound { .. })));
        assert!(Places::unpack(b"no frame", 2).is_err());
        assert!(Places::unpack(&Places::default().pack(), 1).is_err());
    }
}
