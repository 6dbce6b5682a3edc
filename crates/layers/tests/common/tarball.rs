//! A tar writer with every field in the test's hand.

/// One member in the making.
#[derive(Clone)]
pub struct E {
    pub name: Vec<u8>,
    pub kind: u8,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime: u64,
    pub link: Vec<u8>,
    pub data: Vec<u8>,
    pub pax: Vec<(String, Vec<u8>)>,
    pub gnu_names: bool,
    pub size: Option<u64>,
    pub header_tail: Option<Vec<u8>>,
}

pub fn entry(kind: u8, name: impl AsRef<[u8]>) -> E {
    E {
        name: name.as_ref().to_vec(),
        kind,
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: 1_600_000_000,
        link: Vec::new(),
        data: Vec::new(),
        pax: Vec::new(),
        gnu_names: false,
        size: None,
        header_tail: None,
    }
}

pub fn file(name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> E {
    E { data: data.as_ref().to_vec(), ..entry(b'0', name) }
}
pub fn dir(name: impl AsRef<[u8]>) -> E {
    entry(b'5', name).mode(0o755)
}
pub fn symlink(name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> E {
    E { link: target.as_ref().to_vec(), ..entry(b'2', name).mode(0o777) }
}
pub fn hardlink(name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> E {
    E { link: target.as_ref().to_vec(), ..entry(b'1', name) }
}
pub fn whiteout(dir: &str, name: &str) -> E {
    file(if dir.is_empty() { format!(".wh.{name}") } else { format!("{dir}/.wh.{name}") }, b"")
}

impl E {
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }
    pub fn owner(mut self, uid: u64, gid: u64) -> Self {
        (self.uid, self.gid) = (uid, gid);
        self
    }
    pub fn mtime(mut self, mtime: u64) -> Self {
        self.mtime = mtime;
        self
    }
    pub fn pax(mut self, key: &str, value: impl AsRef<[u8]>) -> Self {
        self.pax.push((key.to_owned(), value.as_ref().to_vec()));
        self
    }
    pub fn xattr(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.pax(&format!("SCHILY.xattr.{name}"), value)
    }
    pub fn gnu(mut self) -> Self {
        self.gnu_names = true;
        self
    }
    /// States another size than that of the data.
    pub fn size(mut self, size: u64) -> Self {
        self.size = Some(size);
        self
    }
    /// Replaces the header's last bytes, from 345 on, and makes it GNU's.
    pub fn tail(mut self, tail: Vec<u8>) -> Self {
        self.header_tail = Some(tail);
        self
    }
}

fn octal(value: u64, width: usize) -> Vec<u8> {
    let text = format!("{value:0width$o}", width = width - 1);
    if text.len() < width {
        let mut bytes = text.into_bytes();
        bytes.push(0);
        return bytes;
    }
    // GNU's base-256 form.
    let mut bytes = vec![0; width];
    bytes[width - 8..].copy_from_slice(&value.to_be_bytes());
    bytes[0] |= 0x80;
    bytes
}

fn put(out: &mut Vec<u8>, e: &E, name: &[u8], link: &[u8], size: u64) {
    let mut h = vec![0u8; 512];
    h[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    h[100..108].copy_from_slice(&octal(e.mode.into(), 8));
    h[108..116].copy_from_slice(&octal(e.uid, 8));
    h[116..124].copy_from_slice(&octal(e.gid, 8));
    h[124..136].copy_from_slice(&octal(size, 12));
    h[136..148].copy_from_slice(&octal(e.mtime, 12));
    h[156] = e.kind;
    h[157..157 + link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
    h[257..265].copy_from_slice(if e.gnu_names || e.header_tail.is_some() { b"ustar  \0" } else { b"ustar\x0000" });
    if let Some(tail) = &e.header_tail {
        h[345..345 + tail.len()].copy_from_slice(tail);
    }
    h[148..156].fill(b' ');
    let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.extend_from_slice(&h);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(512), 0);
}

/// Appends one member.
pub fn append(out: &mut Vec<u8>, e: &E) {
    let mut pax = e.pax.clone();
    if e.gnu_names {
        for (kind, text) in [(b'L', &e.name), (b'K', &e.link)] {
            if text.len() > 99 {
                let mut data = text.clone();
                data.push(0);
                put(
                    out,
                    &E { gnu_names: true, ..entry(kind, "././@LongLink") },
                    b"././@LongLink",
                    b"",
                    data.len() as u64,
                );
                out.extend_from_slice(&data);
                pad(out);
            }
        }
    } else {
        if e.name.len() > 100 {
            pax.push(("path".to_owned(), e.name.clone()));
        }
        if e.link.len() > 100 {
            pax.push(("linkpath".to_owned(), e.link.clone()));
        }
    }
    if !pax.is_empty() {
        let mut records = Vec::new();
        for (key, value) in &pax {
            let body = key.len() + value.len() + 3;
            let mut len = body + 1;
            while len != body + len.to_string().len() {
                len = body + len.to_string().len();
            }
            records.extend_from_slice(format!("{len} {key}=").as_bytes());
            records.extend_from_slice(value);
            records.push(b'\n');
        }
        put(out, &entry(b'x', "pax"), b"pax", b"", records.len() as u64);
        out.extend_from_slice(&records);
        pad(out);
    }
    put(out, e, &e.name, &e.link, e.size.unwrap_or(e.data.len() as u64));
    out.extend_from_slice(&e.data);
    pad(out);
}

/// A whole archive with its end marker.
pub fn tar(entries: &[E]) -> Vec<u8> {
    let mut out = Vec::new();
    for e in entries {
        append(&mut out, e);
    }
    out.resize(out.len() + 1024, 0);
    out
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    ::zstd::encode_all(bytes, 1).unwrap()
}
