//! Wire types, ids, units, lifecycle rules and error kinds of Corral. No I/O happens here.
#![forbid(unsafe_code)]

pub mod digest;
pub mod image;
pub mod problem;
