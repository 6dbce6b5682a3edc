//! Typed ids. All are lowercase letters and digits, so that they stand in DNS labels, paths and metrics unescaped.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Text that is not an id of the wanted sort.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {sort} id")]
pub struct IdError {
    sort: &'static str,
    text: String,
}

fn random_text(chars: usize) -> String {
    let mut bytes = vec![0u8; chars * 5 / 8 + 1];
    // The operating system's generator does not fail once the machine is up.
    getrandom::fill(&mut bytes).expect("the kernel's random generator answers");
    let mut text = data_encoding::BASE32_NOPAD.encode(&bytes).to_ascii_lowercase();
    text.truncate(chars);
    text
}

fn is_id_text(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $sort:literal, $prefix:literal, $len:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);
        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                if text.starts_with($prefix) && is_id_text(text) && $len.contains(&text.len()) {
                    Ok(Self(text.into()))
                } else {
                    Err(IdError { sort: $sort, text: text.chars().take(80).collect() })
                }
            }
        }
        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> { text.parse() }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String { id.0.into() }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.0) }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.0) }
        }
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .pattern(Some(concat!("^", $prefix, "[a-z0-9]+$")))
                    .into()
            }
        }
        impl utoipa::ToSchema for $name {}
    };
}

id_type!(
    /// A sandbox: `s`, four characters that name the node, and 100 random bits.
    SandboxId, "sandbox", "s", (10..=40)
);
id_type!(
    /// A command of a sandbox: `c` and 80 random bits.
    CommandId, "command", "c", (10..=40)
);
id_type!(
    /// A shell session of a sandbox: `h` and 80 random bits.
    SessionId, "session", "h", (10..=40)
);
id_type!(
    /// A node: four characters, the hint in every id it makes.
    NodeId, "node", "", (4..=4)
);

/// How many characters of a sandbox id name its node.
pub const NODE_HINT_LEN: usize = 4;

impl SandboxId {
    /// A fresh id on a node.
    pub fn new(node: &NodeId) -> Self {
        Self(format!("s{node}{}", random_text(20)).into())
    }

    /// The node that made this id.
    pub fn node_hint(&self) -> &str {
        &self.0[1..=NODE_HINT_LEN]
    }
}

impl CommandId {
    /// A fresh id.
    pub fn random() -> Self {
        Self(format!("c{}", random_text(16)).into())
    }
}

impl SessionId {
    /// A fresh id.
    pub fn random() -> Self {
        Self(format!("h{}", random_text(16)).into())
    }
}

impl NodeId {
    /// A fresh id, made once per data directory.
    pub fn random() -> Self {
        Self(random_text(NODE_HINT_LEN).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_dns_labels_and_name_their_node() {
        let node = NodeId::random();
        let id = SandboxId::new(&node);
        assert_eq!(id.node_hint(), node.as_str());
        assert!(id.as_str().len() <= 57, "room for a port and a dash in a DNS label");
        assert_eq!(id.as_str().parse::<SandboxId>().unwrap(), id);
        assert_ne!(SandboxId::new(&node), id);
    }

    #[test]
    fn other_text_is_refused() {
        for bad in ["", "s", "sABCD0123456789", "s../../../etc/passwd", "c0123456789abcdef", "s0123456789-abc"] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
        }
        assert!(serde_json::from_str::<SandboxId>("\"nope\"").is_err());
    }
}
