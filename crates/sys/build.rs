//! The first process of containers has its own entry point: the C library's must not be linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_INIT").is_some() {
        println!("cargo::rustc-link-arg-bin=corral-init=-nostartfiles");
        println!("cargo::rustc-link-arg-bin=corral-init=-nostdlib");
        println!("cargo::rustc-link-arg-bin=corral-init=-Wl,--build-id=none,-z,norelro,-z,noseparate-code");
        // In the highest 2 MiB, where the stack lies when it is not randomized: one page of each level of the page
        // table serves both. A guard of 1 MiB stays between them.
        println!("cargo::rustc-link-arg-bin=corral-init=-Wl,--image-base=0x7fffffe00000");
    }
}
