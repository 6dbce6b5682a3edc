//! Laying a tree out as an image: places first, since a directory's size depends on names alone, then bytes.

use super::directory::{self, Plan, check_name, type_of};
use super::inode::{Inode, Layout, encode_xattrs};
use super::superblock::{self, Super};
use super::tree::{Kind, NodeId, Tree};
use super::{INODE, SLOT, SUPER_BYTES, SUPER_OFFSET, TreeError};
use crate::{BLOCK, CHUNK};
use std::collections::VecDeque;

/// Bytes of a chunk's entry: with the number of its device.
const CHUNK_ENTRY: u64 = 8;
/// Format of a chunk table: entries with devices, chunks of so many blocks (as a power of two).
const CHUNK_FORMAT: u32 = 0x20 | (CHUNK / BLOCK).ilog2();
/// Number of the device that the data is.
const DATA_DEVICE: u16 = 1;

/// Where a node goes.
#[derive(Debug)]
struct Placed {
    id: NodeId,
    offset: u64,
    layout: Layout,
    xattrs: Vec<u8>,
    /// For directories.
    plan: Option<Plan>,
    /// First block of what does not lie behind the inode.
    block: u32,
    parent: NodeId,
}

/// What lies behind an inode: its bytes and what they have to be aligned to.
struct Tail {
    bytes: u64,
    align: u64,
    in_one_block: bool,
}

/// Writes the metadata of a tree whose data takes `data_blocks` blocks.
///
/// # Errors
/// Something of the tree has no place in EROFS.
pub fn write(tree: &Tree, data_blocks: u64) -> Result<Vec<u8>, TreeError> {
    let data_blocks = u32::try_from(data_blocks).map_err(|_| TreeError::TooLarge("data"))?;
    let Some(root) = tree.nodes.len().checked_sub(1) else { return Err(TreeError::TooLarge("no root")) };
    let mut links = vec![0_u32; tree.nodes.len()];
    let sorted = sorted_entries(tree, &mut links)?;
    let (mut placed, end) = place(tree, &sorted, NodeId(root as u32))?;
    // Blocks of directories and long links follow the inodes.
    let mut next = u32::try_from(end.div_ceil(BLOCK)).map_err(|_| TreeError::TooLarge("inodes"))?;
    for p in &mut placed {
        let blocks = blocks_of(&tree.nodes[p.id.0 as usize].kind, p);
        if blocks > 0 {
            p.block = next;
            next = next.checked_add(blocks).ok_or(TreeError::TooLarge("directories"))?;
        }
    }
    let mut nids = vec![0_u64; tree.nodes.len()];
    placed.iter().for_each(|p| nids[p.id.0 as usize] = p.offset / SLOT);
    let mut out = vec![0; next as usize * BLOCK as usize];
    for (number, p) in placed.iter().enumerate() {
        put_node(&mut out, tree, &sorted, &nids, &links, p, number as u32 + 1);
    }
    let sizes = Super { blocks: next, data_blocks, inodes: placed.len() as u64, root: nids[root] };
    superblock::put(&mut out, &sizes);
    Ok(out)
}

/// Entries of each directory by name, and how many names each node has.
fn sorted_entries(tree: &Tree, links: &mut [u32]) -> Result<Vec<Vec<(usize, NodeId)>>, TreeError> {
    let mut all = Vec::with_capacity(tree.nodes.len());
    for (at, node) in tree.nodes.iter().enumerate() {
        let Kind::Directory(entries) = &node.kind else {
            all.push(Vec::new());
            continue;
        };
        let mut order: Vec<(usize, NodeId)> = entries.iter().enumerate().map(|(n, (_, id))| (n, *id)).collect();
        order.sort_unstable_by(|(a, _), (b, _)| entries[*a].0.cmp(&entries[*b].0));
        for pair in order.windows(2) {
            if entries[pair[0].0].0 == entries[pair[1].0].0 {
                return Err(TreeError::Twice(String::from_utf8_lossy(&entries[pair[0].0].0).into_owned()));
            }
        }
        for (name, id) in entries {
            check_name(name)?;
            let child = id.0 as usize;
            links[child] += 1;
            if matches!(tree.nodes[child].kind, Kind::Directory(_)) {
                links[at] += 1;
            }
        }
        // Its own name in its parent was or will be counted; `.` is.
        links[at] += 1;
        all.push(order);
    }
    // The root is its own parent.
    if let Some(root) = links.last_mut() {
        *root += 1;
    }
    Ok(all)
}

/// Gives every node reached from the root its place, by level; returns where the inodes end.
fn place(tree: &Tree, sorted: &[Vec<(usize, NodeId)>], root: NodeId) -> Result<(Vec<Placed>, u64), TreeError> {
    let mut placed = Vec::with_capacity(tree.nodes.len());
    let mut seen = vec![false; tree.nodes.len()];
    let mut queue = VecDeque::from([root]);
    let mut end = SUPER_OFFSET + 2 * SUPER_BYTES;
    let mut put = |id: NodeId, parent: NodeId| -> Result<bool, TreeError> {
        if std::mem::replace(&mut seen[id.0 as usize], true) {
            return Ok(false);
        }
        let node = &tree.nodes[id.0 as usize];
        let xattrs = encode_xattrs(&node.meta.xattrs)?;
        let plan = match &node.kind {
            Kind::Directory(entries) => Some(plan_of(entries, &sorted[id.0 as usize])),
            _ => None,
        };
        let head = INODE + xattrs.len() as u64;
        let (layout, tail) = tail_of(&node.kind, plan.as_ref(), head)?;
        let mut offset = end.next_multiple_of(SLOT);
        let begin = |offset: u64| (offset + head).next_multiple_of(tail.align);
        if tail.in_one_block && begin(offset) / BLOCK != (begin(offset) + tail.bytes - 1) / BLOCK {
            // A whole block has room for it: see `tail_of`.
            offset = offset.next_multiple_of(BLOCK);
        }
        end = begin(offset) + tail.bytes;
        placed.push(Placed { id, offset, layout, xattrs, plan, block: 0, parent });
        Ok(true)
    };
    put(root, root)?;
    while let Some(dir) = queue.pop_front() {
        for (_, child) in &sorted[dir.0 as usize] {
            if put(*child, dir)? && matches!(tree.nodes[child.0 as usize].kind, Kind::Directory(_)) {
                queue.push_back(*child);
            }
        }
    }
    Ok((placed, end))
}

/// Names of a directory in order, with `.` and `..` among them.
fn names<'a>(entries: &'a [(Vec<u8>, NodeId)], order: &'a [(usize, NodeId)]) -> impl Iterator<Item = &'a [u8]> {
    let before = |limit: &'static [u8]| order.partition_point(move |(n, _)| entries[*n].0.as_slice() < limit);
    let (dot, dots) = (before(b"."), before(b".."));
    let named = |range: std::ops::Range<usize>| order[range].iter().map(|(n, _)| entries[*n].0.as_slice());
    named(0..dot).chain([&b"."[..]]).chain(named(dot..dots)).chain([&b".."[..]]).chain(named(dots..order.len()))
}

fn plan_of(entries: &[(Vec<u8>, NodeId)], order: &[(usize, NodeId)]) -> Plan {
    directory::plan(names(entries, order))
}

fn tail_of(kind: &Kind, plan: Option<&Plan>, head: u64) -> Result<(Layout, Tail), TreeError> {
    let nothing = Tail { bytes: 0, align: 1, in_one_block: false };
    let inline = |bytes: u64| {
        let fits = bytes > 0 && head + bytes <= BLOCK;
        let tail = Tail { bytes: if fits { bytes } else { 0 }, align: 1, in_one_block: fits };
        (if fits { Layout::Inline } else { Layout::Plain }, tail)
    };
    match kind {
        Kind::Directory(_) => Ok(inline(plan.map_or(0, |p| p.size) % BLOCK)),
        Kind::Link(target) if target.is_empty() || target.len() as u64 >= BLOCK => {
            Err(TreeError::LinkTarget(target.len()))
        }
        Kind::Link(target) => Ok(inline(target.len() as u64)),
        Kind::File { size, blocks } => {
            let chunks = size.div_ceil(CHUNK);
            if chunks != blocks.len() as u64 {
                return Err(TreeError::TooLarge("a file's table of chunks"));
            }
            let tail = Tail { bytes: chunks * CHUNK_ENTRY, align: CHUNK_ENTRY, in_one_block: false };
            Ok((Layout::Chunks, if chunks == 0 { nothing } else { tail }))
        }
        Kind::Special(_) => Ok((Layout::Plain, nothing)),
    }
}

/// Blocks that a node takes beside its inode.
fn blocks_of(kind: &Kind, p: &Placed) -> u32 {
    let size = match kind {
        Kind::Directory(_) => p.plan.as_ref().map_or(0, |plan| plan.size),
        Kind::Link(target) => target.len() as u64,
        _ => 0,
    };
    let whole = if p.layout == Layout::Inline { size / BLOCK } else { size.div_ceil(BLOCK) };
    whole as u32
}

fn put_node(
    out: &mut [u8],
    tree: &Tree,
    sorted: &[Vec<(usize, NodeId)>],
    nids: &[u64],
    links: &[u32],
    p: &Placed,
    number: u32,
) {
    let node = &tree.nodes[p.id.0 as usize];
    let mut put = |at: u64, bytes: &[u8]| out[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    let behind = p.offset + INODE + p.xattrs.len() as u64;
    let content = match &node.kind {
        Kind::Directory(entries) => directory_bytes(tree, entries, &sorted[p.id.0 as usize], nids, p),
        Kind::Link(target) => target.clone(),
        _ => Vec::new(),
    };
    let (size, detail) = match &node.kind {
        Kind::File { size, blocks } => {
            let mut at = behind.next_multiple_of(CHUNK_ENTRY);
            for block in blocks {
                // The first two bytes are reserved.
                put(at + 2, &DATA_DEVICE.to_le_bytes());
                put(at + 4, &block.to_le_bytes());
                at += CHUNK_ENTRY;
            }
            (*size, CHUNK_FORMAT)
        }
        Kind::Special(device) => (0, *device),
        _ => (content.len() as u64, p.block),
    };
    if p.layout == Layout::Inline {
        let whole = content.len() / BLOCK as usize * BLOCK as usize;
        put(behind, &content[whole..]);
        put(u64::from(p.block) * BLOCK * u64::from(whole > 0), &content[..whole]);
    } else if !content.is_empty() {
        put(u64::from(p.block) * BLOCK, &content);
    }
    put(p.offset + INODE, &p.xattrs);
    let inode = Inode {
        meta: &node.meta,
        layout: p.layout,
        size,
        detail,
        number,
        links: links[p.id.0 as usize],
        xattr_bytes: p.xattrs.len() as u64,
    };
    put(p.offset, &inode.encode());
}

fn directory_bytes(
    tree: &Tree,
    entries: &[(Vec<u8>, NodeId)],
    order: &[(usize, NodeId)],
    nids: &[u64],
    p: &Placed,
) -> Vec<u8> {
    const DIRECTORY: u8 = 2;
    let mut ids = order.iter();
    let mut listed: Vec<directory::Entry<'_>> = Vec::with_capacity(order.len() + 2);
    for name in names(entries, order) {
        listed.push(match name {
            b"." => (name, nids[p.id.0 as usize], DIRECTORY),
            b".." => (name, nids[p.parent.0 as usize], DIRECTORY),
            _ => {
                let id = ids.next().map_or(p.id, |(_, id)| *id);
                (name, nids[id.0 as usize], type_of(tree.nodes[id.0 as usize].meta.mode))
            }
        });
    }
    p.plan.as_ref().map_or_else(Vec::new, |plan| plan.encode(&listed))
}
