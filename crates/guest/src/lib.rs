//! The worker for file operations: what Corral itself runs in a sandbox beside the first process.
//!
//! It is started for one request, in the sandbox's mount and user namespaces, its cgroups and with the target user's
//! id, but outside its process namespace; it gets one socket to the node, does the operation and ends. Static: nothing
//! of the image is run or loaded by it.
#![forbid(unsafe_code)]

mod archive;
mod files;
mod made_up;
mod paths;
pub mod patience;
pub mod protocol;
mod trees;
mod walk;
mod watch;
pub mod worker;
