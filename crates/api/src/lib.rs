//! Wire types, ids, units, lifecycle rules and error kinds of Corral. No I/O happens here.
#![forbid(unsafe_code)]

pub mod build;
pub mod catalogue;
pub mod command;
pub mod digest;
pub mod environment;
pub mod files;
pub mod ids;
pub mod image;
pub mod node;
pub mod problem;
pub mod query;
pub mod sandbox;
pub mod text;
