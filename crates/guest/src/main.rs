//! `corral-guest`: first process of a container, and worker for file operations. Static: it needs nothing of the image.
#![forbid(unsafe_code)]

fn main() {
    match std::env::args().next().as_deref() {
        Some("init") => corral_guest::init::run(),
        Some("files") => corral_guest::worker::run(),
        _ => std::process::exit(2),
    }
}
