//! A file tree as it is to be written.

/// An extended attribute: full name and value.
pub type Xattr = (Vec<u8>, Vec<u8>);

/// A node of a [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub(crate) u32);

/// Block number that stands for a chunk of zeroes.
pub const HOLE: u32 = u32::MAX;

/// Attributes of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change: seconds since 1970 and nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes, in any order.
    pub xattrs: Vec<Xattr>,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory: names without `.` and `..`, in any order.
    Directory(Vec<(Vec<u8>, NodeId)>),
    /// A regular file: its size, and for each of its chunks the data block it begins at, or [`HOLE`].
    File {
        /// Bytes.
        size: u64,
        /// One for each chunk.
        blocks: Vec<u32>,
    },
    /// A symbolic link: where it points.
    Link(Vec<u8>),
    /// A device, by the kernel's encoding of its number (`new_encode_dev`), FIFO or socket.
    Special(u32),
}

/// One file; more than one name may lead to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Attributes.
    pub meta: Meta,
    /// What it is.
    pub kind: Kind,
}

/// A whole tree. Nodes are added before the directory that names them; the last one is the root.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    pub(crate) nodes: Vec<Node>,
}

impl Tree {
    /// An empty tree: it becomes one when its root is added.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a node.
    pub fn add(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        NodeId(self.nodes.len() as u32 - 1)
    }

    /// Nodes added so far.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}
