//! Publishing a layer: what the store has not yet of its chunks, then its tables, its manifest last.

use super::gc::UNNEEDED;
use super::index::Stored;
use super::{SharedError, SharedLayers, keys};
use crate::store::LayerFiles;
use corral_api::digest::Digest;
use corral_format::manifest::{Hash, Manifest};
use corral_format::places::{Place, Places};
use corral_store::{Body, Put};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A pack is closed once it holds so many bytes.
const PACK: u64 = 256 << 20;
/// Good and fast enough that the store's link is the slower part.
const LEVEL: i32 = 3;

/// What publishing a layer took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Whether it was there already: then nothing was written.
    pub existed: bool,
    /// Bytes of its chunks.
    pub data_bytes: u64,
    /// Bytes of these that the store had already.
    pub shared_bytes: u64,
    /// Bytes written to the store, tables included.
    pub stored_bytes: u64,
}

/// A pack that was made: its name and its file.
type PackFile = (Hash, PathBuf);

/// Packs made in the staging directory.
struct Made {
    places: Places,
    packs: Vec<PackFile>,
    report: Published,
    /// Removes the files.
    _work: tempfile::TempDir,
}

impl SharedLayers {
    /// Publishes a layer that is complete on this node; what is published already is left as it is. Many nodes may
    /// publish one layer at once.
    ///
    /// # Errors
    /// The layer is not here or not complete, or the store fails: the layer is then not visible there, and the call may
    /// be repeated.
    pub async fn publish(&self, digest: &Digest) -> Result<Published, SharedError> {
        if self.is_published_and_stays(digest).await? {
            self.know_places(digest).await;
            return Ok(Published { existed: true, ..Published::default() });
        }
        self.ensure_joined().await?;
        let digest = *digest;
        let manifest = self.blocking(move |this| this.complete_manifest(&digest)).await?;
        let known = Arc::new(self.known_places(&manifest).await?);
        let (of, at) = (manifest.clone(), known.clone());
        let made = self.blocking(move |this| this.make_packs(&digest, &of, &at)).await?;
        let mut report = made.report;
        {
            let _gate = self.beside.gate.read().await;
            self.beside.packs.note(made.packs.iter().map(|(name, _)| *name));
        }
        for (name, path) in &made.packs {
            self.put(keys::pack(name)?, Body::File(path.clone())).await?;
        }
        let files = LayerFiles::in_dir(&self.local.dir_of(&digest));
        let meta = tokio::fs::read(&files.meta).await.map_err(|e| SharedError::io("read", &files.meta, e))?;
        let meta = zstd::bulk::compress(&meta, LEVEL).map_err(|e| SharedError::io("compress", &files.meta, e))?;
        let (table, named) = (made.places.pack(), manifest.encode());
        report.stored_bytes += (meta.len() + table.len() + named.len()) as u64;
        self.put(keys::meta(&digest)?, Body::Bytes(meta.into())).await?;
        let foreign: HashSet<Hash> = known.iter().flatten().map(|s| s.pack).collect();
        for pack in &foreign {
            let note = keys::prefix(&format!("{UNNEEDED}/{}", keys::hex(pack)))?;
            self.store.delete(&note).await.map_err(SharedError::Remote)?;
        }
        // Another publisher's table is as good: it was written after its packs.
        let own = self.put(keys::places(&digest)?, Body::Bytes(table.into())).await? == Put::Created;
        self.still_there(&digest, &foreign, own).await?;
        let put = self.put(keys::manifest(&digest)?, Body::Bytes(named.into())).await?;
        report.existed = put == Put::Existed;
        let places = made.places;
        self.blocking(move |this| {
            this.index.learn(&digest, &manifest, &places)?;
            Ok(this.local.replace_places(&digest, &places)?)
        })
        .await?;
        Ok(report)
    }

    /// Whether a layer is published. From here on a gc of this process leaves it alone.
    async fn is_published_and_stays(&self, digest: &Digest) -> Result<bool, SharedError> {
        let of = *digest;
        let _gate = self.beside.gate.read().await;
        self.blocking(move |this| {
            this.local.note_made(&of);
            Ok(())
        })
        .await?;
        self.is_published(digest).await
    }

    /// Sees to it that a layer that others published has a table of places here, so that its data counts as what can be
    /// had again. Without one it only stays.
    async fn know_places(&self, digest: &Digest) {
        let of = *digest;
        let manifest = self.blocking(move |this| match this.local.places(&of) {
            Ok(_) => Ok(None),
            Err(_) => Ok(Some(this.local.manifest(&of)?)),
        });
        let known = match manifest.await {
            Ok(Some(manifest)) => self.refresh_places(digest, &manifest).await.map(|_| ()),
            other => other.map(|_| ()),
        };
        if let Err(error) = known {
            tracing::debug!(%digest, %error, "where the chunks of a layer lie is not known here");
        }
    }

    async fn put(&self, key: corral_store::Key, body: Body) -> Result<Put, SharedError> {
        self.store.put_if_absent(&key, body).await.map_err(SharedError::Remote)
    }

    /// Makes sure that packs of others were not removed while they were being referred to.
    async fn still_there(&self, digest: &Digest, packs: &HashSet<Hash>, own: bool) -> Result<(), SharedError> {
        for pack in packs {
            if self.store.head(&keys::pack(pack)?).await.map_err(SharedError::Remote)?.is_none() {
                let gone = *pack;
                self.blocking(move |this| this.index.forget(&[gone], &[])).await?;
                if own {
                    self.store.delete(&keys::places(digest)?).await.map_err(SharedError::Remote)?;
                }
                return Err(SharedError::Raced(*digest));
            }
        }
        Ok(())
    }

    fn complete_manifest(&self, digest: &Digest) -> Result<Manifest, SharedError> {
        if !self.local.is_complete(digest)? {
            return Err(SharedError::Partial(*digest));
        }
        // What is damaged here must not spread.
        self.local.check(digest)?;
        Ok(self.local.manifest(digest)?)
    }

    /// Where chunks are that the store has, in packs that are there now.
    async fn known_places(&self, manifest: &Manifest) -> Result<Vec<Option<Stored>>, SharedError> {
        let wanted = manifest.clone();
        let mut found = self.blocking(move |this| this.index.find(&wanted)).await?;
        let _gate = self.beside.gate.read().await;
        self.beside.packs.note(found.iter().flatten().map(|stored| stored.pack));
        let mut there: HashMap<Hash, bool> = HashMap::new();
        for pack in found.iter().flatten().map(|s| s.pack) {
            if let std::collections::hash_map::Entry::Vacant(entry) = there.entry(pack) {
                entry.insert(self.store.head(&keys::pack(&pack)?).await.map_err(SharedError::Remote)?.is_some());
            }
        }
        let gone: Vec<Hash> = there.iter().filter(|(_, there)| !**there).map(|(pack, _)| *pack).collect();
        if !gone.is_empty() {
            found.iter_mut().for_each(|s| *s = s.filter(|s| !gone.contains(&s.pack)));
            self.blocking(move |this| this.index.forget(&gone, &[])).await?;
        }
        Ok(found)
    }

    fn make_packs(&self, digest: &Digest, manifest: &Manifest, known: &[Option<Stored>]) -> Result<Made, SharedError> {
        let staging = self.local.staging_dir();
        let work =
            tempfile::TempDir::new_in(&staging).map_err(|e| SharedError::io("make a directory in", staging, e))?;
        let data = LayerFiles::in_dir(&self.local.dir_of(digest)).data;
        let io = |e| SharedError::io("read", &data, e);
        let file = File::open(&data).map_err(io)?;
        let mut packer = Packer::new(work.path());
        let mut report = Published::default();
        let mut buffer = vec![0; corral_format::CHUNK as usize];
        for (chunk, known) in manifest.chunks.iter().zip(known) {
            report.data_bytes += u64::from(chunk.len);
            if let Some(known) = known {
                report.shared_bytes += u64::from(chunk.len);
                packer.refer(known);
                continue;
            }
            let bytes = &mut buffer[..chunk.len as usize];
            file.read_exact_at(bytes, chunk.offset).map_err(io)?;
            packer.add(bytes)?;
        }
        let (places, packs, stored) = packer.finish()?;
        report.stored_bytes = stored;
        Ok(Made { places, packs, report, _work: work })
    }
}

/// Writes chunks into pack files, and where they are into a table.
struct Packer<'a> {
    dir: &'a Path,
    places: Places,
    /// Numbers of packs that are in the store.
    numbers: HashMap<Hash, u32>,
    packs: Vec<PackFile>,
    open: Option<Open>,
    stored: u64,
}

/// A pack in the making. Its name is not known before its end, so its place in the table is filled then.
struct Open {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    number: u32,
    len: u64,
}

impl<'a> Packer<'a> {
    fn new(dir: &'a Path) -> Self {
        Self { dir, places: Places::default(), numbers: HashMap::new(), packs: Vec::new(), open: None, stored: 0 }
    }

    fn refer(&mut self, stored: &Stored) {
        let packs = &mut self.places.packs;
        let number = *self.numbers.entry(stored.pack).or_insert_with(|| {
            packs.push(stored.pack);
            packs.len() as u32 - 1
        });
        self.places.chunks.push(Place { pack: number, offset: stored.offset, stored: stored.stored });
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), SharedError> {
        let packed = zstd::bulk::compress(bytes, LEVEL).map_err(|e| SharedError::io("compress", self.dir, e))?;
        // What hardly shrinks is read faster as it is.
        let kept = if packed.len() * 32 < bytes.len() * 31 { packed.as_slice() } else { bytes };
        if self.open.is_none() {
            let path = self.dir.join(format!("pack-{}", self.packs.len()));
            let file = File::create_new(&path).map_err(|e| SharedError::io("make", &path, e))?;
            self.places.packs.push([0; 32]);
            let number = self.places.packs.len() as u32 - 1;
            let file = BufWriter::with_capacity(1 << 20, file);
            self.open = Some(Open { path, file, hasher: blake3::Hasher::new(), number, len: 0 });
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        open.file.write_all(kept).map_err(|e| SharedError::io("write", &open.path, e))?;
        open.hasher.update(kept);
        self.places.chunks.push(Place { pack: open.number, offset: open.len, stored: kept.len() as u32 });
        open.len += kept.len() as u64;
        if open.len >= PACK { self.close() } else { Ok(()) }
    }

    fn close(&mut self) -> Result<(), SharedError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        open.file.flush().map_err(|e| SharedError::io("write", &open.path, e))?;
        let name = *open.hasher.finalize().as_bytes();
        self.places.packs[open.number as usize] = name;
        self.stored += open.len;
        self.packs.push((name, open.path));
        Ok(())
    }

    fn finish(mut self) -> Result<(Places, Vec<PackFile>, u64), SharedError> {
        self.close()?;
        Ok((self.places, self.packs, self.stored))
    }
}
