//! Random trees over random layers with deletions, against a model that is a plain map.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::images::archive;
use common::tarball::{E, dir, file, hardlink, symlink, tar, whiteout};
use common::{TestDir, contents, import, merged, options};
use corral_layers::ImportOptions;
use proptest::prelude::*;
use std::collections::BTreeMap;

type Model = BTreeMap<String, (char, Vec<u8>)>;

#[derive(Debug, Clone)]
enum Op {
    File(usize, u8),
    Dir(usize),
    Symlink(usize, u8),
    Hardlink(usize, usize),
    Remove(usize),
    Opaque(usize),
}

/// All paths over three names, three deep.
fn path(n: usize) -> String {
    let names = ["a", "b", "c"];
    match n % 39 {
        n if n < 3 => names[n].to_owned(),
        n if n < 12 => format!("{}/{}", names[(n - 3) / 3], names[n % 3]),
        n => format!("{}/{}/{}", names[(n - 12) / 9], names[(n - 12) / 3 % 3], names[n % 3]),
    }
}

fn ops() -> impl Strategy<Value = Vec<Vec<Op>>> {
    let op = prop_oneof![
        4 => (0usize..39, any::<u8>()).prop_map(|(p, v)| Op::File(p, v)),
        2 => (0usize..39).prop_map(Op::Dir),
        1 => (0usize..39, any::<u8>()).prop_map(|(p, v)| Op::Symlink(p, v)),
        1 => (0usize..39, 0usize..39).prop_map(|(p, t)| Op::Hardlink(p, t)),
        4 => (0usize..39).prop_map(Op::Remove),
        1 => (0usize..39).prop_map(Op::Opaque),
    ];
    prop::collection::vec(prop::collection::vec(op, 1..14), 1..7)
}

fn path_of(link: &E) -> String {
    String::from_utf8(link.link.clone()).unwrap()
}

fn under(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

fn remove(model: &mut Model, path: &str) {
    model.retain(|p, _| p != path && !under(p, path));
}

/// Whether every parent is a directory, or can be made one.
fn parents_fit(model: &Model, path: &str) -> bool {
    path.match_indices('/').all(|(at, _)| model.get(&path[..at]).is_none_or(|n| n.0 == 'd'))
}

fn put(model: &mut Model, path: &str, node: (char, Vec<u8>)) {
    for (at, _) in path.match_indices('/') {
        model.entry(path[..at].to_owned()).or_insert(('d', Vec::new()));
    }
    if node.0 != 'd' || model.get(path).is_some_and(|n| n.0 != 'd') {
        remove(model, path);
    }
    model.insert(path.to_owned(), node);
}

/// Makes layers of the operations, keeping those that are a sound layer, and the tree they must give.
fn play(layers: &[Vec<Op>]) -> (Vec<Vec<u8>>, Model) {
    let mut model = Model::new();
    let mut tars = Vec::new();
    for ops in layers {
        let mut entries: Vec<E> = Vec::new();
        // The tree if the additions stood first: only where that is possible may they.
        let (mut reversed, mut reversible) = (model.clone(), true);
        // Deletions concern layers below, so they come first in the model, wherever they stand in the archive.
        for op in ops {
            match op {
                Op::Remove(n) => {
                    let p = path(*n);
                    if !parents_fit(&model, &p) {
                        continue;
                    }
                    let (d, name) = p.rsplit_once('/').unwrap_or(("", &p));
                    entries.push(whiteout(d, name));
                    remove(&mut model, &p);
                }
                Op::Opaque(n) => {
                    let p = path(*n);
                    if model.get(&p).is_none_or(|n| n.0 == 'd') && parents_fit(&model, &p) {
                        entries.push(whiteout(&p, ".wh..opq"));
                        let existed = model.contains_key(&p);
                        remove(&mut model, &p);
                        if existed {
                            model.insert(p, ('d', Vec::new()));
                        }
                    }
                }
                _ => {}
            }
        }
        let deletions = entries.len();
        for op in ops {
            let (p, node, e) = match op {
                Op::File(n, v) => (path(*n), ('f', vec![*v; 10]), file(path(*n), vec![*v; 10])),
                Op::Dir(n) => (path(*n), ('d', Vec::new()), dir(path(*n))),
                Op::Symlink(n, v) => {
                    (path(*n), ('l', format!("t{v}").into_bytes()), symlink(path(*n), format!("t{v}")))
                }
                Op::Hardlink(n, t) => {
                    let target = path(*t);
                    // Not onto itself, nor onto something that the link's own place would remove.
                    if *n == *t || under(&target, &path(*n)) {
                        continue;
                    }
                    match model.get(&target) {
                        Some(node) if node.0 == 'f' => (path(*n), node.clone(), hardlink(path(*n), target)),
                        _ => continue,
                    }
                }
                Op::Remove(_) | Op::Opaque(_) => continue,
            };
            if parents_fit(&model, &p) {
                reversible &=
                    parents_fit(&reversed, &p) && (e.kind != b'1' || reversed.get(&path_of(&e)) == Some(&node));
                put(&mut reversed, &p, node.clone());
                put(&mut model, &p, node);
                entries.push(e);
            }
        }
        // A deletion may also stand after what replaces it: it must not take that away.
        if reversible && entries.len() % 2 == 1 {
            entries.rotate_left(deletions);
        }
        tars.push(tar(&entries));
    }
    (tars, model)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_split_into_stored_layers_gives_the_model(layers in ops(), run_bytes in prop::sample::select(vec![1u64, 5000, 12_000, 1 << 30])) {
        let d = TestDir::new();
        let store = d.store();
        let (tars, model) = play(&layers);
        let image = import(&store, &archive(&d, "i.tar", &tars), &ImportOptions { run_bytes, ..options() }).unwrap();
        let mut found = contents(&merged(&d, &store, &image).tree());
        found.remove(".");
        prop_assert_eq!(found, model);
    }
}
