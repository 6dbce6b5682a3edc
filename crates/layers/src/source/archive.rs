//! Archives: what `docker save` writes, or an OCI layout in a tar, recognised by the files in it.

use super::layout::{self, Blobs};
use super::manifest::{self, MAX_DOCUMENT_BYTES};
use super::{Content, OpenedImage, SourceLayer};
use crate::config::{CancelFlag, ImportOptions};
use crate::error::ImportError;
use crate::likeness;
use crate::stream::{self, Codec, Meter, StreamFault};
use crate::tarstream::{MemberKind, TarError, TarReader};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Files in an archive: three for each layer in old forms.
const MAX_FILES: usize = 100_000;

enum Place {
    Data { offset: u64, len: u64 },
    Link(String),
}

struct TarIndex {
    path: PathBuf,
    files: HashMap<String, Place>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Blobs for TarIndex {
    fn find(&self, name: &str) -> Result<Option<Content>, ImportError> {
        let mut name = normal(name);
        // Old forms of `docker save` link equal layers to one another, within the archive.
        for _ in 0..8 {
            match self.files.get(&name) {
                None => return Ok(None),
                Some(Place::Data { offset, len }) => {
                    return Ok(Some(Content::Slice { path: self.path.clone(), offset: *offset, len: *len }));
                }
                Some(Place::Link(target)) => {
                    let dir = name.rsplit_once('/').map_or("", |(dir, _)| dir);
                    name = normal(&format!("{dir}/{target}"));
                }
            }
        }
        Ok(None)
    }
}

/// A name without `.`, `..` and doubled slashes; it is looked up in a map and never opened.
fn normal(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Opens an archive, spooling it to `work` where it is compressed as a whole.
pub(crate) fn open(
    path: &Path,
    options: &ImportOptions,
    work: &Path,
    cancel: &CancelFlag,
) -> Result<OpenedImage, ImportError> {
    let name = options.shown(path);
    let io = |e| ImportError::source(path, e);
    let mut head = [0; 4];
    let read = File::open(path).map_err(io)?.take(4).read(&mut head).map_err(io)?;
    let plain = if Codec::sniff(&head[..read]) == Codec::Plain {
        path.to_owned()
    } else {
        unpack(path, &work.join("archive.tar"), options, cancel)?
    };
    let index = index(&plain, &name)?;
    if index.files.contains_key("oci-layout") && index.files.contains_key("index.json") {
        return layout::open(&index, options, name);
    }
    let Some(saved) = index.find("manifest.json")? else {
        return Err(unknown(&name, "it is a tar archive without manifest.json, and without oci-layout".to_owned()));
    };
    open_saved(&index, &layout::read(&saved, MAX_DOCUMENT_BYTES, &name)?, options, name)
}

fn unknown(name: &str, found: String) -> ImportError {
    ImportError::UnknownFormat { source_name: name.to_owned(), wanted: "a docker archive or an OCI layout", found }
}

fn unpack(path: &Path, target: &Path, options: &ImportOptions, cancel: &CancelFlag) -> Result<PathBuf, ImportError> {
    let name = options.shown(path);
    let raw = File::open(path).map_err(|e| ImportError::io("open", path, e))?;
    let decoded = stream::decode(raw, None).map_err(|e| stream::classify(e, &name))?;
    let (meter, _) = Meter::new(decoded, cancel);
    let mut meter = meter.bounded(options.limits.max_unpacked_bytes, |limit| StreamFault::TooLarge { limit });
    let mut file = File::create_new(target).map_err(|e| ImportError::io("make", target, e))?;
    std::io::copy(&mut meter, &mut file).map_err(|e| stream::classify(e, &name))?;
    Ok(target.to_owned())
}

fn index(path: &Path, name: &str) -> Result<TarIndex, ImportError> {
    let file = File::open(path).map_err(|e| ImportError::io("open", path, e))?;
    let size = file.metadata().map_err(|e| ImportError::io("open", path, e))?.len();
    let mut tar = TarReader::new(BufReader::with_capacity(1 << 20, file));
    let mut files = HashMap::new();
    loop {
        let member = match tar.next_member() {
            Ok(Some(member)) => member,
            Ok(None) => break,
            Err(TarError::Io(e)) => return Err(stream::classify(e, name)),
            Err(TarError::NoHeader(head)) if files.is_empty() => return Err(unknown(name, likeness::of(&head))),
            Err(TarError::NoHeader(_)) => {
                return Err(ImportError::Corrupt {
                    source_name: name.to_owned(),
                    reason: "not a tar header".to_owned(),
                });
            }
            Err(TarError::Fault { name: entry, fault }) => {
                let entry = crate::paths::display(&entry);
                return Err(ImportError::Entry { source_name: name.to_owned(), entry, fault });
            }
        };
        if files.len() >= MAX_FILES {
            return Err(ImportError::TooManyEntries { source_name: name.to_owned(), limit: MAX_FILES as u64 });
        }
        let file_name = normal(&String::from_utf8_lossy(&member.name));
        let place = match member.kind {
            MemberKind::File if member.sparse.is_none() => {
                let (offset, len) = (tar.position(), member.size);
                if offset.checked_add(len).is_none_or(|end| end > size) {
                    return Err(ImportError::Truncated { source_name: name.to_owned() });
                }
                Place::Data { offset, len }
            }
            MemberKind::Symlink => Place::Link(String::from_utf8_lossy(&member.link).into_owned()),
            _ => continue,
        };
        files.insert(file_name, place);
    }
    if files.is_empty() {
        let found =
            if tar.position() == 0 { likeness::of(&[]) } else { "it is a tar archive without files".to_owned() };
        return Err(unknown(name, found));
    }
    Ok(TarIndex { path: path.to_owned(), files })
}

fn open_saved(
    index: &TarIndex,
    bytes: &[u8],
    options: &ImportOptions,
    name: String,
) -> Result<OpenedImage, ImportError> {
    let refuse = |reason: String| ImportError::Manifest { source_name: name.clone(), reason };
    let images: Vec<Saved> =
        serde_json::from_slice(bytes).map_err(|e| refuse(format!("malformed manifest.json: {e}")))?;
    let wanted = |image: &Saved| match &options.select {
        Some(select) => image.repo_tags.iter().flatten().any(|tag| tag == select),
        None => true,
    };
    let mut fitting = images.iter().filter(|image| wanted(image));
    let image = fitting.next().ok_or_else(|| refuse("no such image in the archive".to_owned()))?;
    if fitting.next().is_some() {
        return Err(refuse("several images; say which one".to_owned()));
    }
    let find = |file: &str| index.find(file)?.ok_or_else(|| refuse(format!("{file} is missing")));
    let (config, platform, diff_ids) =
        manifest::config(&layout::read(&find(&image.config)?, MAX_DOCUMENT_BYTES, &name)?, &name)?;
    if diff_ids.len() != image.layers.len() {
        let (layers, ids) = (image.layers.len(), diff_ids.len());
        return Err(refuse(format!("{layers} layers, but {ids} diff ids in the configuration")));
    }
    let mut layers = Vec::new();
    for (number, (file, diff_id)) in image.layers.iter().zip(diff_ids).enumerate() {
        let content = find(file)?;
        let size = if let Content::Slice { len, .. } = &content { Some(*len) } else { None };
        layers.push(SourceLayer {
            name: format!("{name}, layer {number} ({file})"),
            content,
            codec: None,
            size,
            digest: None,
            diff_id: Some(diff_id),
            whiteouts: true,
        });
    }
    Ok(OpenedImage { name, config, platform, source_digest: None, layers, remote: None })
}
