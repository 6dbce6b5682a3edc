//! The EROFS superblock: read for a cheap integrity check, rewritten so that equal content gives equal bytes.
//!
//! Layout from the kernel's `fs/erofs/erofs_fs.h`: at byte 1024, little endian; magic at 0, checksum at 4, features at
//! 8, block size bits at 12, build time (seconds) at 24 and (nanoseconds) at 32, number of blocks at 36. The checksum is
//! CRC-32C without final inversion over the rest of the first block with the checksum field zero.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const OFFSET: u64 = 1024;
const MAGIC: u32 = 0xE0F5_E1E2;
const FEATURE_SB_CHKSUM: u32 = 1;

fn le32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
    })
}

fn read_block(file: &File) -> io::Result<Vec<u8>> {
    let mut block = vec![0; 4096 - OFFSET as usize];
    file.read_exact_at(&mut block, OFFSET)?;
    Ok(block)
}

fn checksum(block: &[u8]) -> u32 {
    let mut copy = block.to_vec();
    copy[4..8].fill(0);
    crc32c(&copy)
}

/// Says what is wrong with the first block of the file, if anything is.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn check(file: &File) -> io::Result<Result<(), &'static str>> {
    let block = match read_block(file) {
        Ok(block) => block,
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(Err("shorter than a superblock")),
        Err(e) => return Err(e),
    };
    if le32(&block, 0) != MAGIC {
        return Ok(Err("no EROFS superblock"));
    }
    if le32(&block, 8) & FEATURE_SB_CHKSUM != 0 && le32(&block, 4) != checksum(&block) {
        return Ok(Err("superblock checksum is wrong"));
    }
    let size = u64::from(le32(&block, 36)) << block[12].min(16);
    if file.metadata()?.len() < size { Ok(Err("shorter than its superblock says")) } else { Ok(Ok(())) }
}

/// Sets the build time to the epoch, leaving the times of files alone (they are kept in extended inodes).
///
/// # Errors
/// The file cannot be read or written, or has no sound superblock.
pub(crate) fn clear_build_time(file: &File) -> io::Result<()> {
    check(file)?.map_err(io::Error::other)?;
    let mut block = read_block(file)?;
    block[24..36].fill(0);
    if le32(&block, 8) & FEATURE_SB_CHKSUM != 0 {
        let sum = checksum(&block);
        block[4..8].copy_from_slice(&sum.to_le_bytes());
    }
    file.write_all_at(&block, OFFSET)
}
