//! What every start of a sandbox or a process needs, made once when the keeper begins.

use crate::filter::Filter;
use crate::setup::Hidden;
use crate::terminals::Terminals;
use corral_sys::fork::SingleThreaded;
use std::os::fd::OwnedFd;

/// What every start needs.
#[derive(Debug)]
pub struct Kit {
    /// Proof that forking is safe.
    pub single: SingleThreaded,
    /// The program of first processes, a sealed memfd.
    pub init: OwnedFd,
    /// The program of file workers, a sealed memfd.
    pub guest: OwnedFd,
    /// The filter of every process.
    pub filter: Filter,
    /// What is hidden on this kernel.
    pub hidden: Hidden,
    /// Which programs these are: digest of the keeper, the first process and the worker.
    pub build: String,
    /// Terminals on first use, where the kernel can.
    pub terminals: Option<Terminals>,
    /// /dev/null, for standard streams.
    pub null: OwnedFd,
    /// Descriptors that only occupy the numbers placed in children.
    pub _reserved: Vec<OwnedFd>,
}
