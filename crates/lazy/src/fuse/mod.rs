//! The kernel's side: requests of a FUSE connection and what is answered.
//!
//! [`wire`] has the bytes, [`device`] the descriptor. Written against `include/uapi/linux/fuse.h`; nothing is cast.

pub(crate) mod device;
pub(crate) mod wire;

pub(crate) use device::Device;

/// Most bytes of one read: 256 pages.
pub(crate) const MAX_READ: usize = 1 << 20;
