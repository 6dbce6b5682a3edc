//! What an import must keep of an image, looked at through real mounts.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::images::{Layout, archive, config, docker_save};
use common::tarball::{E, dir, entry, file, gzip, hardlink, symlink, tar, whiteout, zstd};
use common::{TestDir, contents, import, merged, names, no_collapse, options, store_files};
use corral_api::image::{ImageConfig, ImportProgress, LayerKind};
use corral_layers::{BuildOptions, CancelFlag, ImageSource, ImportOptions, LayerSource, LayerStore};
use std::sync::Mutex;

fn rootfs(d: &TestDir, entries: &[E]) -> ImageSource {
    ImageSource::RootfsTar(d.write("rootfs.tar", &tar(entries)))
}

#[test]
fn metadata_of_every_kind_of_entry_is_kept() {
    let d = TestDir::new();
    let store = d.store();
    let cap = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let long = format!("deep/{}/{}", "n".repeat(120), "m".repeat(250));
    let source = rootfs(
        &d,
        &[
            dir("./").mode(0o750).mtime(7),
            dir("tmp").mode(0o1777).owner(3, 4).mtime(1_500_000_000),
            file("bin/su", "elf").mode(0o4755).xattr("security.capability", cap).mtime(5),
            file("tmp/f", "data").owner(65535, 65534).mode(0o600).pax("mtime", "1234567890.987654321"),
            file("x", "1").xattr("user.k", b"v\0\xff").xattr("trusted.overlay.opaque", "y").xattr("trusted.a", "b"),
            dir("xd").xattr("user.d", "dv"),
            hardlink("tmp/h", "tmp/f"),
            symlink("l", "../../outside").owner(12, 13).mtime(99),
            hardlink("l2", "l"),
            entry(b'6', "pipe").mode(0o622).owner(1, 2),
            file(&long, "pax"),
            file(format!("gnu{long}"), "gnu").gnu(),
            symlink("longlink", "t".repeat(300)).gnu(),
            entry(b'3', "dev/null"),
            entry(b'4', "dev/sub/sda"),
        ],
    );
    let image = import(&store, &source, &options()).unwrap();
    let t = merged(&d, &store, &image).tree();
    assert_eq!((t["."].mode, t["."].mtime.0), (0o750, 7));
    assert_eq!((t["tmp"].mode, t["tmp"].owner, t["tmp"].mtime.0), (0o1777, (3, 4), 1_500_000_000));
    assert_eq!((t["bin/su"].mode, t["bin/su"].mtime), (0o4755, (5, 0)));
    assert_eq!(t["bin/su"].xattrs["security.capability"], cap);
    assert_eq!((t["bin"].mode, t["bin"].owner, t["bin"].mtime.0), (0o755, (0, 0), 0), "implied parent");
    assert_eq!((t["tmp/f"].owner, t["tmp/f"].mode, t["tmp/f"].nlink), ((65535, 65534), 0o600, 2));
    assert_eq!(t["tmp/f"].mtime, (1_234_567_890, 987_654_321));
    assert_eq!(t["tmp/h"], t["tmp/f"]);
    assert_eq!(t["x"].xattrs.len(), 1, "only the user's own: {:?}", t["x"].xattrs);
    assert_eq!(t["x"].xattrs["user.k"], b"v\0\xff");
    assert_eq!(t["xd"].xattrs["user.d"], b"dv");
    assert_eq!(
        (t["l"].data.as_slice(), t["l"].owner, t["l"].mtime.0, t["l"].nlink),
        (&b"../../outside"[..], (12, 13), 99, 2)
    );
    assert_eq!((t["pipe"].kind, t["pipe"].mode, t["pipe"].owner), ('p', 0o622, (1, 2)));
    assert_eq!(t[long.as_str()].data, b"pax");
    assert_eq!(t[format!("gnu{long}").as_str()].data, b"gnu");
    assert_eq!(t["longlink"].data, [b't'; 300]);
    assert!(!t.contains_key("dev/null") && !t.contains_key("dev/sub"), "devices below dev/ are left out");
    assert_eq!(image.layers[0].entries, t.len() as u64 - 1);
}

#[test]
fn layers_give_the_same_tree_whether_collapsed_or_not() {
    let d = TestDir::new();
    let store = d.store();
    let layers = [
        tar(&[
            dir("usr").mode(0o711),
            dir("usr/lib").mode(0o775).owner(5, 6).mtime(50),
            symlink("lib", "usr/lib"),
            symlink("abs", "/usr/lib"),
            file("usr/lib/a", "a1"),
            file("usr/lib/b", "b1"),
            dir("gone"),
            file("gone/x", "x"),
            dir("opq"),
            file("opq/old", "old"),
            file("dir-to-file/f", "f"),
            file("file-to-dir", "f"),
            file("target", "linked").mode(0o640).owner(7, 8),
            symlink("slink", "nowhere"),
            dir("tmp").mode(0o1777),
            file("again/y", "y"),
        ]),
        tar(&[
            // Through links of the image, relative and absolute; the directory's metadata must stay.
            file("lib/c", "c2"),
            file("abs/d", "d2"),
            file("lib/a", "a2"),
            whiteout("lib", "b"),
            whiteout("", "gone"),
            file("opq/new", "new"),
            whiteout("opq", ".wh..opq"),
            file("dir-to-file", "now a file"),
            dir("file-to-dir"),
            file("file-to-dir/inner", "i"),
            hardlink("copy", "target"),
            hardlink("copy-s", "slink"),
            file("tmp/t", "t"),
            whiteout("", "again"),
            whiteout("nothing/here", "at-all"),
            file(".wh..wh.aufs", ""),
        ]),
        tar(&[
            file("again/z", "z"),
            whiteout("", "copy"),
            file("only-3/q", "q"),
            file("usr/lib/b", "b3"),
            file("slink/through", "n").mode(0o600),
        ])
        .into_iter()
        .collect(),
        tar(&[whiteout("only-3", "q"), whiteout("", "file-to-dir"), dir("file-to-dir"), whiteout("tmp", "t")]),
    ];
    // `slink` dangles: a parent that is a dangling link is made where it points, as within a chroot.
    let source = archive(&d, "image.tar", &layers);
    let apart = import(&store, &source, &no_collapse()).unwrap();
    let whole = import(&store, &source, &options()).unwrap();
    assert_eq!((apart.layers.len(), whole.layers.len()), (4, 1));
    let (a, w) = (merged(&d, &store, &apart).tree(), merged(&d, &store, &whole).tree());
    let strip = |t: &common::Tree| {
        let mut t = t.clone();
        // Overlayfs gives copied-up link counts of one layer only, and shows no opaque marks.
        t.values_mut().for_each(|n| n.nlink = 0);
        t
    };
    assert_eq!(strip(&a), strip(&w));
    for t in [&a, &w] {
        assert_eq!((t["usr/lib"].mode, t["usr/lib"].owner, t["usr/lib"].mtime.0), (0o775, (5, 6), 50));
        assert_eq!(
            (t["lib"].kind, t["usr/lib/c"].data.as_slice(), t["usr/lib/d"].data.as_slice()),
            ('l', &b"c2"[..], &b"d2"[..])
        );
        assert_eq!((t["usr/lib/a"].data.as_slice(), t["usr/lib/b"].data.as_slice()), (&b"a2"[..], &b"b3"[..]));
        assert_eq!((t["tmp"].mode, t["usr"].mode), (0o1777, 0o711));
        assert!(!t.contains_key("gone") && !t.contains_key("opq/old") && !t.contains_key("copy"));
        assert_eq!(t["opq/new"].data, b"new");
        assert_eq!((t["dir-to-file"].kind, t["file-to-dir"].kind), ('f', 'd'));
        assert!(!t.contains_key("file-to-dir/inner"));
        assert_eq!(names(t).iter().filter(|n| n.starts_with("again")).collect::<Vec<_>>(), [&"again", &"again/z"]);
        assert_eq!(names(t).iter().filter(|n| n.starts_with("only-3")).collect::<Vec<_>>(), [&"only-3"]);
        assert_eq!((t["target"].mode, t["target"].owner), (0o640, (7, 8)));
        assert_eq!((t["copy-s"].kind, t["copy-s"].data.as_slice()), ('l', &b"nowhere"[..]));
        assert_eq!(t["nowhere/through"].data, b"n");
        assert!(!names(t).iter().any(|n| n.contains(".wh.")));
    }
}

#[test]
fn configuration_platform_and_digest_are_recorded_and_agree() {
    let d = TestDir::new();
    let store = d.store();
    let layers = vec![tar(&[file("a", "1")]), tar(&[])];
    let source = archive(&d, "image.tar", &layers);
    let image = import(&store, &source, &options()).unwrap();
    assert_eq!((image.name.as_str(), image.platform.as_str()), ("test", "linux/amd64"));
    let c = &image.config;
    assert_eq!((c.env["PATH"].as_str(), c.env["EMPTY"].as_str(), c.env["A"].as_str()), ("/bin:/usr/bin", "", "b=c"));
    assert_eq!((c.workdir.as_str(), c.user.as_str(), c.labels["who"].as_str()), ("/work", "1000:100", "me"));
    assert_eq!((c.entrypoint.join(" "), c.cmd.join(" ")), ("/bin/entry".to_owned(), "a b".to_owned()));
    assert_eq!(image.size_bytes, image.layers[0].size_bytes);
    // Another store, another form of the same image: the same digest.
    let other = TestDir::new();
    let form = Layout::image(&config(&layers), &[("+gzip", gzip(&layers[0])), ("+zstd", zstd(&layers[1]))]);
    let source = form.write(&other.join("layout"));
    let again = import(&other.store(), &source, &options()).unwrap();
    assert_eq!(again.digest, image.digest);
    assert!(again.source_digest.unwrap().starts_with("sha256:"));
}

#[test]
fn archives_are_recognised_in_every_form_and_compression() {
    let d = TestDir::new();
    let store = d.store();
    let layers = vec![tar(&[file("a", "1"), dir("e")]), tar(&[file("b", "2")])];
    let saved = docker_save(&config(&layers), &layers);
    let oci = Layout::image(&config(&layers), &[("", layers[0].clone()), ("+gzip", gzip(&layers[1]))]);
    let oci_tar = tar(&oci.entries());
    let gz_layers = docker_save(&config(&layers), &[gzip(&layers[0]), layers[1].clone()]);
    let mut digests = Vec::new();
    for (n, bytes) in
        [saved.clone(), gzip(&saved), zstd(&saved), oci_tar.clone(), gzip(&oci_tar), zstd(&oci_tar), gz_layers]
            .iter()
            .enumerate()
    {
        let source = ImageSource::Archive(d.write(&format!("form-{n}"), bytes));
        digests.push(import(&store, &source, &options()).unwrap().digest);
    }
    digests.push(import(&store, &oci.write(&d.join("layout")), &options()).unwrap().digest);
    digests.dedup();
    assert_eq!(digests.len(), 1);
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn old_docker_archives_with_linked_layers_and_several_images_are_read() {
    let d = TestDir::new();
    let store = d.store();
    let layer = tar(&[file("a", "1")]);
    let c = config(&[layer.clone(), layer.clone()]).to_string();
    let manifest = r#"[{"Config":"c.json","RepoTags":["one:1"],"Layers":["x/layer.tar","y/layer.tar"]},
        {"Config":"c.json","RepoTags":["two:2"],"Layers":["x/layer.tar","x/layer.tar"]}]"#;
    let bytes = tar(&[
        file("x/layer.tar", &layer),
        symlink("y/layer.tar", "../x/layer.tar"),
        file("c.json", c),
        file("manifest.json", manifest),
    ]);
    let source = ImageSource::Archive(d.write("a.tar", &bytes));
    assert!(import(&store, &source, &options()).unwrap_err().to_string().contains("several images"));
    let one = ImportOptions { select: Some("one:1".to_owned()), ..options() };
    assert_eq!(import(&store, &source, &one).unwrap().layers.len(), 1);
}

#[test]
fn a_layout_with_many_platforms_gives_the_one_asked_for() {
    let d = TestDir::new();
    let store = d.store();
    let amd = vec![tar(&[file("arch", "amd64")])];
    let arm = vec![tar(&[file("arch", "arm64")])];
    let mut arm_config = config(&arm);
    arm_config["architecture"] = "arm64".into();
    let mut both = Layout::image(&arm_config, &[("", arm[0].clone())]);
    let other = Layout::image(&config(&amd), &[("", amd[0].clone())]);
    both.index["manifests"][0]["platform"] = serde_json::json!({"os": "linux", "architecture": "arm64"});
    let mut second = other.index["manifests"][0].clone();
    second["platform"] = serde_json::json!({"os": "linux", "architecture": "amd64"});
    both.index["manifests"].as_array_mut().unwrap().push(second);
    both.blobs.extend(other.blobs);
    let source = both.write(&d.join("layout"));
    for arch in ["amd64", "arm64"] {
        let image = import(&store, &source, &ImportOptions { platform: format!("linux/{arch}"), ..options() }).unwrap();
        assert_eq!(image.platform, format!("linux/{arch}"));
        assert_eq!(merged(&d, &store, &image).tree()["arch"].data, arch.as_bytes());
    }
    let none = ImportOptions { platform: "linux/riscv64".to_owned(), ..options() };
    assert!(import(&store, &source, &none).unwrap_err().to_string().contains("riscv64"));
}

#[test]
fn a_hundred_and_twenty_layers_become_few_and_are_reused() {
    let d = TestDir::new();
    let store = d.store();
    let layers: Vec<_> = (0..120)
        .map(|n| {
            let mut entries = vec![file(format!("dir/f{n}"), [n as u8; 40_000]), file("last", n.to_string())];
            if n > 3 {
                entries.push(whiteout("dir", &format!("f{}", n - 3)));
            }
            tar(&entries)
        })
        .collect();
    let source = archive(&d, "image.tar", &layers);
    let small_runs = ImportOptions { run_bytes: 1 << 20, ..options() };
    let image = import(&store, &source, &small_runs).unwrap();
    assert!((4..=6).contains(&image.layers.len()), "{} layers", image.layers.len());
    let tree = merged(&d, &store, &image).tree();
    assert_eq!(tree["last"].data, b"119");
    assert_eq!(names(&tree).len(), 6, "{:?}", names(&tree));

    let marks = |store: &LayerStore| -> Vec<_> {
        image.layers.iter().map(|l| std::fs::metadata(store.dir_of(&l.digest)).unwrap().modified().unwrap()).collect()
    };
    let (before, events) = (marks(&store), Mutex::new(Vec::new()));
    let record = |p: ImportProgress| events.lock().unwrap().push(p);
    let again = store.import_image(&source, &small_runs, &CancelFlag::new(), &record).unwrap();
    assert_eq!((again.clone(), marks(&store)), (image.clone(), before));
    let events = events.into_inner().unwrap();
    assert!(!events.iter().any(|e| matches!(e, ImportProgress::Building { .. })), "{events:?}");
    assert_eq!(events.last(), Some(&ImportProgress::Imported { image: again }));

    // A stored layer that is gone is built again, to the same bytes.
    store.unmount_all().unwrap();
    let lost = image.layers[1].digest;
    store.delete(&lost, &|_| false).unwrap();
    assert_eq!(import(&store, &source, &small_runs).unwrap(), image);
    store.verify(&lost).unwrap();
}

#[test]
fn large_layers_stay_apart_and_what_lies_between_is_collapsed() {
    let d = TestDir::new();
    let store = d.store();
    let small = |n: usize| tar(&[file(format!("small{n}"), n.to_string())]);
    let large = |n: usize| tar(&[file(format!("large{n}"), vec![n as u8; 200_000])]);
    let rule = ImportOptions { run_bytes: 100_000, ..options() };
    let built = Mutex::new(0);
    let count = |p: ImportProgress| *built.lock().unwrap() += usize::from(matches!(p, ImportProgress::Building { .. }));
    let import = |name: &str, layers: &[Vec<u8>]| {
        *built.lock().unwrap() = 0;
        let image = store.import_image(&archive(&d, name, layers), &rule, &CancelFlag::new(), &count).unwrap();
        let tree = merged(&d, &store, &image).tree();
        (image.layers.iter().map(|l| l.digest).collect::<Vec<_>>(), names(&tree).len(), *built.lock().unwrap())
    };
    let (first, entries, made) =
        import("a", &[small(1), small(2), large(3), small(4), small(5), large(6), large(7), small(8)]);
    assert_eq!((first.len(), entries, made), (6, 8, 6), "1+2, 3, 4+5, 6, 7, 8");
    // Another image of the same large layers, with others between: these are stored already.
    let (second, entries, made) = import("b", &[small(1), small(2), large(3), small(9), large(6), large(7)]);
    assert_eq!((second.len(), entries), (5, 6));
    assert_eq!([second[0], second[1], second[3], second[4]], [first[0], first[1], first[3], first[4]]);
    assert_eq!(made, 3, "all above a new layer is looked at, one is new");
    let (_, _, made) = import("b", &[small(1), small(2), large(3), small(9), large(6), large(7)]);
    assert_eq!(made, 0);
    // A run that was ended by a large layer goes on where none follows.
    let (third, _, _) = import("c", &[small(1), small(2)]);
    assert_eq!(third, first[..1]);
    let (fourth, entries, _) = import("d", &[small(1), small(2), small(3)]);
    assert_eq!((fourth.len(), entries), (1, 3));
}

#[test]
fn a_damaged_layer_is_made_again_by_an_import() {
    let d = TestDir::new();
    let store = d.store();
    let source = archive(&d, "image.tar", &[tar(&[file("f", vec![7; 50_000])])]);
    let image = import(&store, &source, &options()).unwrap();
    let data = store.dir_of(&image.layers[0].digest).join("data");
    std::fs::write(&data, vec![8; std::fs::metadata(&data).unwrap().len() as usize]).unwrap();
    assert!(store.verify(&image.layers[0].digest).is_err());
    assert_eq!(import(&store, &source, &options()).unwrap(), image);
    store.verify(&image.layers[0].digest).unwrap();
}

#[test]
fn an_image_of_another_platform_is_refused() {
    let d = TestDir::new();
    let store = d.store();
    let source = archive(&d, "image.tar", &[tar(&[file("f", "1")])]);
    for platform in ["linux/arm64", "bogus", "linux/", "windows/amd64"] {
        let wanted = ImportOptions { platform: platform.to_owned(), ..options() };
        let refused = import(&store, &source, &wanted).unwrap_err().to_string();
        assert!(refused.contains(&format!("no image for platform {platform}: it is for linux/amd64")), "{refused}");
    }
    let variant = ImportOptions { platform: "linux/amd64/v2".to_owned(), ..options() };
    assert_eq!(import(&store, &source, &variant).unwrap().platform, "linux/amd64");
}

#[test]
fn no_image_becomes_many_layers() {
    let d = TestDir::new();
    let store = d.store();
    let layers: Vec<_> = (0..60).map(|n| tar(&[file(format!("f{n}"), vec![n as u8; 30_000])])).collect();
    let rule = ImportOptions { run_bytes: 20_000, ..options() };
    let image = import(&store, &archive(&d, "image.tar", &layers), &rule).unwrap();
    assert!((17..=22).contains(&image.layers.len()), "{} layers", image.layers.len());
    assert_eq!(names(&merged(&d, &store, &image).tree()).len(), 60);
}

#[test]
fn an_equal_layer_twice_in_an_image_is_stacked_once() {
    let d = TestDir::new();
    let store = d.store();
    let one = tar(&[file("d/a", "1"), file("d/k", "k")]);
    let between = tar(&[whiteout("d", "a"), file("d/b", "2"), file("d/k", "changed")]);
    let layers = [tar(&[]), one.clone(), between, one, tar(&[]), tar(&[])];
    let image = import(&store, &archive(&d, "i.tar", &layers), &no_collapse()).unwrap();
    let mut digests: Vec<_> = image.layers.iter().map(|l| l.digest).collect();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), image.layers.len());
    let tree = merged(&d, &store, &image).tree();
    assert_eq!(names(&tree), ["d", "d/a", "d/b", "d/k"]);
    assert_eq!((tree["d/a"].data.as_slice(), tree["d/k"].data.as_slice()), (&b"1"[..], &b"k"[..]));
}

#[test]
fn equal_content_gives_equal_layers_whatever_the_order_of_entries() {
    let d = TestDir::new();
    let store = d.store();
    let mut entries: Vec<E> = (0..60)
        .map(|n| file(format!("d/{n}"), n.to_string()).xattr("user.a", "b").xattr("user.c", n.to_string()))
        .collect();
    let forward = import(&store, &rootfs(&d, &entries), &options()).unwrap();
    entries.reverse();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let other = TestDir::new();
    let backward = import(&other.store(), &rootfs(&other, &entries), &options()).unwrap();
    assert_eq!(forward.layers, backward.layers);
}

#[test]
fn holes_stay_holes_in_every_sparse_form() {
    let d = TestDir::new();
    let store = d.store();
    const REAL: u64 = 64 << 20;
    let data = [b'D'; 1024];
    let field = |v: u64| format!("{v:011o}\0").into_bytes();
    // Old GNU: segments at header offset 386, real size at 483; counted from 345.
    let mut tail = vec![0; 512 - 345];
    for (at, value) in [(41, 512), (53, 512), (65, REAL - 512), (77, 512)] {
        tail[at..at + 12].copy_from_slice(&field(value));
    }
    tail[138..150].copy_from_slice(&field(REAL));
    let map = format!("2\n512\n512\n{}\n512\n", REAL - 512);
    let mut one_zero = map.into_bytes();
    one_zero.resize(512, 0);
    one_zero.extend_from_slice(&data);
    let pax = |name: &str| file(name, data).pax("GNU.sparse.realsize", REAL.to_string());
    let source = rootfs(
        &d,
        &[
            E { kind: b'S', ..file("old", data).tail(tail) },
            pax("GNUSparseFile.0/v01")
                .pax("GNU.sparse.name", "v01")
                .pax("GNU.sparse.map", format!("512,512,{},512", REAL - 512)),
            pax("v00")
                .pax("GNU.sparse.offset", "512")
                .pax("GNU.sparse.numbytes", "512")
                .pax("GNU.sparse.offset", (REAL - 512).to_string())
                .pax("GNU.sparse.numbytes", "512"),
            file("GNUSparseFile.0/v10", one_zero)
                .pax("GNU.sparse.major", "1")
                .pax("GNU.sparse.minor", "0")
                .pax("GNU.sparse.name", "v10")
                .pax("GNU.sparse.realsize", REAL.to_string()),
        ],
    );
    let image = import(&store, &source, &options()).unwrap();
    assert!(image.size_bytes < 2 << 20, "{} bytes for four sparse files", image.size_bytes);
    let t = merged(&d, &store, &image).tree();
    assert_eq!(names(&t), ["old", "v00", "v01", "v10"]);
    for name in names(&t) {
        let bytes = &t[name].data;
        assert_eq!(bytes.len() as u64, REAL, "{name}");
        assert!(bytes[512..1024].iter().all(|b| *b == b'D') && bytes[bytes.len() - 512..].iter().all(|b| *b == b'D'));
        assert_eq!(bytes.iter().filter(|b| **b != 0).count(), 1024, "{name}");
    }
}

#[test]
fn sparse_files_written_by_gnu_tar_are_read() {
    let d = TestDir::new();
    let store = d.store();
    let host = d.join("host");
    std::fs::create_dir(&host).unwrap();
    let mut expected = vec![0; 40 << 20];
    for n in 0..40 {
        expected[(n << 20) + 8192] = n as u8 + 1;
    }
    {
        use std::os::unix::fs::FileExt;
        let f = std::fs::File::create(host.join("sparse")).unwrap();
        f.set_len(expected.len() as u64).unwrap();
        (0..40u64).for_each(|n| f.write_all_at(&[n as u8 + 1], (n << 20) + 8192).unwrap());
    }
    for form in ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1", "posix --sparse-version=1.0"] {
        let path = d.join("sparse.tar");
        let mut tar = std::process::Command::new("tar");
        tar.args(format!("--format={form}").split(' '))
            .args(["-S", "-cf"])
            .arg(&path)
            .arg("-C")
            .arg(&host)
            .arg("sparse");
        common::run(&mut tar);
        assert!(path.metadata().unwrap().len() < 1 << 20);
        let image = import(&store, &ImageSource::RootfsTar(path), &options()).unwrap();
        assert!(merged(&d, &store, &image).tree()["sparse"].data == expected, "{form}");
    }
}

#[test]
fn a_rootfs_directory_is_copied_as_it_is() {
    let d = TestDir::new();
    let store = d.store();
    let host = d.join("host");
    std::fs::create_dir_all(host.join("a/b")).unwrap();
    std::fs::write(host.join("a/f"), "data").unwrap();
    std::fs::write(host.join("a/.wh.literal"), "no whiteout").unwrap();
    std::fs::hard_link(host.join("a/f"), host.join("a/b/h")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", host.join("out")).unwrap();
    std::os::unix::fs::chown(host.join("a/f"), Some(33), Some(44)).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(host.join("sock")).unwrap();
    let config = ImageConfig { user: "u".to_owned(), workdir: "/a".to_owned(), ..ImageConfig::default() };
    let image =
        import(&store, &ImageSource::RootfsDir(host.clone()), &ImportOptions { config: config.clone(), ..options() })
            .unwrap();
    drop(socket);
    assert_eq!(image.config, config);
    let (mut expected, found) = (common::snapshot(&host), merged(&d, &store, &image).tree());
    expected.remove("sock");
    assert_eq!(found, expected);
}

#[test]
fn built_layers_lie_where_asked_and_belong_to_whom_asked() {
    let d = TestDir::new();
    let store = d.store();
    let host = d.join("host");
    std::fs::create_dir_all(host.join("sub")).unwrap();
    std::fs::write(host.join("sub/f"), "data").unwrap();
    std::os::unix::fs::chown(host.join("sub"), Some(11), Some(12)).unwrap();
    let build =
        |source: &LayerSource, options: &BuildOptions| store.build_layer(source, options, &CancelFlag::new(), &|_| {});
    let dir_source = LayerSource::Dir(host.clone());
    let mut wanted = BuildOptions::new(LayerKind::Workspace, "/srv/task");
    let kept = build(&dir_source, &wanted).unwrap();
    wanted.owner = Some((1000, 1001));
    let given = build(&dir_source, &wanted).unwrap();
    assert_eq!((kept.kind, kept.at.as_str()), (LayerKind::Workspace, "/srv/task"));
    let tree = |digest| common::snapshot(&store.ensure_mounted(digest).unwrap());
    let (k, g) = (tree(&kept.digest), tree(&given.digest));
    assert_eq!(names(&k), ["srv", "srv/task", "srv/task/sub", "srv/task/sub/f"]);
    assert_eq!((k["srv"].owner, k["srv"].mode, k["srv/task/sub"].owner), ((0, 0), 0o755, (11, 12)));
    assert_eq!((g["srv"].owner, g["srv/task"].owner, g["srv/task/sub/f"].owner), ((0, 0), (1000, 1001), (1000, 1001)));
    let tarball =
        d.write("t.tar.gz", &gzip(&tar(&[file("sub/f", "data"), hardlink("h", "sub/f"), symlink("s", "/etc")])));
    let tool = build(&LayerSource::Tar(tarball.clone()), &BuildOptions::new(LayerKind::Toolkit, "/opt/tool")).unwrap();
    let t = tree(&tool.digest);
    assert_eq!((t["opt/tool/h"].nlink, t["opt/tool/s"].data.as_slice()), (2, &b"/etc"[..]));
    for bad in ["", "relative", "/a/../b", "/a/", "//a", "/a/./b", "/a\0b"] {
        let error = build(&LayerSource::Tar(tarball.clone()), &BuildOptions::new(LayerKind::Toolkit, bad)).unwrap_err();
        assert_eq!(error.kind(), corral_api::problem::ErrorKind::InvalidRequest, "{bad:?}");
    }
    // A link out of the layer is no link into the image beneath it either.
    let out = d.write("out.tar", &tar(&[hardlink("h", "../f")]));
    let before = store_files(&d);
    build(&LayerSource::Tar(out), &BuildOptions::new(LayerKind::Toolkit, "/opt/tool")).unwrap_err();
    assert_eq!(store_files(&d), before);
    assert_eq!(contents(&k).len(), 5);
}
