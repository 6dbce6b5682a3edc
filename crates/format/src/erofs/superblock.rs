//! The superblock and the slot of the data device behind it.
//!
//! At byte 1024: magic at 0, checksum at 4, features at 8, block size bits at 12, number of the root at 14, of inodes at
//! 16, of blocks at 36, incompatible features at 80, devices at 86 and their slot at 88. The checksum is CRC-32C without
//! final inversion over the rest of the first block with the checksum zero.

use super::{SUPER_BYTES, SUPER_OFFSET};
use crate::BLOCK;

const MAGIC: u32 = 0xE0F5_E1E2;
/// The superblock has a checksum; inodes have times of their own.
const COMPATIBLE: u32 = 1 | 2;
/// Chunk tables; a table of devices.
const INCOMPATIBLE: u32 = 4 | 8;
/// Block number within a device slot: number of blocks.
const SLOT_BLOCKS: usize = 64;

/// What differs from image to image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Super {
    pub(crate) blocks: u32,
    pub(crate) data_blocks: u32,
    pub(crate) inodes: u64,
    pub(crate) root: u64,
}

/// Writes the superblock into an image that is otherwise complete.
pub(crate) fn put(image: &mut [u8], sizes: &Super) {
    let (from, to) = (SUPER_OFFSET as usize, BLOCK as usize);
    let block = &mut image[from..to];
    let mut at = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    at(0, &MAGIC.to_le_bytes());
    at(8, &COMPATIBLE.to_le_bytes());
    at(12, &[BLOCK.ilog2() as u8]);
    // The root is the first inode, so that its number fits.
    at(14, &(sizes.root as u16).to_le_bytes());
    at(16, &sizes.inodes.to_le_bytes());
    at(36, &sizes.blocks.to_le_bytes());
    at(80, &INCOMPATIBLE.to_le_bytes());
    at(86, &1_u16.to_le_bytes());
    let slot = SUPER_OFFSET + SUPER_BYTES;
    at(88, &((slot / SUPER_BYTES) as u16).to_le_bytes());
    at(SUPER_BYTES as usize + SLOT_BLOCKS, &sizes.data_blocks.to_le_bytes());
    let sum = checksum(block);
    block[4..8].copy_from_slice(&sum.to_le_bytes());
}

fn le32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn checksum(block: &[u8]) -> u32 {
    let crc = |crc: u32, byte: u8| {
        (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
    };
    block.iter().enumerate().fold(!0, |sum, (at, byte)| crc(sum, if (4..8).contains(&at) { 0 } else { *byte }))
}

/// Says what is wrong with the first block of an image of `len` bytes, if anything is.
///
/// # Errors
/// What a person is told.
pub fn check(first_block: &[u8], len: u64) -> Result<(), &'static str> {
    let block = first_block.get(SUPER_OFFSET as usize..BLOCK as usize).ok_or("shorter than a superblock")?;
    if le32(block, 0) != MAGIC {
        return Err("no EROFS superblock");
    }
    if le32(block, 4) != checksum(block) {
        return Err("superblock checksum is wrong");
    }
    if len < u64::from(le32(block, 36)) * BLOCK { Err("shorter than its superblock says") } else { Ok(()) }
}

/// How many inodes an image says that it has; 0 where it is none.
pub fn inodes(image: &[u8]) -> u64 {
    let at = SUPER_OFFSET as usize + 16;
    let Some(bytes) = image.get(at..).and_then(|b| b.first_chunk::<8>()) else { return 0 };
    u64::from_le_bytes(*bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_block_is_found() {
        let mut image = vec![0; 2 * BLOCK as usize];
        put(&mut image, &Super { blocks: 2, data_blocks: 7, inodes: 1, root: 40 });
        let check_all = |image: &[u8]| check(&image[..BLOCK as usize], image.len() as u64);
        assert_eq!(check_all(&image), Ok(()));
        assert_eq!((inodes(&image), inodes(&[])), (1, 0));
        assert_eq!(check_all(&image[..BLOCK as usize]), Err("shorter than its superblock says"));
        assert_eq!(check(&image[..100], 100), Err("shorter than a superblock"));
        image[2000] ^= 1;
        assert_eq!(check_all(&image), Err("superblock checksum is wrong"));
        image[1024] ^= 1;
        assert_eq!(check_all(&image), Err("no EROFS superblock"));
    }
}
