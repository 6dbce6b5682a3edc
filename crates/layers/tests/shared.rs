//! Layers in a shared store: published, adopted, pulled, deduplicated and collected, through faults.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::tarball::{file, tar};
use common::{TestDir, import, options};
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use corral_api::problem::ErrorKind;
use corral_layers::{GcRules, ImageSource, Joined, LayerStore, LayersConfig, MountError, SharedError, SharedLayers};
use corral_store::{Fault, Faults, Faulty, Key, PosixConfig, PosixStore, Store};
use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

type Remote = Arc<Faulty<PosixStore>>;

struct Cluster {
    dir: TestDir,
    remote: Remote,
    faults: Faults,
}

impl Cluster {
    fn new() -> Self {
        let dir = TestDir::new();
        std::fs::create_dir(dir.join("remote")).unwrap();
        let posix = PosixStore::open(PosixConfig::new(dir.join("remote"))).unwrap();
        let faults = Faults::seeded(1);
        Self { remote: Arc::new(Faulty::new(posix, faults.clone())), faults, dir }
    }

    /// A node with a local store of its own.
    fn node(&self, name: &str) -> (LayerStore, SharedLayers) {
        let local = LayerStore::open(self.dir.join(name), LayersConfig::default()).unwrap();
        let shared = SharedLayers::open(local.clone(), self.remote.clone()).unwrap();
        (local, shared)
    }

    fn objects(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut dirs = vec![self.dir.join("remote")];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir).unwrap() {
                let path = entry.unwrap().path();
                if path.file_name().unwrap().to_string_lossy().starts_with('.') {
                    continue;
                }
                if path.is_dir() { dirs.push(path) } else { found.push(self.named(&path)) }
            }
        }
        found.sort();
        found
    }

    fn named(&self, path: &Path) -> String {
        path.strip_prefix(self.dir.join("remote")).unwrap().display().to_string()
    }

    fn bytes(&self) -> u64 {
        self.objects().iter().map(|o| self.dir.join("remote").join(o).metadata().unwrap().len()).sum()
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

fn layer(cluster: &Cluster, local: &LayerStore, name: &str, files: &[(&str, Vec<u8>)]) -> LayerRecord {
    let members: Vec<_> = files.iter().map(|(name, content)| file(name, content.clone())).collect();
    let source = ImageSource::RootfsTar(cluster.dir.write(&format!("{name}.tar"), &tar(&members)));
    import(local, &source, &options()).unwrap().layers.remove(0)
}

fn content(seed: u64) -> Vec<(&'static str, Vec<u8>)> {
    vec![("big", noise(700_000, seed)), ("small", noise(10, seed + 1)), ("text", b"words ".repeat(50_000))]
}

fn all_needed(digests: &[Digest], grace: Duration) -> GcRules {
    GcRules { needed: digests.iter().copied().collect(), grace, dry_run: false, settled: SystemTime::now() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_goes_from_node_to_node() {
    let cluster = Cluster::new();
    let (one, shared_one) = cluster.node("one");
    let made = layer(&cluster, &one, "a", &content(1));
    assert!(!shared_one.is_published(&made.digest).await.unwrap());
    let report = shared_one.publish(&made.digest).await.unwrap();
    assert!(!report.existed && report.shared_bytes == 0, "{report:?}");
    assert!(report.stored_bytes > 700_000 && report.stored_bytes < 900_000, "text shrinks: {report:?}");
    assert!(shared_one.publish(&made.digest).await.unwrap().existed);
    assert_eq!(shared_one.published().await.unwrap(), [made.digest]);

    let (two, shared_two) = cluster.node("two");
    assert!(matches!(two.ensure_mounted(&made.digest), Err(MountError::Store(_))), "not there yet");
    let adopted = shared_two.adopt(&made.digest).await.unwrap();
    assert_eq!((adopted.digest, adopted.size_bytes, adopted.entries), (made.digest, made.size_bytes, made.entries));
    assert!(!two.is_complete(&made.digest).unwrap());
    let read = cluster.faults.counts().read_bytes;
    assert!(read < 100_000, "no data was read: {read}");
    let refused = two.ensure_mounted(&made.digest).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "nothing serves its data: {refused}");
    assert!(matches!(shared_two.publish(&Digest::of(b"?")).await, Err(SharedError::Local(_))));

    shared_two.pull(&made.digest).await.unwrap();
    assert!(two.is_complete(&made.digest).unwrap());
    let (a, b) = (one.ensure_mounted(&made.digest).unwrap(), two.ensure_mounted(&made.digest).unwrap());
    assert_eq!(common::snapshot(&a), common::snapshot(&b));
    let before = cluster.faults.counts();
    shared_two.pull(&made.digest).await.unwrap();
    assert_eq!(cluster.faults.counts(), before, "nothing is fetched twice");
    drop((two, shared_two));
    let (two, _) = cluster.node("two");
    assert!(two.is_complete(&made.digest).unwrap());
    two.verify(&made.digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_has_is_not_stored_again() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let first = layer(&cluster, &one, "a", &content(1));
    shared.publish(&first.digest).await.unwrap();
    let before = cluster.bytes();
    // Another node, which learns of the first layer from the store, with one file changed and names moved.
    let (two, other) = cluster.node("two");
    assert_eq!(other.learn_all().await.unwrap(), 1);
    assert_eq!(other.learn_all().await.unwrap(), 0);
    let mut changed = content(1);
    changed[1].1 = noise(20_000, 99);
    changed[0].0 = "moved/elsewhere";
    let second = layer(&cluster, &two, "b", &changed);
    let report = other.publish(&second.digest).await.unwrap();
    assert_eq!(report.data_bytes - report.shared_bytes, 20_000, "{report:?}");
    assert!(cluster.bytes() - before < 25_000, "{}", cluster.bytes() - before);
    let (three, third) = cluster.node("three");
    third.pull(&second.digest).await.unwrap();
    three.verify(&second.digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_publication_is_not_visible_and_can_be_repeated() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let made = layer(&cluster, &one, "a", &content(1));
    for fails_at in 0..6 {
        let calls = std::iter::repeat_n(Fault::None, fails_at);
        cluster.faults.script(calls.chain([Fault::Fail(corral_store::ErrorKind::Denied)]));
        if shared.publish(&made.digest).await.is_ok() {
            assert!(fails_at >= 4, "{fails_at}");
            break;
        }
        assert!(!cluster.objects().iter().any(|o| o.ends_with("manifest")), "{fails_at}");
        let (_, other) = cluster.node(&format!("other-{fails_at}"));
        let holds_parts = cluster.objects().iter().any(|o| o.starts_with("layers/"));
        match other.adopt(&made.digest).await {
            Err(SharedError::NotFound(_)) => assert!(holds_parts),
            Err(SharedError::Empty { .. }) => assert!(!holds_parts),
            other => panic!("{other:?}"),
        }
    }
    // What is left of the script.
    while shared.is_published(&made.digest).await.is_err() {}
    shared.publish(&made.digest).await.unwrap();
    let (two, other) = cluster.node("two");
    other.pull(&made.digest).await.unwrap();
    two.verify(&made.digest).unwrap();
    assert!(std::fs::read_dir(one.root().join("staging")).unwrap().next().is_none(), "nothing is left in staging");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_publish_one_layer_at_once() {
    let cluster = Cluster::new();
    let nodes: Vec<_> = (0..4).map(|n| cluster.node(&format!("n{n}"))).collect();
    let digests: HashSet<Digest> =
        nodes.iter().enumerate().map(|(n, (l, _))| layer(&cluster, l, &format!("t{n}"), &content(5)).digest).collect();
    assert_eq!(digests.len(), 1, "equal content, equal digest");
    let digest = *digests.iter().next().unwrap();
    let tasks: Vec<_> = nodes
        .iter()
        .map(|(_, shared)| {
            let shared = shared.clone();
            tokio::spawn(async move { shared.publish(&digest).await.unwrap().existed })
        })
        .collect();
    let mut created = 0;
    for task in tasks {
        created += u32::from(!task.await.unwrap());
    }
    assert_eq!(created, 1);
    let (last, shared) = cluster.node("last");
    shared.pull(&digest).await.unwrap();
    last.verify(&digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_in_the_store_is_found_and_never_used() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let made = layer(&cluster, &one, "a", &content(1));
    shared.publish(&made.digest).await.unwrap();
    for (n, object) in cluster.objects().into_iter().enumerate() {
        let path = cluster.dir.join("remote").join(&object);
        let sound = std::fs::read(&path).unwrap();
        for (at, how) in [(sound.len() / 2, "changed"), (sound.len() - 1, "cut")] {
            let mut harmed = sound.clone();
            harmed[at] ^= 0x55;
            harmed.truncate(if how == "cut" { at } else { sound.len() });
            std::fs::write(&path, &harmed).unwrap();
            let (local, other) = cluster.node(&format!("bad-{n}-{how}"));
            let error = other.pull(&made.digest).await.expect_err(&object);
            let kinds = [ErrorKind::DigestMismatch, ErrorKind::UpstreamFailed];
            assert!(kinds.contains(&error.kind()), "{object} {how}: {error:?}");
            assert!(local.is_complete(&made.digest).map_or(true, |complete| !complete));
            std::fs::write(&path, &sound).unwrap();
            other.pull(&made.digest).await.unwrap();
            local.verify(&made.digest).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_partial_layer_is_not_published() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let made = layer(&cluster, &one, "a", &content(1));
    let data = one.dir_of(&made.digest).join("data");
    let harm = |byte: &[u8]| {
        std::fs::File::options().write(true).open(&data).unwrap().write_all_at(byte, 5).unwrap();
    };
    let sound = std::fs::read(&data).unwrap();
    harm(&[sound[5] ^ 1]);
    let error = shared.publish(&made.digest).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DigestMismatch, "{error}");
    assert_eq!(cluster.objects(), Vec::<String>::new());
    harm(&[sound[5]]);
    shared.publish(&made.digest).await.unwrap();
    let (_, other) = cluster.node("two");
    other.adopt(&made.digest).await.unwrap();
    cluster.remote.delete(&Key::parse(format!("layers/{}/manifest", made.digest.hex())).unwrap()).await.unwrap();
    assert!(matches!(other.publish(&made.digest).await, Err(SharedError::Partial(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn gc_removes_what_nothing_needs_after_a_grace_period() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let kept = layer(&cluster, &one, "a", &content(1));
    let mut more = content(1);
    more.push(("own", noise(300_000, 77)));
    let dropped = layer(&cluster, &one, "b", &more);
    for made in [&kept, &dropped] {
        shared.publish(&made.digest).await.unwrap();
    }
    let (hour, none) = (Duration::from_secs(3600), Duration::ZERO);
    let before = cluster.objects();
    let young = shared.gc(&all_needed(&[kept.digest], hour)).await.unwrap();
    assert_eq!((young.layers.len(), young.packs, young.waiting), (0, 0, 1), "{young:?}");
    assert_eq!(cluster.objects(), before);
    let dry = shared.gc(&GcRules { dry_run: true, ..all_needed(&[kept.digest], none) }).await.unwrap();
    assert_eq!((dry.layers.as_slice(), dry.packs), (&[dropped.digest][..], 1), "{dry:?}");
    assert_eq!(cluster.objects(), before, "a dry run changes nothing");
    let done = shared.gc(&all_needed(&[kept.digest], none)).await.unwrap();
    assert_eq!(done, dry);
    assert!(
        matches!(shared.adopt(&dropped.digest).await.map(|l| l.digest), Ok(d) if d == dropped.digest),
        "still here"
    );
    let (two, other) = cluster.node("two");
    assert!(matches!(other.adopt(&dropped.digest).await, Err(SharedError::NotFound(_))));
    other.pull(&kept.digest).await.unwrap();
    two.verify(&kept.digest).unwrap();
    // What was collected is stored again when it is published again.
    let again = shared.publish(&dropped.digest).await.unwrap();
    assert!(again.data_bytes - again.shared_bytes >= 300_000, "{again:?}");
    other.pull(&dropped.digest).await.unwrap();
    two.verify(&dropped.digest).unwrap();
    let all = shared.gc(&all_needed(&[], none)).await.unwrap();
    assert_eq!(all.layers.len(), 2);
    assert_eq!(cluster.objects(), Vec::<String>::new(), "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn packs_that_lost_their_last_layer_wait_for_their_own_grace_period() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let made = layer(&cluster, &one, "a", &content(1));
    shared.publish(&made.digest).await.unwrap();
    for object in cluster.objects().iter().filter(|o| o.starts_with("layers/")) {
        std::fs::remove_file(cluster.dir.join("remote").join(object)).unwrap();
    }
    let rules = all_needed(&[], Duration::from_secs(3600));
    for _ in 0..2 {
        let report = shared.gc(&rules).await.unwrap();
        assert_eq!((report.packs, report.waiting), (0, 1), "{report:?}");
    }
    assert!(cluster.objects().iter().any(|o| o.starts_with("unneeded/")));
    // A publisher refers to it and takes the note away.
    let report = shared.publish(&made.digest).await.unwrap();
    assert_eq!(report.shared_bytes, report.data_bytes);
    assert!(!cluster.objects().iter().any(|o| o.starts_with("unneeded/")));
    let kept = shared.gc(&all_needed(&[made.digest], Duration::ZERO)).await.unwrap();
    assert_eq!((kept.packs, kept.waiting), (0, 0));
    let (two, other) = cluster.node("two");
    other.pull(&made.digest).await.unwrap();
    two.verify(&made.digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_was_published_anew_is_found_where_it_is_now() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let (first, second) = (layer(&cluster, &one, "a", &content(1)), layer(&cluster, &one, "b", &content(1)[..2]));
    shared.publish(&first.digest).await.unwrap();
    let (two, other) = cluster.node("two");
    other.adopt(&first.digest).await.unwrap();
    // Collected; then its chunks come back in packs of another layer and one of its own.
    shared.gc(&all_needed(&[], Duration::ZERO)).await.unwrap();
    assert_eq!(other.pull(&first.digest).await.unwrap_err().kind(), ErrorKind::UpstreamFailed);
    shared.publish(&second.digest).await.unwrap();
    shared.publish(&first.digest).await.unwrap();
    other.pull(&first.digest).await.unwrap();
    two.verify(&first.digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_that_is_gone_is_not_referred_to() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let first = layer(&cluster, &one, "a", &content(1));
    shared.publish(&first.digest).await.unwrap();
    for object in cluster.objects() {
        std::fs::remove_file(cluster.dir.join("remote").join(object)).unwrap();
    }
    let report = shared.publish(&first.digest).await.unwrap();
    assert_eq!(report.shared_bytes, 0, "the index is not believed");
    let (two, other) = cluster.node("two");
    other.pull(&first.digest).await.unwrap();
    two.verify(&first.digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_can_be_had_again_is_known_and_given_up_where_nobody_uses_it() {
    let cluster = Cluster::new();
    let (local, shared) = cluster.node("one");
    let (older, newer) = (layer(&cluster, &local, "a", &content(1)), layer(&cluster, &local, "b", &content(2)));
    assert_eq!(local.cached().unwrap(), [], "nobody else has it");
    for made in [&older, &newer] {
        shared.publish(&made.digest).await.unwrap();
    }
    let cached = |digest: Digest| local.cached().unwrap().into_iter().find(|c| c.digest == digest).unwrap();
    assert!(cached(older.digest).bytes >= 700_000);
    let before = cached(newer.digest).used;
    local.note_use([&newer.digest, &Digest::of(b"?")]);
    assert!(cached(newer.digest).used > before.max(cached(older.digest).used));

    let point = local.ensure_mounted(&older.digest).unwrap();
    let lower = local.open_lower(&older.digest).unwrap();
    let in_use = |digest: &Digest| *digest == newer.digest;
    assert_eq!(local.give_up(&newer.digest, &in_use, || panic!("it is in use")).unwrap(), None::<()>);
    assert_eq!(local.give_up(&older.digest, &in_use, || local.is_mounted(&older.digest)).unwrap(), Some(false));
    assert!(!point.exists());
    drop(lower);

    let usage = local.usage().unwrap();
    for layer in &usage {
        let stored = layer.stored_bytes.unwrap();
        assert!(stored > 700_000 && stored < layer.size_bytes, "text shrinks: {layer:?}");
        let common = layer.shared_bytes.unwrap();
        assert!(common > 0 && common < 10_000, "both have the text: {layer:?}");
        assert!(layer.cached_bytes >= 700_000 && layer.local_bytes > layer.cached_bytes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_is_alone_until_another_joins() {
    let cluster = Cluster::new();
    let ((_, one), (_, two)) = (cluster.node("one"), cluster.node("two"));
    one.ensure_alone("n1").await.unwrap();
    assert_eq!(one.join("n1").await.unwrap(), Joined::First);
    assert_eq!(one.join("n1").await.unwrap(), Joined::Again);
    one.ensure_alone("n1").await.unwrap();
    two.join("n2").await.unwrap();
    for (shared, own, other) in [(&one, "n1", "n2"), (&two, "n2", "n1")] {
        match shared.ensure_alone(own).await {
            Err(SharedError::Others { users }) => assert_eq!(users, other),
            answer => panic!("{answer:?}"),
        }
    }
    cluster.faults.script([Fault::Fail(corral_store::ErrorKind::Unavailable)]);
    assert!(matches!(one.ensure_alone("n1").await, Err(SharedError::Remote(_))), "not known is not alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_published_or_removed_where_the_mark_of_the_user_is_missing() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let before = layer(&cluster, &one, "a", &content(1));
    assert_eq!(shared.join("n1").await.unwrap(), Joined::First);
    assert_eq!(shared.publish_lacking().await.unwrap(), 1, "what was made before");
    assert_eq!(shared.publish_lacking().await.unwrap(), 0);
    // What a mount that is missing leaves: an empty directory.
    let (remote, away) = (cluster.dir.join("remote"), cluster.dir.join("away"));
    std::fs::create_dir(&away).unwrap();
    let moved = |from: &Path, to: &Path| {
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            std::fs::rename(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    moved(&remote, &away);
    assert_eq!(shared.join("n1").await.unwrap(), Joined::Astray);
    for digest in [before.digest, layer(&cluster, &one, "b", &content(2)).digest] {
        let refused = shared.publish(&digest).await.unwrap_err();
        assert!(matches!(refused, SharedError::Astray { .. }) && refused.kind() == ErrorKind::Unavailable, "{refused}");
    }
    assert!(matches!(shared.ensure_alone("n1").await, Err(SharedError::Astray { .. })));
    assert_eq!(cluster.objects(), Vec::<String>::new());
    // It is back.
    moved(&away, &remote);
    shared.ensure_alone("n1").await.unwrap();
    assert!(shared.publish(&before.digest).await.unwrap().existed);
    // A part of it is missing.
    std::fs::rename(remote.join("packs"), cluster.dir.join("packs")).unwrap();
    let there = cluster.objects();
    let refused = shared.gc(&all_needed(&[], Duration::ZERO)).await.unwrap_err();
    assert!(matches!(refused, SharedError::Hollow { .. }), "{refused}");
    assert_eq!(cluster.objects(), there);
    // It was replaced, and the operator says so.
    moved(&remote, &away);
    std::fs::remove_file(shared.joined_path()).unwrap();
    assert_eq!(shared.join("n1").await.unwrap(), Joined::First);
    assert_eq!(shared.publish_lacking().await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_or_used_beside_a_gc_stays_however_short_the_grace() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    let begun = SystemTime::now();
    let rules = |settled| GcRules { settled, ..all_needed(&[], Duration::ZERO) };
    // Made since, and named by nobody yet.
    let made = layer(&cluster, &one, "a", &content(1));
    shared.publish(&made.digest).await.unwrap();
    let beside = shared.gc(&rules(begun)).await.unwrap();
    assert_eq!((beside.layers.len(), beside.packs, beside.waiting), (0, 0, 1), "{beside:?}");
    // Unneeded for long, and used again: by its whole, or by its chunks.
    let again = SystemTime::now();
    assert_eq!(shared.gc(&GcRules { dry_run: true, ..rules(again) }).await.unwrap().layers, [made.digest]);
    assert!(shared.publish(&made.digest).await.unwrap().existed);
    assert!(shared.gc(&rules(again)).await.unwrap().layers.is_empty());
    let later = SystemTime::now();
    let other = layer(&cluster, &one, "b", &content(1)[..2]);
    assert!(shared.publish(&other.digest).await.unwrap().shared_bytes > 0);
    let done = shared.gc(&rules(later)).await.unwrap();
    assert_eq!((done.layers.as_slice(), done.packs), (&[made.digest][..], 0), "{done:?}");
    let (two, theirs) = cluster.node("two");
    theirs.pull(&other.digest).await.unwrap();
    two.verify(&other.digest).unwrap();
    assert_eq!(shared.gc(&rules(SystemTime::now())).await.unwrap().layers, [other.digest]);
    assert_eq!(cluster.objects(), Vec::<String>::new(), "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn publications_beside_collections_are_whole() {
    let cluster = Cluster::new();
    let (one, shared) = cluster.node("one");
    // Two contents that share chunks: each publication finds what a collection is about to remove.
    let layers = [layer(&cluster, &one, "a", &content(1)), layer(&cluster, &one, "b", &content(1)[..2])];
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    // Since when something may be on its way: what a catalogue that names nothing is told.
    let unsettled = Arc::new(std::sync::Mutex::new(SystemTime::now()));
    let collector = {
        let (shared, stop, unsettled) = (shared.clone(), stop.clone(), unsettled.clone());
        tokio::spawn(async move {
            let mut collected = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let settled = *unsettled.lock().unwrap();
                let rules = GcRules { settled, ..all_needed(&[], Duration::ZERO) };
                collected += shared.gc(&rules).await.unwrap().layers.len();
            }
            collected
        })
    };
    for round in 0..100 {
        *unsettled.lock().unwrap() = SystemTime::now();
        shared.publish(&layers[round % 2].digest).await.unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert!(shared.is_published(&layers[round % 2].digest).await.unwrap(), "round {round}");
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let collected = collector.await.unwrap();
    assert!(collected > 0);
    let settled = SystemTime::now();
    for made in &layers {
        shared.publish(&made.digest).await.unwrap();
    }
    shared.gc(&GcRules { settled, ..all_needed(&[], Duration::ZERO) }).await.unwrap();
    let (two, theirs) = cluster.node("two");
    for made in &layers {
        theirs.pull(&made.digest).await.unwrap();
        two.verify(&made.digest).unwrap();
    }
}
