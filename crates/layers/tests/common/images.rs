//! Images made of layers given as tars: `docker save` archives and OCI layouts.

use super::TestDir;
use super::tarball::{E, file, tar};
use corral_api::digest::Digest;
use corral_layers::ImageSource;
use serde_json::{Value, json};
use std::path::Path;

pub fn config(layers: &[Vec<u8>]) -> Value {
    json!({
        "architecture": "amd64", "os": "linux",
        "config": {
            "Env": ["PATH=/bin:/usr/bin", "EMPTY=", "A=b=c"], "WorkingDir": "/work", "User": "1000:100",
            "Entrypoint": ["/bin/entry"], "Cmd": ["a", "b"], "Labels": {"who": "me"},
        },
        "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|l| Digest::of(l).to_string()).collect::<Vec<_>>()},
    })
}

pub fn docker_save(config: &Value, layers: &[Vec<u8>]) -> Vec<u8> {
    let names: Vec<String> = (0..layers.len()).map(|i| format!("{i}/layer.tar")).collect();
    let mut entries: Vec<E> = layers.iter().zip(&names).map(|(l, n)| file(n, l)).collect();
    entries.push(file("config.json", config.to_string()));
    let manifest = json!([{"Config": "config.json", "RepoTags": ["test:latest"], "Layers": names}]);
    entries.push(file("manifest.json", manifest.to_string()));
    tar(&entries)
}

/// A `docker save` archive of uncompressed layers, as a source.
pub fn archive(dir: &TestDir, name: &str, layers: &[Vec<u8>]) -> ImageSource {
    ImageSource::Archive(dir.write(name, &docker_save(&config(layers), layers)))
}

/// An OCI layout in the making: blobs by digest, and the index.
pub struct Layout {
    pub blobs: Vec<Vec<u8>>,
    pub index: Value,
}

pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

impl Layout {
    /// One image; each layer with the suffix of its media type and its stored form.
    pub fn image(config: &Value, layers: &[(&str, Vec<u8>)]) -> Self {
        let config = config.to_string().into_bytes();
        let described =
            |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": Digest::of(bytes), "size": bytes.len()});
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": described("application/vnd.oci.image.config.v1+json", &config),
            "layers": layers.iter().map(|(suffix, l)| described(&format!("{OCI_LAYER}{suffix}"), l)).collect::<Vec<_>>(),
        })
        .to_string()
        .into_bytes();
        let index = json!({
            "schemaVersion": 2,
            "manifests": [described("application/vnd.oci.image.manifest.v1+json", &manifest)],
        });
        let mut blobs = vec![config, manifest];
        blobs.extend(layers.iter().map(|(_, l)| l.clone()));
        Self { blobs, index }
    }

    pub fn entries(&self) -> Vec<E> {
        let mut out: Vec<E> =
            self.blobs.iter().map(|b| file(format!("blobs/sha256/{}", Digest::of(b).hex()), b)).collect();
        out.push(file("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#));
        out.push(file("index.json", self.index.to_string()));
        out
    }

    pub fn write(&self, path: &Path) -> ImageSource {
        std::fs::create_dir_all(path.join("blobs/sha256")).unwrap();
        for e in self.entries() {
            std::fs::write(path.join(std::str::from_utf8(&e.name).unwrap()), &e.data).unwrap();
        }
        ImageSource::OciLayout(path.to_owned())
    }
}
