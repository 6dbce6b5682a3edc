//! `corral-guest`: the worker for file operations. The keeper starts it; see the library's page.
#![forbid(unsafe_code)]

fn main() {
    corral_guest::worker::run()
}
