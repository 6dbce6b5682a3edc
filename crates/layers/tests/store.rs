//! The store and its mounts: crashes, damage, restarts, deletion.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::tarball::{file, tar};
use common::{TestDir, import, no_collapse, options};
use corral_api::digest::Digest;
use corral_api::image::{LayerKind, LayerRecord};
use corral_api::problem::ErrorKind;
use corral_layers::{ImageSource, LayerStore, LayersConfig, MountError, StoreError};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

fn layer(d: &TestDir, store: &LayerStore, text: &str) -> LayerRecord {
    let source = ImageSource::RootfsTar(d.write("r.tar", &tar(&[file("f", text)])));
    import(store, &source, &options()).unwrap().layers.remove(0)
}

fn damage(path: &PathBuf, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn layers_are_listed_found_and_deleted() {
    let d = TestDir::new();
    let store = d.store();
    let (a, b) = (layer(&d, &store, "a"), layer(&d, &store, "b"));
    let mut both = vec![a.clone(), b.clone()];
    both.sort_by_key(|l| l.digest);
    assert_eq!(store.list().unwrap(), both);
    assert_eq!((store.get(&a.digest).unwrap(), a.kind, a.at.as_str(), a.entries), (a.clone(), LayerKind::Base, "/", 1));
    let file = |name| store.dir_of(&a.digest).join(name);
    assert_eq!(Digest::of(&std::fs::read(file("manifest")).unwrap()), a.digest);
    let size = |name| file(name).metadata().unwrap().len();
    assert_eq!(size("meta") + size("data"), a.size_bytes);

    assert!(matches!(store.delete(&a.digest, &|d| *d == a.digest), Err(StoreError::InUse(_))));
    store.ensure_mounted(&a.digest).unwrap();
    let error = store.delete(&a.digest, &|_| false).unwrap_err();
    assert!(matches!(error, StoreError::Mounted(_)) && error.kind() == ErrorKind::Conflict);
    store.unmount_all().unwrap();
    store.delete(&a.digest, &|_| false).unwrap();
    assert_eq!(store.list().unwrap(), [b]);
    assert!(!store.dir_of(&a.digest).exists());
    for result in [store.get(&a.digest).map(drop), store.delete(&a.digest, &|_| false), store.verify(&a.digest)] {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert!(matches!(store.ensure_mounted(&a.digest), Err(MountError::Store(StoreError::NotFound(_)))));
}

#[test]
fn leftovers_of_a_crash_are_removed_on_open() {
    let d = TestDir::new();
    let store = d.store();
    let kept = layer(&d, &store, "kept");
    drop(store);
    let orphan = Digest::of(b"never published");
    std::fs::create_dir_all(d.join("store/staging/.tmpX/run-0/dir")).unwrap();
    d.write("store/staging/.tmpX/run-0/dir/f", b"x");
    d.write("store/staging/half", b"x");
    let left = d.join(&format!("store/layers/{}", orphan.hex()));
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("manifest"), b"renamed, not yet recorded").unwrap();
    let store = d.store();
    assert!(std::fs::read_dir(d.join("store/staging")).unwrap().next().is_none());
    assert!(!left.exists());
    assert_eq!(store.list().unwrap(), [kept]);
}

#[test]
fn a_second_owner_is_refused() {
    let d = TestDir::new();
    let store = d.store();
    let error = LayerStore::open(d.join("store"), LayersConfig::default()).unwrap_err();
    assert!(matches!(error, StoreError::Locked(_)) && error.kind().is_retryable());
    drop(store);
    d.store();
}

#[test]
fn damage_is_found_before_a_mount_and_by_verify() {
    let d = TestDir::new();
    let store = d.store();
    let one = layer(&d, &store, &"content ".repeat(2000));
    let file = |name| store.dir_of(&one.digest).join(name);
    store.verify(&one.digest).unwrap();
    let mount = || store.ensure_mounted(&one.digest).unwrap_err();
    let restored = |name, harm: &dyn Fn(&PathBuf, &[u8])| {
        let path = file(name);
        let sound = std::fs::read(&path).unwrap();
        harm(&path, &sound);
        let (told, verified) = (mount(), store.verify(&one.digest).unwrap_err());
        assert_eq!((told.kind(), verified.kind()), (ErrorKind::DigestMismatch, ErrorKind::DigestMismatch));
        std::fs::write(&path, &sound).unwrap();
        told.to_string()
    };
    assert!(restored("meta", &|path, _| damage(path, 1024, &[0; 64])).contains("superblock"), "header");
    assert!(restored("meta", &|path, _| damage(path, 1024 + 40, &[0xff; 4])).contains("checksum"), "a bit of it");
    assert!(restored("meta", &|path, _| damage(path, 1400, b"X")).contains("checksum"), "behind the header");
    for name in ["meta", "data", "manifest"] {
        let told = restored(name, &|path, sound| std::fs::write(path, &sound[..sound.len() - 1]).unwrap());
        assert!(told.contains("bytes instead of") || told.contains("digest"), "{name} truncated: {told}");
    }
    assert!(restored("data", &|path, _| damage(path, 100, b"X")).contains("chunk 0"), "content");
    assert!(restored("manifest", &|path, _| damage(path, 70, b"X")).contains("digest"), "the manifest");
    for name in ["meta", "data", "manifest"] {
        assert!(restored(name, &|path, _| std::fs::remove_file(path).unwrap()).contains("missing"), "{name}");
    }

    // A file put back with the right bytes is hashed once and then trusted again.
    store.ensure_mounted(&one.digest).unwrap();
    store.unmount_all().unwrap();
    // A new import mends a damaged layer rather than keep it.
    damage(&file("data"), 100, b"X");
    for chain in std::fs::read_dir(d.join("store/chains")).unwrap() {
        std::fs::remove_file(chain.unwrap().path()).unwrap();
    }
    assert_eq!(layer(&d, &store, &"content ".repeat(2000)), one);
    store.verify(&one.digest).unwrap();
}

#[test]
fn a_damaged_record_is_an_error_and_not_a_layer() {
    let d = TestDir::new();
    let store = d.store();
    let (one, two) = (layer(&d, &store, "1"), layer(&d, &store, "2"));
    let record = d.join(&format!("store/layers/{}.json", one.digest.hex()));
    let text = std::fs::read_to_string(&record).unwrap();
    for bad in [
        text.replace("\"entries\":1", "\"entries\":2"),
        text[..text.len() / 2].to_owned(),
        text.replace("\"version\":1", "\"version\":9"),
    ] {
        std::fs::write(&record, bad).unwrap();
        assert!(matches!(store.get(&one.digest), Err(StoreError::Record { .. })));
        assert_eq!(store.list().unwrap(), std::slice::from_ref(&two));
    }
}

#[test]
fn mounts_are_shared_survive_a_restart_and_are_made_once() {
    let d = TestDir::new();
    let store = d.store();
    let (one, two) = (layer(&d, &store, "1"), layer(&d, &store, "2"));
    let points: Vec<PathBuf> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..8).map(|_| s.spawn(|| store.ensure_mounted(&one.digest).unwrap())).collect();
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let mounts = |point: &PathBuf| {
        let info = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        info.lines().filter(|l| l.split(' ').nth(4) == point.to_str()).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(points.windows(2).all(|p| p[0] == p[1]));
    let lines = mounts(&points[0]);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let options = lines[0].split(' ').nth(5).unwrap();
    assert!(options.contains("ro") && options.contains("nodev") && !options.contains("nosuid"), "{options}");
    assert!(lines[0].contains(" - erofs ") && !lines[0].contains("/dev/loop"), "{}", lines[0]);
    assert_eq!(std::fs::read(points[0].join("f")).unwrap(), b"1");

    store.ensure_mounted(&two.digest).unwrap();
    drop(store);
    // What is still mounted is taken over; what is mounted without a layer is ended.
    std::fs::remove_file(d.join(&format!("store/layers/{}.json", two.digest.hex()))).unwrap();
    let store = d.store();
    assert!(store.is_mounted(&one.digest) && !store.is_mounted(&two.digest));
    assert_eq!(store.ensure_mounted(&one.digest).unwrap(), points[0]);
    assert_eq!(mounts(&points[0]), lines);

    // A clone outlives the mount it was taken of.
    let lower = store.open_lower(&one.digest).unwrap();
    assert!(store.unmount_unused(&|d| *d == one.digest).unwrap().is_empty());
    assert_eq!(store.unmount_unused(&|_| false).unwrap(), [one.digest]);
    assert!(!store.is_mounted(&one.digest) && !points[0].exists());
    let inside = rustix::fs::openat(lower.as_fd(), "f", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(std::io::read_to_string(std::fs::File::from(inside)).unwrap(), "1");
    assert_eq!(store.unmount_all().unwrap(), []);
}

#[test]
fn clones_are_of_the_layer_even_while_it_is_unmounted() {
    let d = TestDir::new();
    let store = d.store();
    let one = layer(&d, &store, "1");
    std::thread::scope(|s| {
        let openers: Vec<_> = (0..3)
            .map(|_| {
                s.spawn(|| {
                    for _ in 0..100 {
                        let lower = store.open_lower(&one.digest).unwrap();
                        rustix::fs::statat(&lower, "f", rustix::fs::AtFlags::empty()).unwrap();
                    }
                })
            })
            .collect();
        while !openers.iter().all(|o| o.is_finished()) {
            store.unmount_all().unwrap();
        }
    });
}

#[test]
fn what_cannot_be_unmounted_is_reported_and_the_rest_unmounted() {
    let d = TestDir::new();
    let store = d.store();
    let (one, two) = (layer(&d, &store, "1"), layer(&d, &store, "2"));
    let busy = std::fs::File::open(store.ensure_mounted(&one.digest).unwrap().join("f")).unwrap();
    store.ensure_mounted(&two.digest).unwrap();
    let failed = store.unmount_all().unwrap_err();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(store.is_mounted(&one.digest) && !store.is_mounted(&two.digest));
    drop(busy);
    assert_eq!(store.unmount_all().unwrap(), [one.digest]);
}

#[test]
fn imports_at_once_share_what_is_equal() {
    let d = TestDir::new();
    let store = d.store();
    let layers = [tar(&[file("a", vec![1; 100_000])]), tar(&[file("b", "2")])];
    let source = common::images::archive(&d, "i.tar", &layers);
    let images: Vec<_> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..4).map(|_| s.spawn(|| import(&store, &source, &no_collapse()).unwrap())).collect();
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    assert!(images.windows(2).all(|i| i[0] == i[1]));
    assert_eq!(store.list().unwrap().len(), 2);
}
