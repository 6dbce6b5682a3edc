//! Keys of objects.

use super::SharedError;
use corral_api::digest::Digest;
use corral_format::manifest::Hash;
use corral_store::Key;
use std::fmt::Write;

/// Below which layers lie.
pub(super) const LAYERS: &str = "layers";
/// Below which packs lie.
pub(super) const PACKS: &str = "packs";

fn key(text: String) -> Result<Key, SharedError> {
    Key::parse(text).map_err(SharedError::Remote)
}

fn of_layer(digest: &Digest, part: &str) -> Result<Key, SharedError> {
    key(format!("{LAYERS}/{}/{part}", digest.hex()))
}

pub(super) fn manifest(digest: &Digest) -> Result<Key, SharedError> {
    of_layer(digest, "manifest")
}

pub(super) fn meta(digest: &Digest) -> Result<Key, SharedError> {
    of_layer(digest, "meta")
}

pub(super) fn places(digest: &Digest) -> Result<Key, SharedError> {
    of_layer(digest, "places")
}

pub(super) fn prefix(text: &str) -> Result<Key, SharedError> {
    key(text.to_owned())
}

pub(super) fn hex(hash: &Hash) -> String {
    hash.iter().fold(String::with_capacity(64), |mut out, byte| {
        // Writing into memory does not fail.
        write!(out, "{byte:02x}").unwrap_or(());
        out
    })
}

pub(super) fn pack(name: &Hash) -> Result<Key, SharedError> {
    let hex = hex(name);
    key(format!("{PACKS}/{}/{hex}", &hex[..2]))
}

/// The pack of a key.
pub(super) fn pack_of(key: &Key) -> Option<Hash> {
    let [PACKS, _, name] = key.segments().collect::<Vec<_>>()[..] else { return None };
    let mut out = [0; 32];
    if name.len() != 64 || !name.is_ascii() {
        return None;
    }
    for (byte, digits) in out.iter_mut().zip(name.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(out)
}

/// The layer and the part of a key.
pub(super) fn layer_of(key: &Key) -> Option<(Digest, String)> {
    let segments: Vec<&str> = key.segments().collect();
    let (LAYERS, hex) = (*segments.first()?, segments.get(1)?) else { return None };
    Some((format!("sha256:{hex}").parse().ok()?, segments[2..].join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_what_they_name() {
        let digest = Digest::of(b"x");
        let name = [0xab; 32];
        assert_eq!(pack(&name).unwrap().as_str(), format!("packs/ab/{}", "ab".repeat(32)));
        assert_eq!(pack_of(&pack(&name).unwrap()), Some(name));
        assert_eq!(pack_of(&manifest(&digest).unwrap()), None);
        assert_eq!(layer_of(&manifest(&digest).unwrap()), Some((digest, "manifest".to_owned())));
        assert_eq!(layer_of(&pack(&name).unwrap()), None);
        assert_eq!(layer_of(&prefix("layers/abc/manifest").unwrap()), None);
    }
}
