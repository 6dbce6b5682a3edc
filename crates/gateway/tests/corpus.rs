//! The catalogue of a corpus: twenty thousand layers, a hundred thousand environments.
#![allow(missing_docs, clippy::unwrap_used)]

use corral_api::digest::Digest;
use corral_api::environment::EnvironmentSpec;
use corral_api::image::{ImageConfig, ImageRecord, LayerKind, LayerRecord};
use corral_api::sandbox::SandboxSpec;
use corral_gateway::{Catalogue, Page};
use std::collections::HashSet;

const PROJECT: &str = "default";
const BASES: usize = 200;
const TASKS: usize = 19_000;
const ENVIRONMENTS: usize = 100_000;

fn layer(content: &str, kind: LayerKind) -> LayerRecord {
    let at = if kind == LayerKind::Base { "/" } else { "/work" };
    LayerRecord { digest: Digest::of(content.as_bytes()), kind, at: at.into(), size_bytes: 1 << 20, entries: 100 }
}

fn base(number: usize, version: usize) -> ImageRecord {
    let layers = ["system".to_owned(), format!("stack {number}"), format!("stack {number} packages {version}")];
    let layers = layers.iter().map(|l| layer(l, LayerKind::Base)).collect();
    ImageRecord::new(format!("base-{number}"), ImageConfig::default(), layers)
}

/// All keys of a list, from its pages.
fn keys<T>(list: impl Fn(&Page) -> (Vec<T>, Option<String>), key: impl Fn(&T) -> String, limit: u32) -> Vec<String> {
    let (mut found, mut page) = (Vec::new(), Page { limit, ..Page::default() });
    loop {
        let (records, next) = list(&page);
        found.extend(records.iter().map(&key));
        let Some(next) = next else { return found };
        assert_eq!(records.len(), limit as usize, "only the last page is short");
        page.after = next;
    }
}

#[test]
fn a_corpus_is_held_listed_and_upgraded() {
    let catalogue = Catalogue::in_memory().unwrap();
    for number in 0..BASES {
        catalogue.put_image(PROJECT, &base(number, 1)).unwrap();
    }
    let tasks: Vec<LayerRecord> = (0..TASKS).map(|n| layer(&format!("task {n}"), LayerKind::Workspace)).collect();
    for task in &tasks {
        catalogue.put_layer(PROJECT, task).unwrap();
    }
    let toolkits: Vec<LayerRecord> = (0..600).map(|n| layer(&format!("tool {n}"), LayerKind::Toolkit)).collect();
    for toolkit in &toolkits {
        catalogue.put_layer(PROJECT, toolkit).unwrap();
    }
    for number in 0..ENVIRONMENTS {
        let spec = EnvironmentSpec {
            base: format!("base-{}", number % BASES),
            workspaces: vec![tasks[number % TASKS].digest],
            toolkits: vec![toolkits[number % toolkits.len()].digest],
            env: Default::default(),
            workdir: None,
            user: None,
            entrypoint: None,
            cmd: None,
        };
        catalogue.put_environment(PROJECT, &format!("env-{number:06}"), spec).unwrap();
    }

    let layers = keys(
        |page| catalogue.layers(PROJECT, page).map(|l| (l.records, l.next)).unwrap(),
        |l: &LayerRecord| l.digest.to_string(),
        999,
    );
    assert_eq!(layers.len(), 1 + 2 * BASES + TASKS + toolkits.len());
    assert!(layers.len() > 20_000);
    assert!(layers.is_sorted());
    assert_eq!(catalogue.all_layers().unwrap().len(), layers.len());
    let environments = keys(
        |page| catalogue.environments(PROJECT, page).map(|l| (l.records, l.next)).unwrap(),
        |e: &corral_api::environment::EnvironmentRecord| e.name.clone(),
        Page::MOST,
    );
    assert_eq!(environments.len(), ENVIRONMENTS);
    assert_eq!(environments.iter().collect::<HashSet<_>>().len(), ENVIRONMENTS, "each once");

    // A base is upgraded: one layer is new, and every environment on it has it, without being written.
    let of = |number: usize| {
        let spec = SandboxSpec { environment: Some(format!("env-{number:06}")), ..SandboxSpec::default() };
        catalogue.resolve(PROJECT, &spec).unwrap().layers.clone()
    };
    let before = [of(7), of(7 + BASES), of(8)];
    catalogue.put_image(PROJECT, &base(7, 2)).unwrap();
    let after = [of(7), of(7 + BASES), of(8)];
    for (before, after) in before.iter().zip(&after).take(2) {
        let changed: Vec<_> = before.iter().zip(after).filter(|(a, b)| a != b).collect();
        assert_eq!(changed.len(), 1, "{before:?} {after:?}");
    }
    assert_eq!(before[2], after[2], "another base");
    assert_eq!(catalogue.all_layers().unwrap().len(), layers.len() + 1);

    // What is needed cannot go; what nothing needs is told.
    assert!(catalogue.delete_layer(PROJECT, &tasks[5].digest).is_err());
    assert!(catalogue.delete_image(PROJECT, "base-7").is_err());
    let unused = layer("unused", LayerKind::Toolkit);
    catalogue.put_layer(PROJECT, &unused).unwrap();
    catalogue.delete_layer(PROJECT, &unused.digest).unwrap();
    for number in (0..ENVIRONMENTS).filter(|n| n % BASES == 9) {
        catalogue.delete_environment(PROJECT, &format!("env-{number:06}")).unwrap();
    }
    let orphans = catalogue.delete_image(PROJECT, "base-9").unwrap();
    assert_eq!(orphans.len(), 2, "the system is shared");
}
