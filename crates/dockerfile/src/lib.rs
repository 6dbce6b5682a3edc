//! Dockerfiles, from text to a plan of steps. No I/O happens here.
//!
//! [`Graph`] is a Dockerfile with its stages and what they stand on; it tells which images are needed. With the
//! configurations of these it becomes a [`Plan`]: the stages that the target needs, every variable expanded, each step
//! with the configuration before and after it. [`select`] finds what `COPY` and `ADD` take, [`Ignore`] is a
//! `.dockerignore` file, and [`key`] names what a step's result depends on.
#![forbid(unsafe_code)]

mod copy;
mod error;
mod expand;
mod glob;
mod graph;
mod heredoc;
mod ignore;
pub mod key;
mod owner;
mod parse;
mod pattern;
mod plan;
mod stage;
mod words;

pub use copy::{EntryKind, Listed, SelectError, Selected, clean, clean_text, select};
pub use error::{DockerfileError, Fault};
pub use graph::{Graph, Options};
pub use ignore::{BadIgnore, Ignore};
pub use owner::{Owner, UnknownOwner, owner};
pub use plan::{Action, Base, CopyFrom, CopySource, CopyStep, Plan, RunStep, StagePlan, Step};
