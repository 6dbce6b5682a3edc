//! What clients are told, and what opens bring about.

use crate::support::*;
use corral_lazy::client::LazyLink;
use corral_lazy::control::{After, Event, EventLine};
use std::time::Duration;

#[test]
fn traces_are_learned_and_bring_what_is_read_first() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(30, 9));
        let reads = ["f003", "f017", "f001", "f009", "f019"];
        // Recorded until the last of them was read.
        let count = reads.map(|name| layer.files[name].len().div_ceil(131_072)).iter().sum();
        let run = |is_known: bool| {
            layer.empty();
            let inside = Inside::start(&site, |config| {
                only_what_is_read(config);
                config.trace_chunks = count;
            });
            let opened = client(&inside.socket, async |link| link.open(layer.id, "pytest").await.unwrap());
            assert_eq!(opened.chunks_total as usize, layer.manifest.chunks.len());
            if is_known {
                let wanted = std::fs::read(site.store().join(format!("layers/{}/traces/pytest", layer.id))).unwrap();
                let wanted = corral_format::trace::unpack(&wanted).unwrap().len() as u64;
                until("what the trace names", || of(&inside, &layer).chunks_present == wanted);
            }
            let mounted = Mounted::new(&site, &layer, true);
            reads.iter().for_each(|name| assert!(mounted.read(name).unwrap() == layer.files[*name]));
            if !is_known {
                let seen = events_until(&inside.socket, |event| matches!(event, Event::TraceWritten { .. }));
                assert!(matches!(&seen.last().unwrap().event, Event::TraceWritten { class, .. } if class == "pytest"));
            }
            of(&inside, &layer)
        };
        let (first, second) = (run(false), run(true));
        println!("misses: {} without a trace, {} with one", first.reads.misses, second.reads.misses);
        assert!(first.reads.misses > 5);
        assert_eq!(second.reads.misses, 0);
        assert!(
            second.reads.trace_stored_bytes > 0
                && second.reads.fetched_stored_bytes == first.reads.fetched_stored_bytes
        );
    });
}

#[test]
fn the_default_class_serves_for_others_and_bad_traces_do_no_harm() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(6, 10));
        let traces = site.store().join(format!("layers/{}/traces", layer.id));
        std::fs::create_dir_all(&traces).unwrap();
        std::fs::write(traces.join("default"), corral_format::trace::pack(&[5, 5, 1, u32::MAX, 9])).unwrap();
        std::fs::write(traces.join("broken"), b"nonsense").unwrap();
        let inside = Inside::start(&site, |_| {});
        client(&inside.socket, async |link| {
            link.open(layer.id, "broken").await.unwrap();
            link.open(layer.id, "other").await.unwrap();
        });
        until("what the trace names", || of(&inside, &layer).chunks_present == 3);
    });
}

#[test]
fn clients_that_speak_nonsense_are_told_so() {
    use std::io::{BufRead, BufReader, Write};
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(1, 15));
        let inside = Inside::start(&site, |_| {});
        let stream = std::os::unix::net::UnixStream::connect(&inside.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut say = |line: &[u8]| {
            (&stream).write_all(line).unwrap();
            let mut answer = String::new();
            reader.read_line(&mut answer).unwrap();
            answer
        };
        let zeroes = "0".repeat(64);
        for (line, code) in [
            ("nonsense".to_owned(), "invalid"),
            ("{}".to_owned(), "invalid"),
            ("[1,2]".to_owned(), "invalid"),
            ("\u{0}\u{1}".to_owned(), "invalid"),
            (r#"{"op":"dance"}"#.to_owned(), "invalid"),
            (r#"{"op":"open","layer":"../x","class":"a"}"#.to_owned(), "invalid"),
            (r#"{"op":"stats","more":1}"#.to_owned(), "invalid"),
            (format!(r#"{{"op":"open","layer":"{zeroes}","class":"a"}}"#), "unknown_layer"),
            (format!(r#"{{"op":"open","layer":"{}","class":"../a"}}"#, layer.id), "invalid"),
            (format!(r#"{{"op":"open","layer":"{}","class":"a/b"}}"#, layer.id), "invalid"),
            (format!(r#"{{"op":"open","layer":"{}","class":""}}"#, layer.id), "invalid"),
            (r#"{"op":"upgrade","program":"/x"}"#.to_owned(), "not_replaced"),
            (r#"{"op":"upgrade","program":"x"}"#.to_owned(), "not_replaced"),
        ] {
            let answer = say(format!("{line}\n").as_bytes());
            assert!(answer.starts_with(&format!(r#"{{"error":{{"code":"{code}""#)), "{line}: {answer}");
        }
        assert!(say(b"{\"op\":\"stats\"}\n").starts_with(r#"{"ok":{"layers""#));
        assert!(say(format!("{{\"op\":\"forget\",\"layer\":\"{zeroes}\"}}\n").as_bytes()).starts_with(r#"{"ok""#));
        // A line without an end: this is the last answer.
        assert!(say(&vec![b'x'; 70_000]).contains("too long"));
        drop(std::os::unix::net::UnixStream::connect(&inside.socket).unwrap());
        Mounted::new(&site, &layer, true).check(&layer);
    });
}

#[test]
fn events_go_on_where_a_client_left_off() {
    within(60, || {
        let site = Site::new();
        let inside = Inside::start(&site, |_| {});
        for n in 0..3 {
            let layer = site.layer(files(1, 20 + n));
            Mounted::new(&site, &layer, true).check(&layer);
            events_until(&inside.socket, |event| matches!(event, Event::Complete { layer: id } if *id == layer.id));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let link = || async { LazyLink::connect(&inside.socket).await.unwrap() };
            let first = link().await.events(None).await.unwrap();
            assert!(!first.gap);
            let after = After { epoch: first.epoch, seq: 2 };
            let mut rest = link().await.events(Some(after)).await.unwrap();
            let EventLine::Event(record) = rest.next().await.unwrap() else { panic!() };
            assert_eq!((record.seq, rest.gap), (3, false));
            let mut other = link().await.events(Some(After { epoch: first.epoch ^ 1, seq: 2 })).await.unwrap();
            let EventLine::Event(record) = other.next().await.unwrap() else { panic!() };
            assert_eq!((record.seq, other.gap), (1, true));
        });
    });
}
