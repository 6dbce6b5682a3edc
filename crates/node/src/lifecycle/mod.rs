//! A sandbox's life, a file per operation.

mod checkpoint;
mod create;
mod fork;
mod pause;
mod snapshot;
mod still;
mod stop;

pub use create::AFFINITY_NONE;
