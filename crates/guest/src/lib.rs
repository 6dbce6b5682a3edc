//! What Corral itself runs in a sandbox: the first process of a container, and the worker for file operations.
//!
//! The first process reaps and waits. The worker is started for one request, in the sandbox's mount and user
//! namespaces, its cgroups and with the target user's id, but outside its process namespace; it gets one socket to the
//! node, does the operation and ends. Nothing of the image is run or loaded by either.
#![forbid(unsafe_code)]

mod archive;
mod files;
pub mod init;
mod paths;
pub mod protocol;
mod walk;
mod watch;
pub mod worker;
