//! A sandbox's life, a file per operation.

mod create;
mod pause;
mod stop;

pub use create::AFFINITY_NONE;
