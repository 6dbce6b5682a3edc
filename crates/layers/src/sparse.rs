//! Sparse members: GNU's old header form and the three PAX forms (GNU tar manual, "Storing Sparse Files").

use crate::error::EntryFault;
use std::io::{self, Read};
use tar::{GnuExtSparseHeader, GnuSparseHeader, Header};

/// Most data segments of one file; a map beyond this is refused rather than held in memory.
const MAX_SEGMENTS: usize = 1 << 20;

/// Where data lies in a sparse file: (offset, length), ascending.
pub(crate) type SparseMap = Vec<(u64, u64)>;

/// What PAX records say about sparseness.
#[derive(Debug, Default)]
pub(crate) struct PaxSparse {
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) real_size: Option<u64>,
    pub(crate) in_data: bool,
    map: SparseMap,
    offset: Option<u64>,
}

fn number(value: &[u8]) -> Result<u64, EntryFault> {
    std::str::from_utf8(value).ok().and_then(|t| t.trim().parse().ok()).ok_or(EntryFault::BadSparseMap)
}

impl PaxSparse {
    /// Takes one `GNU.sparse.*` record.
    pub(crate) fn record(&mut self, key: &[u8], value: &[u8]) -> Result<(), EntryFault> {
        match key {
            b"GNU.sparse.name" => self.name = Some(value.to_vec()),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.real_size = Some(number(value)?),
            b"GNU.sparse.major" => self.in_data = number(value)? == 1,
            b"GNU.sparse.offset" => self.offset = Some(number(value)?),
            b"GNU.sparse.numbytes" => {
                let offset = self.offset.take().ok_or(EntryFault::BadSparseMap)?;
                self.push(offset, number(value)?)?;
            }
            b"GNU.sparse.map" => {
                let numbers = value.split(|b| *b == b',').map(number).collect::<Result<Vec<_>, _>>()?;
                for pair in numbers.chunks(2) {
                    let [offset, length] = pair else { return Err(EntryFault::BadSparseMap) };
                    self.push(*offset, *length)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn push(&mut self, offset: u64, length: u64) -> Result<(), EntryFault> {
        if self.map.len() >= MAX_SEGMENTS {
            return Err(EntryFault::BadSparseMap);
        }
        self.map.push((offset, length));
        Ok(())
    }

    /// The map, where the records hold one.
    pub(crate) fn take_map(&mut self) -> SparseMap {
        std::mem::take(&mut self.map)
    }
}

fn gnu_segment(block: &GnuSparseHeader, map: &mut SparseMap) -> Result<(), EntryFault> {
    if block.is_empty() {
        return Ok(());
    }
    if map.len() >= MAX_SEGMENTS {
        return Err(EntryFault::BadSparseMap);
    }
    let offset = block.offset().map_err(|_| EntryFault::BadSparseMap)?;
    let length = block.length().map_err(|_| EntryFault::BadSparseMap)?;
    map.push((offset, length));
    Ok(())
}

/// Reads an old GNU sparse map: four segments in the header, more in blocks after it. Returns map, real size and the
/// number of those blocks.
pub(crate) fn gnu_map(
    header: &Header,
    reader: &mut impl Read,
) -> io::Result<Result<(SparseMap, u64, u64), EntryFault>> {
    let Some(gnu) = header.as_gnu() else { return Ok(Err(EntryFault::BadSparseMap)) };
    let mut map = SparseMap::new();
    for block in &gnu.sparse {
        if let Err(fault) = gnu_segment(block, &mut map) {
            return Ok(Err(fault));
        }
    }
    let mut blocks = 0;
    let mut more = gnu.is_extended();
    while more {
        blocks += 1;
        let mut ext = GnuExtSparseHeader::new();
        reader.read_exact(ext.as_mut_bytes())?;
        for block in &ext.sparse {
            if let Err(fault) = gnu_segment(block, &mut map) {
                return Ok(Err(fault));
            }
        }
        more = ext.is_extended();
    }
    Ok(gnu.real_size().map(|size| (map, size, blocks)).map_err(|_| EntryFault::BadSparseMap))
}

/// Reads the map that PAX 1.0 puts before the data, padded to 512 bytes. Returns it and the bytes it took.
pub(crate) fn map_in_data(reader: &mut impl Read) -> io::Result<Result<(SparseMap, u64), EntryFault>> {
    let mut block = [0u8; 512];
    let mut at = 512;
    let mut taken = 0u64;
    let mut next = |reader: &mut dyn Read| -> io::Result<Result<u64, EntryFault>> {
        let mut value = 0u64;
        for digits in 0..=20 {
            if at == 512 {
                reader.read_exact(&mut block)?;
                taken += 512;
                at = 0;
            }
            let byte = block[at];
            at += 1;
            match byte {
                b'\n' if digits > 0 => return Ok(Ok(value)),
                b'0'..=b'9' => match value.checked_mul(10).and_then(|v| v.checked_add(u64::from(byte - b'0'))) {
                    Some(v) => value = v,
                    None => break,
                },
                _ => break,
            }
        }
        Ok(Err(EntryFault::BadSparseMap))
    };
    let mut map = SparseMap::new();
    let count = match next(reader)? {
        Ok(count) if count <= MAX_SEGMENTS as u64 => count,
        _ => return Ok(Err(EntryFault::BadSparseMap)),
    };
    for _ in 0..count {
        match (next(reader)?, next(reader)?) {
            (Ok(offset), Ok(length)) => map.push((offset, length)),
            _ => return Ok(Err(EntryFault::BadSparseMap)),
        }
    }
    Ok(Ok((map, taken)))
}

/// Checks that a map ascends, stays within the file and accounts for all stored bytes; drops empty segments.
pub(crate) fn checked(map: SparseMap, real_size: u64, stored: u64) -> Result<SparseMap, EntryFault> {
    let (mut end, mut sum) = (0u64, 0u64);
    for (offset, length) in &map {
        if *offset < end {
            return Err(EntryFault::BadSparseMap);
        }
        end = offset.checked_add(*length).ok_or(EntryFault::BadSparseMap)?;
        sum = sum.checked_add(*length).ok_or(EntryFault::BadSparseMap)?;
    }
    if end > real_size || sum != stored {
        return Err(EntryFault::BadSparseMap);
    }
    Ok(map.into_iter().filter(|(_, length)| *length > 0).collect())
}
