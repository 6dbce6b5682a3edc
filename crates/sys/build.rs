//! The first process of containers has its own entry point: the C library's must not be linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_INIT").is_some() {
        println!("cargo::rustc-link-arg-bin=corral-init=-nostartfiles");
        println!("cargo::rustc-link-arg-bin=corral-init=-nostdlib");
        println!("cargo::rustc-link-arg-bin=corral-init=-Wl,--build-id=none,-z,norelro,-z,noseparate-code");
        // In the stack's 512 GiB, so that both share a page of the page table.
        println!("cargo::rustc-link-arg-bin=corral-init=-Wl,--image-base=0x7f9000000000");
    }
}
