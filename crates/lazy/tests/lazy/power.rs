//! Power cuts: the host died, and the disk has what it has.

use crate::support::*;
use corral_lazy::control::Event;

#[test]
fn after_a_power_cut_nothing_wrong_is_ever_read() {
    within(120, || {
        let site = Site::new();
        let layer = site.layer(files(12, 7));
        let count = layer.manifest.chunks.len();
        let map = |boot: &str, marks: &[u8]| [&corral_format::presence::header(boot)[..], marks].concat();
        let own = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let whole = map("before", &vec![1; count]);
        type Damage = Box<dyn Fn(&Layer)>;
        type Change = Box<dyn Fn(&mut Vec<u8>)>;
        let data = |change: Change| -> Damage {
            Box::new(move |layer| {
                let mut data = layer.data();
                change(&mut data);
                std::fs::write(layer.dir.join("data"), data).unwrap();
            })
        };
        let (length, own_map) = (layer.manifest.data_len as usize, map(&own, &vec![1; count]));
        let cases: Vec<(&str, Option<Vec<u8>>, Damage, bool)> = vec![
            ("all is well", Some(whole.clone()), data(Box::new(|_| {})), true),
            ("a zeroed range", Some(whole.clone()), data(Box::new(|d| d[300_000..900_000].fill(0))), false),
            ("one wrong bit", Some(whole.clone()), data(Box::new(|d| d[1_000_000] ^= 4)), false),
            ("garbage in the padding", Some(whole.clone()), data(Box::new(|d| *d.last_mut().unwrap() = 9)), false),
            ("cut data", Some(whole.clone()), data(Box::new(|d| d.truncate(2_000_001))), false),
            ("cut data under this boot", Some(own_map), data(Box::new(|d| d.truncate(2_000_001))), false),
            ("no data", Some(whole.clone()), Box::new(|l| std::fs::remove_file(l.dir.join("data")).unwrap()), false),
            ("a cut map", Some(whole[..30].to_vec()), data(Box::new(|_| {})), false),
            ("an empty map", Some(vec![]), data(Box::new(|d| d[..5_000_000].fill(7))), false),
            ("a map of garbage", Some(noise(16 + count, 3)), data(Box::new(|d| d[4_000_000..].fill(7))), false),
            ("marks of garbage", Some(map("before", &noise(count, 4))), data(Box::new(|d| d.fill(1))), false),
            (
                "no map, but holes",
                None,
                Box::new(move |l| {
                    std::fs::File::create(l.dir.join("data")).unwrap().set_len(length as u64).unwrap();
                }),
                false,
            ),
        ];
        for (name, present, damage, is_sound) in cases {
            layer.empty();
            damage(&layer);
            match &present {
                Some(bytes) => std::fs::write(layer.dir.join("present"), bytes).unwrap(),
                None => std::fs::remove_file(layer.dir.join("present")).unwrap(),
            }
            let inside = Inside::start(&site, |_| {});
            let mounted = Mounted::new(&site, &layer, true);
            assert!(mounted.read("f000").unwrap() == layer.files["f000"], "{name}");
            mounted.check(&layer);
            let stats = of(&inside, &layer);
            assert_eq!(stats.reads.errors, 0, "{name}");
            assert_eq!(stats.reads.fetched_stored_bytes == 0, is_sound, "{name}: {stats:?}");
            until(name, || !layer.dir.join("present").exists());
            drop(mounted);
            drop(inside);
            assert!(std::fs::read(layer.dir.join("data")).unwrap() == layer.data(), "{name}");
        }
    });
}

#[test]
fn what_was_checked_under_another_boot_is_not_checked_again() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(6, 8));
        let marks = vec![1; layer.manifest.chunks.len()];
        layer.fill(&[&corral_format::presence::header("first")[..], &marks].concat());
        let boot = |boot: &str| {
            let boot = boot.to_owned();
            Inside::start(&site, |config| config.boot_id = Some(boot))
        };
        let inside = boot("second");
        assert!(Mounted::new(&site, &layer, true).read("f001").unwrap() == layer.files["f001"]);
        let known = of(&inside, &layer).chunks_present;
        assert_eq!((known, inside.faults.counts().gets), (1, 0));
        drop(inside);
        let inside = boot("second");
        assert!(Mounted::new(&site, &layer, true).read("f001").unwrap() == layer.files["f001"]);
        let stats = of(&inside, &layer);
        assert_eq!((stats.chunks_present, stats.reads.misses), (1, 0), "it counts at once");
        drop(inside);
        let inside = boot("third");
        Mounted::new(&site, &layer, true).check(&layer);
        assert_eq!(inside.faults.counts().gets, 0);
    });
}

#[test]
fn a_layer_that_was_nearly_finished_is_finished_by_the_next_server() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(3, 8));
        let own = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let marks = vec![1; layer.manifest.chunks.len()];
        layer.fill(&[&corral_format::presence::header(&own)[..], &marks].concat());
        let inside = Inside::start(&site, |_| {});
        assert!(Mounted::new(&site, &layer, true).read("f000").unwrap() == layer.files["f000"]);
        events_until(&inside.socket, |event| matches!(event, Event::Complete { .. }));
        assert!(!layer.dir.join("present").exists());
    });
}
