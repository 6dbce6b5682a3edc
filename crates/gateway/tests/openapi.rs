//! The committed description, the routes and their table agree.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn the_committed_document_is_the_generated_one() {
    let path = root().join("openapi/corral.json");
    let generated = corral_gateway::openapi_document();
    if std::env::var_os("CORRAL_WRITE_OPENAPI").is_some() {
        std::fs::write(&path, generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(committed == generated, "openapi/corral.json is stale: run with CORRAL_WRITE_OPENAPI=1");
}

fn described() -> BTreeSet<String> {
    let document: serde_json::Value = serde_json::from_str(corral_gateway::openapi_document()).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    let mut routes = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            routes.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    routes
}

/// The routes of the first two tables of docs/routes.md.
fn tabled() -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("docs/routes.md")).unwrap();
    let public = text.split("## Between gateway and node").next().unwrap();
    let mut routes = BTreeSet::new();
    let mut prefix = "";
    for line in public.lines() {
        if line.starts_with("## Answered by") {
            prefix = "/v1/sandboxes/{id}";
        }
        let Some(cell) =
            line.strip_prefix("| `").map(|rest| rest.replace("\\|", "/").split(" | ").next().unwrap().to_owned())
        else {
            continue;
        };
        let mut method = String::new();
        for quoted in format!("`{cell}").split('`').skip(1).step_by(2) {
            let (verb, target) = match quoted.split_once(' ') {
                Some((verb, target)) => (verb.to_owned(), target),
                None if quoted.chars().all(|c| c.is_ascii_uppercase()) => (quoted.to_owned(), ""),
                None if quoted.starts_with('/') => (method.clone(), quoted),
                None => continue,
            };
            method.clone_from(&verb);
            let path = target.split('?').next().unwrap();
            match path.split_once('[') {
                Some((base, more)) => {
                    routes.insert(format!("{verb} {prefix}{base}"));
                    routes.insert(format!("{verb} {prefix}{base}{}", more.trim_end_matches(']')));
                }
                None => {
                    routes.insert(format!("{verb} {prefix}{path}"));
                }
            }
        }
    }
    routes
}

#[test]
fn every_documented_route_exists_and_every_route_is_documented() {
    let (described, tabled) = (described(), tabled());
    let missing: Vec<_> = tabled.difference(&described).collect();
    let untold: Vec<_> = described.difference(&tabled).collect();
    assert!(
        missing.is_empty() && untold.is_empty(),
        "not in the router: {missing:?}; not in docs/routes.md: {untold:?}"
    );
}

#[test]
fn operation_ids_are_unique_and_references_resolve() {
    let text = corral_gateway::openapi_document();
    let document: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut ids = BTreeSet::new();
    for item in document["paths"].as_object().unwrap().values() {
        for operation in item.as_object().unwrap().values() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} twice");
        }
    }
    for part in text.split("\"$ref\": \"#").skip(1) {
        let pointer = part.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer} is not defined");
    }
}
