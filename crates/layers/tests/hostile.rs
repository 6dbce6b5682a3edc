//! Archives made to do harm: each is refused with an error that names the entry, and nothing stays behind.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::images::{Layout, archive, config, docker_save};
use common::tarball::{E, append, dir, entry, file, gzip, hardlink, symlink, tar, whiteout, zstd};
use common::{TestDir, contents, import, merged, no_collapse, options, store_files};
use corral_api::digest::Digest;
use corral_api::problem::ErrorKind;
use corral_layers::{
    BuildOptions, CancelFlag, EntryFault, ImageSource, ImportError, ImportOptions, LayerSource, Limits,
};
use serde_json::{Value, json};

/// Imports what must fail, and sees that the store is as it was.
fn refused_with(d: &TestDir, source: &ImageSource, options: &ImportOptions) -> ImportError {
    let store = d.store();
    let before = store_files(d);
    let error = import(&store, source, options).unwrap_err();
    assert_eq!(store_files(d), before, "{error}");
    error
}

fn refused(d: &TestDir, source: &ImageSource) -> ImportError {
    refused_with(d, source, &options())
}

/// The entry and fault of a refused layer, as an image's layer and as a rootfs alike.
fn fault(entries: &[E]) -> (String, EntryFault) {
    let d = TestDir::new();
    let bytes = tar(entries);
    let as_rootfs = refused(&d, &ImageSource::RootfsTar(d.write("r.tar", &bytes)));
    assert_eq!(as_rootfs.kind(), ErrorKind::InvalidImage);
    match refused(&d, &archive(&d, "i.tar", &[tar(&[]), bytes])) {
        ImportError::Entry { entry, fault, source_name } => {
            assert!(source_name.contains("layer 1"), "{source_name}");
            (entry, fault)
        }
        other => panic!("{other:?}"),
    }
}

macro_rules! assert_fault {
    ($entries:expr, $name:expr, $pattern:pat) => {
        let (entry, fault) = fault(&$entries);
        assert!(matches!(fault, $pattern), "{entry}: {fault:?}");
        assert!(entry.starts_with($name), "{entry:?}");
    };
}

#[test]
fn names_that_lead_out_are_refused() {
    assert_fault!([file("../evil", "x")], "../evil", EntryFault::ParentComponent);
    assert_fault!([file("a/../../evil", "x")], "a/../../evil", EntryFault::ParentComponent);
    assert_fault!([dir("..")], "..", EntryFault::ParentComponent);
    assert_fault!([file("/etc/evil", "x")], "/etc/evil", EntryFault::AbsoluteName);
    assert_fault!([file("a", "x").pax("path", "/etc/evil")], "/etc/evil", EntryFault::AbsoluteName);
    assert_fault!([file("a", "x").pax("path", "../evil")], "../evil", EntryFault::ParentComponent);
    assert_fault!([file("a", "x").pax("path", "b\0c")], "b\0c", EntryFault::NulInName);
    assert_fault!([file("", "x")], "", EntryFault::EmptyName);
}

#[test]
fn names_beyond_bounds_are_refused() {
    assert_fault!([file("x".repeat(256), "x")], "xxx", EntryFault::NameTooLong);
    assert_fault!([file("x".repeat(256), "x").gnu()], "xxx", EntryFault::NameTooLong);
    assert_fault!([dir("d/".repeat(4097))], "d/d", EntryFault::TooDeep(_));
    assert_fault!(
        [file(format!("{}f", format!("{}/", "y".repeat(200)).repeat(20)), "x")],
        "yyy",
        EntryFault::PathTooLong(_)
    );
    assert_fault!([file("f", "x").pax("SCHILY.xattr.user.a", vec![b'v'; 70_000])], "f", EntryFault::Xattr { .. });
    // A header that claims a gigabyte must not be read into memory.
    assert_fault!([E { size: Some(1 << 30), ..entry(b'x', "pax") }], "pax", EntryFault::BadHeader(_));
    assert_fault!([E { size: Some(1 << 30), ..entry(b'L', "long") }], "long", EntryFault::BadHeader(_));
}

#[test]
fn a_tree_as_deep_as_allowed_is_imported() {
    let d = TestDir::new();
    let store = d.store();
    let source = ImageSource::RootfsTar(d.write("r.tar", &tar(&[file(format!("{}f", "d/".repeat(1023)), "deep")])));
    let image = import(&store, &source, &options()).unwrap();
    assert_eq!(image.layers[0].entries, 1024);
}

#[test]
fn hard_links_that_lead_out_or_nowhere_are_refused() {
    assert_fault!([hardlink("h", "../../etc/passwd")], "h", EntryFault::LinkOutside { .. });
    assert_fault!([hardlink("h", "/etc/passwd")], "h", EntryFault::LinkOutside { .. });
    assert_fault!([hardlink("h", "etc/passwd")], "h", EntryFault::LinkMissing { .. });
    assert_fault!([dir("d"), hardlink("h", "d")], "h", EntryFault::LinkToDirectory { .. });
    assert_fault!([symlink("s", "/etc"), hardlink("h", "s/passwd")], "h", EntryFault::LinkMissing { .. });
    assert_fault!(
        [symlink("s", "../../../../../../../etc"), hardlink("h", "s/passwd")],
        "h",
        EntryFault::LinkMissing { .. }
    );
}

#[test]
fn writes_through_planted_links_stay_inside() {
    let d = TestDir::new();
    let store = d.store();
    let outside = d.join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("victim"), "untouched").unwrap();
    let before = common::snapshot(&outside);
    let target = outside.to_str().unwrap();
    let up = format!("{}{}", "../".repeat(40), target.trim_start_matches('/'));
    let layers = [
        tar(&[
            symlink("abs", target),
            symlink("up", &up),
            symlink("p", "/proc/self/root"),
            file("abs/planted", "1"),
            file("up/planted-2", "2"),
            file("p/planted-3", "3"),
            file("abs/victim", "4").mode(0o4777),
            symlink("leaf", format!("{target}/victim")),
            file("leaf", "5"),
        ]),
        tar(&[
            file("abs/planted-6", "6"),
            whiteout("abs", "victim"),
            whiteout("up", ".wh..opq"),
            file("up/planted-7", "7"),
            symlink("abs", "elsewhere"),
        ]),
    ];
    for options in [options(), no_collapse()] {
        let image = import(&store, &archive(&d, "i.tar", &layers), &options).unwrap();
        let tree = contents(&merged(&d, &store, &image).tree());
        let inside = |name: &str| {
            tree.get(&format!("{}/{name}", target.trim_start_matches('/'))).map(|(_, data)| data.as_slice())
        };
        // What was written through a link lies where the link leads within the image.
        assert_eq!(inside("planted-7"), Some(&b"7"[..]));
        assert_eq!((inside("victim"), inside("planted"), inside("planted-6")), (None, None, Some(&b"6"[..])));
        assert_eq!(tree["proc/self/root/planted-3"].1, b"3");
        assert_eq!(tree["leaf"], ('f', b"5".to_vec()));
        assert_eq!(common::snapshot(&outside), before);
    }
}

#[test]
fn link_loops_and_files_as_parents_are_refused() {
    assert_fault!([symlink("a", "b"), symlink("b", "a"), file("a/x", "x")], "a/x", EntryFault::SymlinkLoop);
    assert_fault!([symlink("a", "a/a/a"), file("a/x", "x")], "a/x", EntryFault::SymlinkLoop);
    assert_fault!([file("a", "x"), file("a/x", "x")], "a/x", EntryFault::NotADirectory);
    assert_fault!([file(".", "x")], ".", EntryFault::ReplacesRoot);
    assert_fault!([symlink("./", "/etc")], "./", EntryFault::ReplacesRoot);
    assert_fault!([symlink("s", "")], "s", EntryFault::BadHeader(_));
}

#[test]
fn a_file_beneath_as_a_parent_is_refused_too() {
    let d = TestDir::new();
    let layers = [tar(&[file("a", "x")]), tar(&[file("a/x", "x")])];
    let store = d.store();
    let error = import(&store, &archive(&d, "i.tar", &layers), &no_collapse()).unwrap_err();
    assert!(matches!(error, ImportError::Entry { fault: EntryFault::NotADirectory, .. }), "{error:?}");
    assert!(std::fs::read_dir(d.join("store/staging")).unwrap().next().is_none());
}

#[test]
fn devices_owners_and_types_without_meaning_are_refused() {
    assert_fault!([entry(b'3', "etc/null")], "etc/null", EntryFault::Device);
    assert_fault!([entry(b'4', "sda")], "sda", EntryFault::Device);
    assert_fault!([entry(b'3', "device/x")], "device/x", EntryFault::Device);
    assert_fault!([symlink("e", "etc"), entry(b'3', "e/dev/x")], "e/dev/x", EntryFault::Device);
    assert_fault!([file("f", "x").owner(65536, 0)], "f", EntryFault::OwnerTooLarge { uid: 65536, gid: 0 });
    assert_fault!([dir("f").pax("gid", "4294967295")], "f", EntryFault::OwnerTooLarge { gid: 4_294_967_295, .. });
    assert_fault!([entry(b'Z', "z")], "z", EntryFault::UnsupportedType('Z'));
    assert_fault!([entry(b'M', "z")], "z", EntryFault::UnsupportedType('M'));
    assert_fault!([file("f", "x").pax("uid", "many")], "f", EntryFault::BadHeader(_));
}

#[test]
fn malformed_whiteouts_are_refused() {
    let d = TestDir::new();
    for name in [".wh.", "a/.wh.", ".wh..", ".wh..."] {
        let error = refused(&d, &archive(&d, "i.tar", &[tar(&[file(name, "")])]));
        assert!(matches!(error, ImportError::Entry { fault: EntryFault::BadWhiteout, .. }), "{name}: {error:?}");
    }
}

#[test]
fn malformed_sparse_maps_are_refused() {
    let sparse = |map: &str, real: &str| file("s", [1; 512]).pax("GNU.sparse.map", map).pax("GNU.sparse.size", real);
    for (map, real) in [
        ("0,100", "4096"),
        ("512,512,0,0", "4096"),
        ("0,512", "100"),
        ("0", "512"),
        ("18446744073709551615,512", "512"),
        ("a,b", "9"),
    ] {
        assert_fault!([sparse(map, real)], "s", EntryFault::BadSparseMap);
    }
    for map in ["", "x\n", "2\n0\n", "99999999999999999999\n", "1\n0\n600\n", "2000000\n"] {
        let mut data = map.as_bytes().to_vec();
        data.resize(1024, 0);
        let e =
            file("s", data).pax("GNU.sparse.major", "1").pax("GNU.sparse.minor", "0").pax("GNU.sparse.realsize", "512");
        assert_fault!([e], "s", EntryFault::BadSparseMap);
    }
}

#[test]
fn bombs_are_stopped_at_the_limits() {
    let d = TestDir::new();
    let limits = Limits { max_unpacked_bytes: 8 << 20, max_entries: 100 };
    let bounded = ImportOptions { limits, ..options() };
    let zeros = tar(&[file("big", vec![0; 32 << 20])]);
    let sparse = tar(&[file("s", [1; 512]).pax("GNU.sparse.map", "0,512").pax("GNU.sparse.size", "1099511627776")]);
    let mut bombs = vec![
        ImageSource::RootfsTar(d.write("plain", &zeros)),
        ImageSource::RootfsTar(d.write("gz", &gzip(&zeros))),
        ImageSource::RootfsTar(d.write("zst", &zstd(&zeros))),
        ImageSource::RootfsTar(d.write("sparse", &sparse)),
        // Zeros after the end of the archive count as well.
        ImageSource::RootfsTar(d.write("tail", &gzip(&[tar(&[]), vec![0; 32 << 20]].concat()))),
        ImageSource::Archive(d.write("whole", &gzip(&docker_save(&config(&[]), std::slice::from_ref(&zeros))))),
        Layout::image(&config(std::slice::from_ref(&zeros)), &[("+gzip", gzip(&zeros))]).write(&d.join("layout")),
    ];
    // Each layer fits, together they do not.
    let half = tar(&[file("half", vec![7; 3 << 20])]);
    bombs.push(archive(&d, "three", &[half.clone(), half.clone(), half]));
    for bomb in &bombs {
        let error = refused_with(&d, bomb, &bounded);
        assert!(matches!(error, ImportError::TooLarge { limit, .. } if limit == 8 << 20), "{bomb:?}: {error:?}");
        assert_eq!(error.kind(), ErrorKind::TooLarge);
    }
    let many: Vec<E> = (0..101).map(|n| file(format!("f{n}"), "")).collect();
    let implied: Vec<E> = (0..3).map(|n| file(format!("{n}/{}f", "d/".repeat(50)), "")).collect();
    for entries in [many, implied] {
        let error = refused_with(&d, &ImageSource::RootfsTar(d.write("many", &tar(&entries))), &bounded);
        assert!(matches!(error, ImportError::TooManyEntries { limit: 100, .. }), "{error:?}");
    }
}

#[test]
fn truncated_streams_are_refused_wherever_they_end() {
    let d = TestDir::new();
    let whole = tar(&[file("a", [1; 3000]), file("b", [2; 3000])]);
    for cut in [100, 600, 4000, 4096, whole.len() - 1024] {
        for bytes in [whole[..cut].to_vec(), gzip(&whole[..cut])] {
            let error = refused(&d, &ImageSource::RootfsTar(d.write("cut", &bytes)));
            assert!(matches!(error, ImportError::Truncated { .. }), "{cut}: {error:?}");
        }
    }
    for packed in [gzip(&whole), zstd(&whole)] {
        let error = refused(&d, &ImageSource::RootfsTar(d.write("cut", &packed[..packed.len() / 2])));
        assert!(matches!(error, ImportError::Truncated { .. }), "{error:?}");
    }
    let saved = docker_save(&config(std::slice::from_ref(&whole)), std::slice::from_ref(&whole));
    let error = refused(&d, &ImageSource::Archive(d.write("cut", &saved[..saved.len() / 2])));
    assert!(matches!(error, ImportError::Truncated { .. }), "{error:?}");
    let mut garbled = gzip(&whole);
    let middle = garbled.len() / 2;
    garbled[middle..middle + 8].fill(0xff);
    let error = refused(&d, &ImageSource::RootfsTar(d.write("bad", &garbled)));
    assert_eq!(error.kind(), ErrorKind::InvalidImage, "{error:?}");
    let error = refused(&d, &ImageSource::RootfsTar(d.write("bad", &[b'x'; 4096])));
    assert!(matches!(error, ImportError::UnknownFormat { .. }), "{error:?}");
    let error = refused(&d, &ImageSource::RootfsTar(d.write("empty", b"")));
    assert!(error.to_string().ends_with("it is empty"), "{error}");
    for source in [
        ImageSource::RootfsTar(d.join("absent")),
        ImageSource::Archive(d.join("absent")),
        ImageSource::OciLayout(d.join("absent")),
        ImageSource::RootfsDir(d.join("absent")),
        ImageSource::RootfsDir(d.join("empty")),
        ImageSource::RootfsTar(d.path().to_owned()),
    ] {
        let error = refused(&d, &source);
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{source:?}: {error:?}");
    }
}

#[test]
fn wrong_digests_and_sizes_are_refused() {
    let d = TestDir::new();
    let (layer, other) = (tar(&[file("a", "1")]), tar(&[file("a", "2")]));
    // diff id of other content
    let error = refused(
        &d,
        &ImageSource::Archive(
            d.write("i", &docker_save(&config(std::slice::from_ref(&other)), std::slice::from_ref(&layer))),
        ),
    );
    assert!(
        matches!(&error, ImportError::DigestMismatch { expected, .. } if *expected == Digest::of(&other)),
        "{error:?}"
    );
    assert_eq!(error.kind(), ErrorKind::DigestMismatch);
    // blob with other content: of the same length, longer, shorter, not even gzip
    let packed = gzip(&layer);
    let blob = format!("layout/blobs/sha256/{}", Digest::of(&packed).hex());
    let source =
        Layout::image(&config(std::slice::from_ref(&layer)), &[("+gzip", packed.clone())]).write(&d.join("layout"));
    let mut same_length = gzip(&other);
    same_length.resize(packed.len(), 0);
    for bytes in [same_length, vec![b'x'; packed.len()]] {
        d.write(&blob, &bytes);
        let error = refused(&d, &source);
        assert!(matches!(error, ImportError::DigestMismatch { .. }), "{error:?}");
    }
    for bytes in [[packed.clone(), vec![0; 9]].concat(), packed[..packed.len() - 9].to_vec()] {
        d.write(&blob, &bytes);
        let error = refused(&d, &source);
        assert!(matches!(error, ImportError::SizeMismatch { .. }), "{error:?}");
    }
    // configuration or manifest changed
    d.write(&blob, &packed);
    import(&d.store(), &source, &options()).unwrap();
    let changed = config(&[layer]).to_string().replace("/work", "/warp");
    let config_blob = format!("layout/blobs/sha256/{}", Digest::of(changed.replace("/warp", "/work").as_bytes()).hex());
    d.write(&config_blob, changed.as_bytes());
    let error = refused(&d, &source);
    assert!(matches!(error, ImportError::DigestMismatch { .. }), "{error:?}");
    std::fs::remove_file(d.join(&config_blob)).unwrap();
    assert!(refused(&d, &source).to_string().contains("is missing"));
    std::os::unix::fs::symlink("/etc/passwd", d.join(&config_blob)).unwrap();
    refused(&d, &source);
}

#[test]
fn malformed_documents_and_unknown_types_are_refused() {
    let d = TestDir::new();
    let layer = tar(&[file("a", "1")]);
    let index = |manifest: &Value, kind: &str| -> (Vec<u8>, Vec<E>) {
        let bytes = manifest.to_string().into_bytes();
        let c = config(std::slice::from_ref(&layer)).to_string();
        let index = json!({"schemaVersion": 2, "manifests": [{"mediaType": kind, "digest": Digest::of(&bytes), "size": bytes.len()}]});
        let blobs = [bytes.clone(), layer.clone(), c.into_bytes()];
        let mut entries: Vec<E> =
            blobs.iter().map(|b| file(format!("blobs/sha256/{}", Digest::of(b).hex()), b)).collect();
        entries.push(file("oci-layout", "{}"));
        entries.push(file("index.json", index.to_string()));
        (bytes, entries)
    };
    const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    let c = config(std::slice::from_ref(&layer)).to_string().into_bytes();
    let good = json!({
        "schemaVersion": 2,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": Digest::of(&c), "size": c.len()},
        "layers": [{"mediaType": common::images::OCI_LAYER, "digest": Digest::of(&layer), "size": layer.len()}],
    });
    let source =
        |manifest: &Value, kind: &str| ImageSource::Archive(d.write("oci.tar", &tar(&index(manifest, kind).1)));
    let with = |pointer: &str, value: Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        changed
    };
    for (manifest, kind) in [
        (with("/layers/0/mediaType", "application/x-squashfs".into()), MANIFEST),
        (with("/config/mediaType", "application/vnd.cncf.helm.config.v1+json".into()), MANIFEST),
        (good.clone(), "application/vnd.docker.distribution.manifest.v1+json"),
    ] {
        let error = refused(&d, &source(&manifest, kind));
        assert!(matches!(error, ImportError::MediaType { .. }), "{error:?}");
    }
    for manifest in [
        json!([]),
        json!({"schemaVersion": 2}),
        with("/schemaVersion", 1.into()),
        with("/layers/0/digest", "md5:00".into()),
        with("/layers/0/digest", "sha256:../../../../etc/passwd".into()),
        with("/layers/0/size", (-1).into()),
        with("/layers", json!([good["layers"][0], good["layers"][0]])),
    ] {
        let error = refused(&d, &source(&manifest, MANIFEST));
        assert!(matches!(error, ImportError::Manifest { .. }), "{manifest}: {error:?}");
    }
    import(&d.store(), &source(&good, MANIFEST), &options()).unwrap();
    for text in ["", "{", "[]", "null", r#"[{"Config":"c","Layers":["../../etc/passwd"]}]"#, r#"[{"Layers":[]}]"#] {
        let error = refused(&d, &ImageSource::Archive(d.write("d.tar", &tar(&[file("manifest.json", text)]))));
        assert!(matches!(error, ImportError::Manifest { .. }), "{text}: {error:?}");
    }
    let error = refused(&d, &ImageSource::Archive(d.write("none", &docker_save(&config(&[]), &[]))));
    assert!(matches!(error, ImportError::NoLayers { .. }), "{error:?}");
    for bytes in [tar(&[file("x", "y")]), tar(&[]), vec![b'?'; 2048]] {
        let error = refused(&d, &ImageSource::Archive(d.write("unknown", &bytes)));
        assert!(matches!(error, ImportError::UnknownFormat { .. }), "{error:?}");
    }
    std::fs::create_dir(d.join("empty")).unwrap();
    let error = refused(&d, &ImageSource::OciLayout(d.join("empty")));
    assert!(matches!(error, ImportError::UnknownFormat { .. }), "{error:?}");
}

#[test]
fn a_cancelled_import_stops_and_leaves_nothing() {
    let d = TestDir::new();
    let store = d.store();
    let mut bytes = Vec::new();
    (0..5000).for_each(|n| append(&mut bytes, &file(format!("f{n}"), [1; 2000])));
    bytes.resize(bytes.len() + 1024, 0);
    let source = archive(&d, "i.tar", &[bytes.clone(), bytes]);
    let before = store_files(&d);
    // Before it begins, while bytes are read, and while the file is built.
    for when in 0..3 {
        let cancel = CancelFlag::new();
        if when == 0 {
            cancel.cancel();
        }
        let watch = |p: corral_api::image::ImportProgress| {
            use corral_api::image::ImportProgress as P;
            if matches!((&p, when), (P::Fetched { .. }, 1) | (P::Building { .. }, 2)) {
                cancel.cancel();
            }
        };
        let error = store.import_image(&source, &options(), &cancel, &watch).unwrap_err();
        assert!(matches!(error, ImportError::Cancelled), "{when}: {error:?}");
        assert_eq!(store_files(&d), before, "{when}");
    }
}

#[test]
fn hostile_build_sources_are_refused() {
    let d = TestDir::new();
    let store = d.store();
    let host = d.join("host");
    std::fs::create_dir(&host).unwrap();
    let before = store_files(&d);
    let build = || {
        store.build_layer(
            &LayerSource::Dir(host.clone()),
            &BuildOptions::new(corral_api::image::LayerKind::Workspace, "/w"),
            &CancelFlag::new(),
            &|_| {},
        )
    };
    std::fs::write(host.join("f"), "x").unwrap();
    std::os::unix::fs::chown(host.join("f"), Some(70_000), None).unwrap();
    let error = build().unwrap_err();
    assert!(matches!(error, ImportError::Entry { fault: EntryFault::OwnerTooLarge { .. }, .. }), "{error:?}");
    std::fs::remove_file(host.join("f")).unwrap();
    let (null, mode) = (rustix::fs::makedev(1, 3), rustix::fs::Mode::from_raw_mode(0o666));
    rustix::fs::mknodat(rustix::fs::CWD, host.join("null"), rustix::fs::FileType::CharacterDevice, mode, null).unwrap();
    let error = build().unwrap_err();
    assert!(matches!(error, ImportError::Entry { fault: EntryFault::Device, .. }), "{error:?}");
    assert_eq!(store_files(&d), before);
}
