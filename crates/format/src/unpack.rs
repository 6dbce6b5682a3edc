//! Taking chunks out of what a store holds of them: nothing is a chunk before it is what the manifest names.

use crate::manifest::Chunk;
use crate::places::Place;
use zstd::bulk::Decompressor;

/// Why stored bytes are not a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnpackError {
    /// They are not a frame of its size.
    #[error("a chunk cannot be unpacked")]
    Frame,
    /// They are something else.
    #[error("a chunk is not what the manifest names")]
    Content,
}

/// Unpacks one chunk after the other.
#[derive(Default)]
pub struct Unpacker(Option<Decompressor<'static>>);

impl Unpacker {
    /// Puts the content of a chunk into the buffer, if what is stored at its place holds it.
    ///
    /// # Errors
    /// It does not; what is in the buffer then means nothing.
    pub fn unpack(
        &mut self,
        chunk: &Chunk,
        place: Place,
        stored: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(), UnpackError> {
        let length = chunk.len as usize;
        buffer.clear();
        if place.stored == chunk.len {
            buffer.extend_from_slice(stored);
        } else {
            buffer.resize(length, 0);
            let unpacker = match &mut self.0 {
                Some(unpacker) => unpacker,
                None => self.0.insert(Decompressor::new().map_err(|_| UnpackError::Frame)?),
            };
            // Never more than the chunk has, whatever the frame says.
            let written = unpacker.decompress_to_buffer(stored, &mut buffer[..]).map_err(|_| UnpackError::Frame)?;
            buffer.truncate(written);
        }
        if buffer.len() == length && *blake3::hash(buffer).as_bytes() == chunk.hash {
            Ok(())
        } else {
            Err(UnpackError::Content)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_manifest_names_is_a_chunk() {
        let content = b"content ".repeat(100);
        let chunk = Chunk { offset: 0, len: 800, hash: *blake3::hash(&content).as_bytes() };
        let (mut unpacker, mut buffer) = (Unpacker::default(), Vec::new());
        let mut unpack = |stored: &[u8]| {
            let place = Place { pack: 0, offset: 0, stored: stored.len() as u32 };
            unpacker.unpack(&chunk, place, stored, &mut buffer).map(|()| buffer.clone())
        };
        let packed = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
        assert_eq!(unpack(&content), Ok(content.clone()));
        assert_eq!(unpack(&packed(&content)), Ok(content.clone()));
        assert_eq!(unpack(&b"CONTENT ".repeat(100)), Err(UnpackError::Content));
        assert_eq!(unpack(&packed(&content[1..])), Err(UnpackError::Content), "shorter");
        assert_eq!(unpack(&packed(&content.repeat(2))), Err(UnpackError::Frame), "longer");
        assert_eq!(unpack(b"no frame"), Err(UnpackError::Frame));
        assert_eq!(unpack(&content), Ok(content.clone()), "after what was wrong");
    }
}
