//! What an export must keep of an image: all of it, read back by an import.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::images::archive;
use common::tarball::{dir, entry, file, hardlink, symlink, tar, whiteout};
use common::{TestDir, import, merged, no_collapse};
use corral_api::image::ImageRecord;
use corral_api::problem::ErrorKind;
use corral_layers::{CancelFlag, ImageSource, ImportError, LayerStore};

fn exported(store: &LayerStore, image: &ImageRecord) -> Result<Vec<u8>, ImportError> {
    let mut bytes = Vec::new();
    store.export(image, &CancelFlag::new())?.write_to(&mut bytes, &CancelFlag::new())?;
    Ok(bytes)
}

#[test]
fn an_export_is_the_image_again() {
    let d = TestDir::new();
    let store = d.store();
    let cap = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let long = format!("deep/{}/{}", "n".repeat(120), "m".repeat(250));
    let lower = tar(&[
        dir("./").mode(0o750).mtime(7),
        file("bin/su", "elf").mode(0o4755).xattr("security.capability", cap).mtime(5),
        file("tmp/f", "data").owner(65535, 65534).mode(0o600).pax("mtime", "1234567890.987654321"),
        hardlink("tmp/h", "tmp/f"),
        file("x", "1").xattr("user.k", b"v\0\xff"),
        symlink("l", "../../outside").owner(12, 13).mtime(99),
        entry(b'6', "pipe").mode(0o622).owner(1, 2),
        file(&long, "long"),
        symlink("longlink", "t".repeat(300)).gnu(),
        symlink("odd", "//x//y/./z"),
        symlink("top", "/"),
        file("gone/a", "a"),
        file("hidden/b", "b"),
        file("stays/c", vec![7; 100_000]),
    ]);
    let upper = tar(&[
        whiteout("gone", "a"),
        dir("hidden"),
        whiteout("hidden", ".wh..opq"),
        file("hidden/new", ""),
        file("new", "2"),
        file([0xff; 150], "no text").gnu(),
        file(b"caf\xe9", "nor this").gnu(),
    ]);
    let source = archive(&d, "image.tar", &[lower, upper]);
    let image = import(&store, &source, &no_collapse()).unwrap();
    assert_eq!(image.layers.len(), 2);
    let bytes = exported(&store, &image).unwrap();
    assert_eq!(bytes, exported(&store, &image).unwrap(), "equal images give equal archives");
    let again = import(&store, &ImageSource::Archive(d.write("exported.tar", &bytes)), &no_collapse()).unwrap();
    assert_eq!(again.config, image.config);
    assert_eq!(again.layers, image.layers, "down to the layers' digests");
    let tree = merged(&d, &store, &again).tree();
    assert_eq!((&tree["odd"].data[..], &tree["top"].data[..]), (&b"//x//y/./z"[..], &b"/"[..]));
    assert_eq!(tree, merged(&d, &store, &image).tree());
}

#[test]
fn what_an_archive_cannot_say_is_refused() {
    let d = TestDir::new();
    let store = d.store();
    let tree = d.join("tree");
    std::fs::create_dir_all(tree.join("a")).unwrap();
    std::fs::write(tree.join("a/.wh.file"), "a file of this name").unwrap();
    let packed = store.pack_tree(&tree, &corral_layers::Scrub::default(), &CancelFlag::new()).unwrap();
    let image = ImageRecord::new("x".into(), Default::default(), vec![packed.layer]);
    let refused = exported(&store, &image).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidRequest);
    assert!(refused.to_string().contains("/a/.wh.file"), "{refused}");
    std::fs::remove_file(tree.join("a/.wh.file")).unwrap();
    std::fs::write(tree.join("a/f"), "").unwrap();
    rustix::fs::setxattr(tree.join("a/f"), "user.a=b", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    let packed = store.pack_tree(&tree, &corral_layers::Scrub::default(), &CancelFlag::new()).unwrap();
    let odd = ImageRecord::new("x".into(), Default::default(), vec![packed.layer]);
    let refused = exported(&store, &odd).unwrap_err().to_string();
    assert!(refused.contains("user.a=b") && refused.contains("/a/f"), "{refused}");
    let mut absent = image.clone();
    absent.layers[0].digest = corral_api::digest::Digest::of(b"none");
    assert_eq!(exported(&store, &absent).unwrap_err().kind(), ErrorKind::NotFound);
    let cancelled = CancelFlag::new();
    cancelled.cancel();
    assert!(matches!(store.export(&image, &cancelled), Err(ImportError::Cancelled)));
}
