//! The documents of an archive, and how files stand in it.

use corral_api::digest::Digest;
use corral_api::image::{ImageConfig, ImageRecord};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Sizes in a tar stream are multiples of this.
const RECORD: usize = 512;
/// When what has no time of its own was made: archives of equal images are equal.
const LONG_AGO: &str = "1970-01-01T00:00:00Z";

/// Something in `blobs/`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blob {
    pub(super) digest: Digest,
    pub(super) size: u64,
}

impl Blob {
    fn of(bytes: &[u8]) -> Self {
        Self { digest: Digest::of(bytes), size: bytes.len() as u64 }
    }

    /// Its place in the archive.
    pub(super) fn path(&self) -> String {
        format!("blobs/sha256/{}", self.digest.hex())
    }

    fn descriptor(&self, kind: &str) -> Value {
        let media_type = format!("application/vnd.oci.image.{kind}");
        json!({ "mediaType": media_type, "digest": self.digest.to_string(), "size": self.size })
    }
}

/// What an archive says of its image.
#[derive(Debug)]
pub(super) struct Documents {
    config: Vec<u8>,
    manifest: Vec<u8>,
    index: Vec<u8>,
    docker: Vec<u8>,
}

impl Documents {
    /// Those of an image whose layers are these, lowest first.
    pub(super) fn of(image: &ImageRecord, layers: &[Blob]) -> Self {
        let bytes = |value: Value| value.to_string().into_bytes();
        let config = bytes(config(image, layers));
        let manifest = bytes(json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": Blob::of(&config).descriptor("config.v1+json"),
            "layers": layers.iter().map(|l| l.descriptor("layer.v1.tar")).collect::<Vec<_>>(),
        }));
        let name = tagged(&image.name);
        let mut described = Blob::of(&manifest).descriptor("manifest.v1+json");
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        described["annotations"] =
            json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [described],
        });
        let docker = json!([{
            "Config": Blob::of(&config).path(),
            "RepoTags": [name],
            "Layers": layers.iter().map(Blob::path).collect::<Vec<_>>(),
        }]);
        Self { config, manifest, index: bytes(index), docker: bytes(docker) }
    }

    /// What stands before the layers.
    pub(super) fn write_before(&self, out: &mut impl Write) -> io::Result<()> {
        put(out, "oci-layout", json!({ "imageLayoutVersion": "1.0.0" }).to_string().as_bytes())?;
        put(out, &Blob::of(&self.config).path(), &self.config)?;
        put(out, &Blob::of(&self.manifest).path(), &self.manifest)
    }

    /// What stands after them, and the archive's end.
    pub(super) fn write_after(&self, out: &mut impl Write) -> io::Result<()> {
        put(out, "index.json", &self.index)?;
        put(out, "manifest.json", &self.docker)?;
        out.write_all(&[0; 2 * RECORD])
    }
}

/// The image's configuration, as the OCI specifies it.
fn config(image: &ImageRecord, layers: &[Blob]) -> Value {
    let ImageConfig { env, workdir, user, entrypoint, cmd, labels } = &image.config;
    let mut platform = image.platform.splitn(3, '/');
    let (os, architecture, variant) = (platform.next(), platform.next(), platform.next());
    let created = image.snapshot.as_ref().map_or(LONG_AGO, |s| &s.created_at);
    // Absent where empty, as engines write it: an empty list is not the same to all of them.
    let mut settings = BTreeMap::from([("WorkingDir", json!(workdir)), ("User", json!(user))]);
    settings.insert("Env", json!(env.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()));
    settings.extend([("Entrypoint", json!(entrypoint)), ("Cmd", json!(cmd)), ("Labels", json!(labels))]);
    let empty = |v: &Value| v.as_str() == Some("") || *v == json!([]) || *v == json!({});
    settings.retain(|_, value| !empty(value));
    let history = layers.iter().map(|_| json!({ "created": created, "created_by": "corral" })).collect::<Vec<_>>();
    let mut config = json!({
        "created": created,
        "os": os.unwrap_or("linux"),
        "architecture": architecture.unwrap_or("amd64"),
        "config": settings,
        "rootfs": { "type": "layers", "diff_ids": layers.iter().map(|l| l.digest.to_string()).collect::<Vec<_>>() },
        "history": history,
    });
    if let Some(variant) = variant {
        config["variant"] = json!(variant);
    }
    config
}

/// The name with a tag: engines do not load it without.
fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

/// A file's header.
pub(super) fn header(path: &str, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    // The paths here are short.
    header.set_path(path).unwrap_or(());
    header.set_mode(0o644);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_cksum();
    header
}

/// Fills the last record of a file.
pub(super) fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    let over = (size % RECORD as u64) as usize;
    if over == 0 { Ok(()) } else { out.write_all(&[0; RECORD][over..]) }
}

fn put(out: &mut impl Write, path: &str, bytes: &[u8]) -> io::Result<()> {
    let size = bytes.len() as u64;
    out.write_all(header(path, size).as_bytes())?;
    out.write_all(bytes)?;
    pad(out, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_get_a_tag() {
        assert_eq!(tagged("a"), "a:latest");
        assert_eq!(tagged("host:5000/a/b"), "host:5000/a/b:latest");
        assert_eq!(tagged("host:5000/a:v1"), "host:5000/a:v1");
    }
}
