//! What bytes that are no tar look like, for the person who sent them.

/// First bytes of forms that people take for an archive or an image, and what they are called.
const FORMS: &[(&[u8], &str)] = &[
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a rar archive"),
    (b"!<arch>\n", "a Debian package or an ar archive"),
    (b"\xed\xab\xee\xdb", "an RPM package"),
    (b"070701", "a cpio archive"),
    (b"hsqs", "a squashfs image"),
    (b"QFI\xfb", "a qcow2 disk image"),
    (b"\x7fELF", "an ELF program"),
    (b"MZ", "a Windows program"),
    (b"%PDF", "a PDF"),
    (b"#!", "a script"),
];

/// Bytes shown of what is not known.
const SHOWN: usize = 8;

/// What the first bytes of a file are of, where that can be told.
fn known(head: &[u8]) -> Option<&'static str> {
    if head.get(257..262) == Some(b"ustar") {
        return Some("a tar archive whose first header is damaged");
    }
    let form = FORMS.iter().find(|(magic, _)| head.starts_with(magic));
    form.map(|(_, name)| *name).or_else(|| text(head))
}

fn text(head: &[u8]) -> Option<&'static str> {
    let whole = match std::str::from_utf8(head) {
        Ok(text) => text,
        // The head may end within a character.
        Err(e) if e.error_len().is_none() => std::str::from_utf8(&head[..e.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    if whole.is_empty() || whole.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) {
        return None;
    }
    Some(match whole.trim_start().chars().next() {
        Some('{' | '[') => "JSON",
        Some('<') => "HTML or XML",
        _ => "text",
    })
}

/// Whether the first bytes, fewer than a tar's header has, are of something that is no tar.
pub(crate) fn is_foreign(head: &[u8]) -> bool {
    known(head).is_some()
}

/// Says what a file is that begins with these bytes, as the end of a sentence.
pub(crate) fn of(head: &[u8]) -> String {
    if head.is_empty() {
        return "it is empty".to_owned();
    }
    match known(head) {
        Some(form) => format!("its content starts like {form}"),
        None => {
            let shown: Vec<String> = head.iter().take(SHOWN).map(|b| format!("{b:02x}")).collect();
            format!("its content starts with the bytes {}", shown.join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_send_is_told() {
        let mut damaged = [0u8; 512];
        damaged[257..262].copy_from_slice(b"ustar");
        for (head, says) in [
            (&b""[..], "is empty"),
            (b"PK\x03\x04rest", "a zip archive"),
            (b"\xfd7zXZ\0", "xz"),
            (b"{\"a\": 1}", "JSON"),
            (b"\n<html>", "HTML"),
            ("gr\u{fc}n".as_bytes(), "text"),
            (b"gr\xc3", "text"),
            (b"\0\x01\x02", "the bytes 00 01 02"),
            (&damaged, "a tar archive whose first header is damaged"),
        ] {
            assert!(of(head).contains(says), "{head:?}: {}", of(head));
        }
        assert!(!is_foreign(b"name\0\0\0"), "the head of a tar that was cut");
    }
}
