//! Manifests, indexes and configurations: the parts of the OCI image specification and of Docker's manifest v2 schema 2
//! that an import reads, parsed strictly where it matters and tolerantly elsewhere.

use crate::config::ImportOptions;
use crate::error::ImportError;
use crate::source::{Content, SourceLayer};
use crate::stream::Codec;
use corral_api::digest::Digest;
use corral_api::image::ImageConfig;
use serde::Deserialize;
use std::collections::BTreeMap;

/// No sound document comes near this.
pub(crate) const MAX_DOCUMENT_BYTES: u64 = 4 << 20;
/// Docker allows 127 layers; this bounds what one manifest can ask for.
const MAX_LAYERS: usize = 1024;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    pub(crate) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    pub(crate) os: String,
    #[serde(default)]
    pub(crate) architecture: String,
    #[serde(default)]
    pub(crate) variant: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    #[serde(default)]
    schema_version: u32,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    pub(crate) manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct ConfigFile {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    config: Option<Settings>,
    #[serde(default)]
    rootfs: Option<RootFs>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Settings {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// What a document is, by its media type or, where it has none, its fields.
pub(crate) enum Document {
    Manifest(Manifest),
    Index(Index),
}

fn refuse(source_name: &str, reason: impl Into<String>) -> ImportError {
    ImportError::Manifest { source_name: source_name.to_owned(), reason: reason.into() }
}

/// Parses a manifest or index.
pub(crate) fn document(bytes: &[u8], media_type: &str, name: &str) -> Result<Document, ImportError> {
    let malformed = |e: serde_json::Error| refuse(name, format!("malformed manifest: {e}"));
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(malformed)?;
    let inner = value.get("mediaType").and_then(|t| t.as_str()).unwrap_or_default().to_owned();
    let stated = if inner.is_empty() { media_type } else { &inner };
    match stated {
        "application/vnd.oci.image.index.v1+json" | "application/vnd.docker.distribution.manifest.list.v2+json" => {
            serde_json::from_value(value).map(Document::Index).map_err(malformed)
        }
        "application/vnd.oci.image.manifest.v1+json" | "application/vnd.docker.distribution.manifest.v2+json" => {
            manifest(value, name).map(Document::Manifest)
        }
        "" if value.get("manifests").is_some() => serde_json::from_value(value).map(Document::Index).map_err(malformed),
        "" => manifest(value, name).map(Document::Manifest),
        other => Err(ImportError::MediaType { source_name: name.to_owned(), media_type: other.to_owned() }),
    }
}

fn manifest(value: serde_json::Value, name: &str) -> Result<Manifest, ImportError> {
    let manifest: Manifest =
        serde_json::from_value(value).map_err(|e| refuse(name, format!("malformed manifest: {e}")))?;
    if manifest.schema_version != 2 {
        return Err(refuse(name, format!("manifest schema version {} is not 2", manifest.schema_version)));
    }
    if manifest.layers.len() > MAX_LAYERS {
        return Err(refuse(name, format!("more than {MAX_LAYERS} layers")));
    }
    match manifest.config.media_type.as_str() {
        "application/vnd.oci.image.config.v1+json" | "application/vnd.docker.container.image.v1+json" => Ok(manifest),
        other => Err(ImportError::MediaType { source_name: name.to_owned(), media_type: other.to_owned() }),
    }
}

/// Parses a digest of a descriptor.
pub(crate) fn digest(text: &str, name: &str) -> Result<Digest, ImportError> {
    text.parse().map_err(|e| refuse(name, format!("{e}")))
}

/// How a layer of this media type is compressed.
pub(crate) fn codec(media_type: &str, name: &str) -> Result<Codec, ImportError> {
    let plain = media_type.replace(".nondistributable", "").replace(".foreign", "");
    Ok(match plain.as_str() {
        "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => Codec::Plain,
        "application/vnd.oci.image.layer.v1.tar+gzip" | "application/vnd.docker.image.rootfs.diff.tar.gzip" => {
            Codec::Gzip
        }
        "application/vnd.oci.image.layer.v1.tar+zstd" | "application/vnd.docker.image.rootfs.diff.tar.zstd" => {
            Codec::Zstd
        }
        _ => {
            return Err(ImportError::MediaType { source_name: name.to_owned(), media_type: media_type.to_owned() });
        }
    })
}

/// Picks a manifest of an index: by reference name where asked, then by platform.
pub(crate) fn pick<'i>(index: &'i Index, options: &ImportOptions, name: &str) -> Result<&'i Descriptor, ImportError> {
    let mut parts = options.platform.split('/');
    let (os, architecture, variant) = (parts.next(), parts.next(), parts.next());
    let named = |d: &&Descriptor| {
        let Some(select) = &options.select else { return true };
        let names = d.annotations.iter().flatten();
        names
            .filter(|(k, _)| matches!(k.as_str(), "org.opencontainers.image.ref.name" | "io.containerd.image.name"))
            .any(|(_, v)| v == select)
    };
    let mut fitting = index.manifests.iter().filter(named).filter(|d| match &d.platform {
        Some(p) => {
            Some(p.os.as_str()) == os
                && Some(p.architecture.as_str()) == architecture
                && (variant.is_none() || p.variant.as_deref() == variant)
        }
        None => true,
    });
    let none = || ImportError::NoPlatform { source_name: name.to_owned(), platform: options.platform.clone() };
    let first = fitting.next().ok_or_else(none)?;
    // Entries without a platform are different images, not choices.
    if first.platform.is_none() && fitting.next().is_some() {
        return Err(refuse(name, "several images; say which one"));
    }
    Ok(first)
}

/// An image's configuration, platform and diff ids.
pub(crate) fn config(bytes: &[u8], name: &str) -> Result<(ImageConfig, String, Vec<Digest>), ImportError> {
    let file: ConfigFile =
        serde_json::from_slice(bytes).map_err(|e| refuse(name, format!("malformed configuration: {e}")))?;
    let settings = file.config.unwrap_or_default();
    let pair = |line: String| match line.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None => (line, String::new()),
    };
    let workdir = settings.working_dir.filter(|w| !w.is_empty()).unwrap_or_else(|| "/".to_owned());
    let config = ImageConfig {
        env: settings.env.unwrap_or_default().into_iter().map(pair).collect(),
        workdir: if workdir.starts_with('/') { workdir } else { format!("/{workdir}") },
        user: settings.user.unwrap_or_default(),
        entrypoint: settings.entrypoint.unwrap_or_default(),
        cmd: settings.cmd.unwrap_or_default(),
        labels: settings.labels.unwrap_or_default(),
    };
    let or = |text: String, default: &str| if text.is_empty() { default.to_owned() } else { text };
    let mut platform = format!("{}/{}", or(file.os, "linux"), or(file.architecture, "amd64"));
    if let Some(variant) = file.variant.filter(|v| !v.is_empty()) {
        platform = format!("{platform}/{variant}");
    }
    let ids = file.rootfs.map(|r| r.diff_ids).unwrap_or_default();
    let ids = ids.iter().map(|id| digest(id, name)).collect::<Result<_, _>>()?;
    Ok((config, platform, ids))
}

/// Pairs a manifest's layers with the configuration's diff ids.
pub(crate) fn layers(
    manifest: &Manifest,
    diff_ids: &[Digest],
    name: &str,
    mut content: impl FnMut(&Digest, u64) -> Result<Content, ImportError>,
) -> Result<Vec<SourceLayer>, ImportError> {
    if manifest.layers.len() != diff_ids.len() {
        let (layers, ids) = (manifest.layers.len(), diff_ids.len());
        return Err(refuse(name, format!("{layers} layers, but {ids} diff ids in the configuration")));
    }
    let mut out = Vec::new();
    for (index, (layer, diff_id)) in manifest.layers.iter().zip(diff_ids).enumerate() {
        let label = format!("{name}, layer {index} ({})", layer.digest);
        let digest = digest(&layer.digest, &label)?;
        out.push(SourceLayer {
            content: content(&digest, layer.size)?,
            codec: Some(codec(&layer.media_type, &label)?),
            size: Some(layer.size),
            digest: Some(digest),
            diff_id: Some(*diff_id),
            whiteouts: true,
            name: label,
        });
    }
    Ok(out)
}
