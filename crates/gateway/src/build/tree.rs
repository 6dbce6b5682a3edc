//! Files to copy from: a build context, or what a stage holds, as a tar file on disk and an index of it.
//!
//! The archive is hostile: nothing of it is unpacked here. Its names become keys of a map, links are texts.

use corral_api::digest::Digest;
use corral_api::problem::{ErrorKind, Problem};
use corral_dockerfile::{EntryKind, Listed, clean};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// The most entries of a tree.
const MAX_ENTRIES: usize = 500_000;
/// Permission bits of directories that the archive only implies.
const IMPLIED_MODE: u32 = 0o755;

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits.
    pub mode: u32,
    /// Owner's numbers.
    pub owner: (u32, u32),
    /// Time of its last change, seconds since 1970.
    pub mtime: u64,
    /// Where a file's bytes are in the archive.
    pub bytes: Bytes,
}

/// A stretch of an archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Which of the tree's archives.
    pub archive: usize,
    /// First byte.
    pub offset: u64,
    /// How many.
    pub size: u64,
}

impl Listed for Entry {
    fn kind(&self) -> &EntryKind {
        &self.kind
    }
}

/// The index of one archive or several.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    /// The archives, without compression.
    files: Vec<Arc<File>>,
    /// Entries by path; directories are all there.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

fn bad(text: impl Into<String>) -> Problem {
    Problem::new(ErrorKind::InvalidRequest, text)
}

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(200).collect()
}

impl Tree {
    /// Reads an archive. `prefix` is the path that its entries are put below; `what` names it in errors.
    ///
    /// # Errors
    /// It cannot be read, or holds what no tree may hold.
    pub fn index(file: File, prefix: &str, what: &str) -> Result<Self, Problem> {
        let broken = |e: &io::Error| bad(format!("{what} cannot be read as a tar archive: {e}"));
        let length = file.metadata().map_err(|e| broken(&e))?.len();
        let mut reader = BufReader::new(&file);
        reader.rewind().map_err(|e| broken(&e))?;
        let mut archive = tar::Archive::new(reader);
        let mut found = Vec::new();
        for entry in archive.entries_with_seek().map_err(|e| broken(&e))? {
            let entry = entry.map_err(|e| broken(&e))?;
            let name = entry.path_bytes();
            let path = clean(&name).ok_or_else(|| bad(format!("{what}: {:?} leads out of it", shown(&name))))?;
            let bytes = Bytes { archive: 0, offset: entry.raw_file_position(), size: entry.size() };
            if found.len() >= MAX_ENTRIES {
                let text = format!("{what} has more than {MAX_ENTRIES} entries");
                return Err(Problem::new(ErrorKind::TooLarge, text));
            }
            if let Some(read) = read(&entry, bytes, length, what, &shown(&name))? {
                found.push((path, read));
            }
        }
        drop(archive);
        let mut tree = Self { files: vec![Arc::new(file)], entries: BTreeMap::new() };
        for (path, read) in found {
            let path = match (prefix, path.as_slice()) {
                ("", _) => path,
                (_, b"") => prefix.into(),
                _ => [prefix.as_bytes(), &path].join(&b'/'),
            };
            tree.insert(path, read, what)?;
        }
        if !prefix.is_empty() && !tree.entries.contains_key(prefix.as_bytes()) {
            tree.imply(format!("{prefix}/x").as_bytes(), what)?;
        }
        Ok(tree)
    }

    /// This tree and another over it.
    ///
    /// # Errors
    /// What is a directory in one is none in the other.
    pub fn and(mut self, other: Self, what: &str) -> Result<Self, Problem> {
        let before = self.files.len();
        self.files.extend(other.files);
        for (path, mut entry) in other.entries {
            entry.bytes.archive += before;
            // A directory that is only implied tells nothing new.
            if entry.kind != EntryKind::Directory || !self.entries.contains_key(&path) {
                self.insert(path, Found::Entry(entry), what)?;
            }
        }
        Ok(self)
    }

    fn insert(&mut self, path: Vec<u8>, read: Found, what: &str) -> Result<(), Problem> {
        let entry = match read {
            Found::Entry(entry) => entry,
            Found::HardLink(target) => {
                let found = clean(&target).and_then(|target| self.entries.get(&target));
                let file = found.filter(|e| e.kind == EntryKind::File);
                file.cloned()
                    .ok_or_else(|| bad(format!("{what}: {:?} is a hard link to nothing in it", shown(&path))))?
            }
        };
        if path.is_empty() {
            return Ok(());
        }
        self.imply(&path, what)?;
        let below = [path.as_slice(), b"/"].concat();
        let is_used = self.entries.range(below.clone()..).next().is_some_and(|(p, _)| p.starts_with(&below));
        if is_used && entry.kind != EntryKind::Directory {
            return Err(bad(format!("{what}: {:?} is a directory and something else", shown(&path))));
        }
        self.entries.insert(path, entry);
        Ok(())
    }

    /// Makes sure of the directories that a path lies in.
    fn imply(&mut self, path: &[u8], what: &str) -> Result<(), Problem> {
        for parent in parents(path) {
            match self.entries.get(parent).map(|e| &e.kind) {
                Some(EntryKind::Directory) => {}
                // Through a link an entry could come to lie anywhere.
                Some(_) => {
                    let (path, parent) = (shown(path), shown(parent));
                    return Err(bad(format!("{what}: {path:?} lies in {parent:?}, which is no directory")));
                }
                None => {
                    let implied = Entry {
                        kind: EntryKind::Directory,
                        mode: IMPLIED_MODE,
                        owner: (0, 0),
                        mtime: 0,
                        bytes: Bytes::default(),
                    };
                    self.entries.insert(parent.to_owned(), implied);
                }
            }
        }
        Ok(())
    }

    /// Leaves out what `excludes` says, but for directories of what stays.
    pub fn leave_out(&mut self, excludes: impl Fn(&[u8]) -> bool) {
        let mut kept: std::collections::BTreeSet<Vec<u8>> = std::collections::BTreeSet::new();
        for path in self.entries.keys().filter(|path| !excludes(path)) {
            kept.extend(parents(path).map(<[u8]>::to_vec));
            kept.insert(path.clone());
        }
        self.entries.retain(|path, _| kept.contains(path));
    }

    /// A stretch of the archive, to read.
    pub fn reader(&self, bytes: Bytes) -> impl Read + use<> {
        Stretch { file: self.files.get(bytes.archive).cloned(), at: bytes.offset, left: bytes.size }
    }

    /// Digest of a file's bytes. Blocks.
    ///
    /// # Errors
    /// The archive cannot be read.
    pub fn digest(&self, bytes: Bytes) -> io::Result<Digest> {
        let mut hasher = Sha256::new();
        let mut reader = self.reader(bytes);
        let mut buffer = vec![0; 256 << 10];
        loop {
            match reader.read(&mut buffer)? {
                0 => return Ok(Digest::from_bytes(hasher.finalize().into())),
                n => hasher.update(&buffer[..n]),
            }
        }
    }
}

/// The directories that a path lies in, outermost first.
fn parents(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| &path[..at])
}

enum Found {
    Entry(Entry),
    HardLink(Vec<u8>),
}

fn read<R: Read>(
    entry: &tar::Entry<'_, R>,
    bytes: Bytes,
    length: u64,
    what: &str,
    name: &str,
) -> Result<Option<Found>, Problem> {
    let header = entry.header();
    let link = || {
        let target = entry.link_name_bytes().map(std::borrow::Cow::into_owned);
        let target = target.filter(|target| !target.is_empty() && !target.contains(&0));
        target.ok_or_else(|| bad(format!("{what}: the link {name:?} has no target that can be read")))
    };
    let mut inner = Bytes::default();
    let kind = match header.entry_type() {
        tar::EntryType::Directory => EntryKind::Directory,
        tar::EntryType::Symlink => EntryKind::Symlink(link()?),
        tar::EntryType::Link => return Ok(Some(Found::HardLink(link()?))),
        tar::EntryType::XGlobalHeader => return Ok(None),
        kind if kind.is_gnu_sparse() => return Err(bad(format!("{what}: {name:?} is stored sparsely"))),
        kind if kind.is_file() || kind.is_contiguous() => {
            if bytes.offset.checked_add(bytes.size).is_none_or(|end| end > length) {
                return Err(bad(format!("{what} breaks off within {name:?}")));
            }
            inner = bytes;
            EntryKind::File
        }
        _ => return Err(bad(format!("{what}: {name:?} is neither file, directory nor link"))),
    };
    let number = |id: io::Result<u64>| id.ok().and_then(|id| u32::try_from(id).ok()).unwrap_or(u32::MAX);
    Ok(Some(Found::Entry(Entry {
        kind,
        mode: header.mode().unwrap_or(0o644) & 0o7777,
        owner: (number(header.uid()), number(header.gid())),
        mtime: header.mtime().unwrap_or(0),
        bytes: inner,
    })))
}

struct Stretch {
    file: Option<Arc<File>>,
    at: u64,
    left: u64,
}

impl Read for Stretch {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if most == 0 {
            return Ok(0);
        }
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        let n = file.read_at(&mut buffer[..most], self.at)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += n as u64;
        self.left -= n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn names(tree: &Tree) -> Vec<String> {
        tree.entries.keys().map(|path| path.escape_ascii().to_string()).collect()
    }

    fn archive(entries: &[(&str, tar::EntryType, &str)]) -> File {
        let entries: Vec<_> =
            entries.iter().map(|(name, kind, text)| (name.as_bytes(), *kind, text.as_bytes())).collect();
        archive_of(&entries)
    }

    fn archive_of(entries: &[(&[u8], tar::EntryType, &[u8])]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for (name, kind, text) in entries {
            let mut header = tar::Header::new_gnu();
            // By hand: the builder refuses the names that matter here.
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.set_entry_type(*kind);
            header.set_mode(0o640);
            header.set_uid(7);
            header.set_gid(8);
            header.set_mtime(5);
            let is_link = matches!(kind, tar::EntryType::Symlink | tar::EntryType::Link);
            header.set_size(if is_link { 0 } else { text.len() as u64 });
            if is_link {
                header.as_old_mut().linkname[..text.len()].copy_from_slice(text);
            }
            header.set_cksum();
            file.write_all(header.as_bytes()).unwrap();
            if !is_link {
                file.write_all(text).unwrap();
                file.write_all(&vec![0; text.len().next_multiple_of(512) - text.len()]).unwrap();
            }
        }
        file.write_all(&[0; 1024]).unwrap();
        file
    }

    use tar::EntryType as T;

    #[test]
    fn entries_are_indexed_and_directories_implied() {
        let file = archive(&[
            ("./", T::Directory, ""),
            ("a/b/c", T::Regular, "text"),
            ("/abs", T::Regular, "x"),
            ("link", T::Symlink, "../../etc/passwd"),
            ("hard", T::Link, "a/b/c"),
        ]);
        let mut tree = Tree::index(file, "", "the context").unwrap();
        assert_eq!(names(&tree), ["a", "a/b", "a/b/c", "abs", "hard", "link"]);
        let file = &tree.entries[&b"a/b/c"[..]];
        assert_eq!((file.mode, file.owner, file.mtime), (0o640, (7, 8), 5));
        assert_eq!(tree.digest(file.bytes).unwrap(), Digest::of(b"text"));
        assert_eq!(tree.entries[&b"hard"[..]].bytes, file.bytes);
        tree.leave_out(|path| path != b"a/b/c");
        assert_eq!(names(&tree), ["a", "a/b", "a/b/c"]);
        let tree = Tree::index(archive(&[("x", T::Regular, "1")]), "usr/lib", "a stage").unwrap();
        assert_eq!(names(&tree), ["usr", "usr/lib", "usr/lib/x"]);
        let tree = Tree::index(archive(&[]), "usr/lib", "a stage").unwrap();
        assert_eq!(names(&tree), ["usr", "usr/lib"]);
    }

    #[test]
    fn names_that_are_no_text_stay_as_they_are() {
        let file = archive_of(&[
            (b"caf\xe9/\xff", T::Regular, b"text"),
            (b"link", T::Symlink, b"caf\xe9/\xff"),
            (b"hard\x80", T::Link, b"caf\xe9/\xff"),
        ]);
        let tree = Tree::index(file, "usr", "a stage").unwrap_err();
        assert!(tree.message.contains("hard link to nothing"), "{tree}");
        let file = archive_of(&[
            (b"caf\xe9/\xff", T::Regular, b"text"),
            (b"link", T::Symlink, b"caf\xe9/\xff"),
            (b"hard\x80", T::Link, b"caf\xe9/\xff"),
        ]);
        let tree = Tree::index(file, "", "a stage").unwrap();
        assert_eq!(names(&tree), ["caf\\xe9", "caf\\xe9/\\xff", "hard\\x80", "link"]);
        assert_eq!(tree.entries[&b"link"[..]].kind, EntryKind::Symlink(b"caf\xe9/\xff".into()));
        assert_eq!(tree.entries[&b"hard\x80"[..]].bytes, tree.entries[&b"caf\xe9/\xff"[..]].bytes);
    }

    #[test]
    fn hostile_archives_are_refused() {
        for (entries, part) in [
            (&[("../x", T::Regular, "")][..], "leads out"),
            (&[("a/../../x", T::Regular, "")], "leads out"),
            (&[("link", T::Symlink, "/"), ("link/etc/passwd", T::Regular, "")], "which is no directory"),
            (&[("a", T::Regular, ""), ("a/b", T::Regular, "")], "which is no directory"),
            (&[("a/b", T::Regular, ""), ("a", T::Symlink, "/")], "a directory and something else"),
            (&[("dev", T::Char, "")], "neither file"),
            (&[("pipe", T::Fifo, "")], "neither file"),
            (&[("hard", T::Link, "gone")], "hard link to nothing"),
            (&[("hard", T::Link, "../../etc/shadow")], "hard link to nothing"),
            (&[("link", T::Symlink, "")], "no target"),
        ] {
            let problem = Tree::index(archive(entries), "", "the context").unwrap_err();
            assert!(problem.message.contains(part), "{entries:?}: {problem}");
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"this is no archive, but it is long enough to be one; ".repeat(20).as_slice()).unwrap();
        assert!(Tree::index(file, "", "the context").is_err());
        let file = archive(&[("big", T::Regular, "0123456789")]);
        file.set_len(515).unwrap();
        assert!(Tree::index(file, "", "the context").is_err(), "cut off");
    }
}
