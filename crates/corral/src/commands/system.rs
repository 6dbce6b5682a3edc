//! Nodes and versions.

use crate::cli::ServerArgs;
use crate::client::{Client, fetch};
use crate::output::{bytes, print_json, print_line, print_table};
use corral_api::catalogue::{NodeList, VersionInfo};
use serde_json::json;
use std::time::Duration;

/// `corral node ls`.
pub async fn nodes(client: &Client, json: bool) -> anyhow::Result<()> {
    let list: NodeList = fetch(client.get(&["v1", "nodes"])).await?;
    if json {
        return print_json(&list);
    }
    print_table(
        &["ID", "ACCEPTING", "LIVE", "QUEUED", "CPUS", "MEMORY FREE", "DISK FREE", "VERSION"],
        list.nodes.iter().map(|n| {
            vec![
                n.id.to_string(),
                if n.accepting { "yes" } else { "no" }.into(),
                format!("{}/{}", n.live, n.max_live),
                n.queued.to_string(),
                n.cpus.to_string(),
                format!("{} of {}", bytes(n.memory_available_bytes), bytes(n.memory_bytes)),
                format!("{} of {}", bytes(n.disk_available_bytes), bytes(n.disk_bytes)),
                n.version.clone(),
            ]
        }),
    )
}

/// `corral version`. A server that cannot be reached is not an error.
pub async fn version(args: &ServerArgs, json: bool) -> anyhow::Result<()> {
    let server = async {
        let client = Client::new(args).ok()?;
        let ask = fetch::<VersionInfo>(client.get(&["version"]));
        let info = tokio::time::timeout(Duration::from_secs(3), ask).await.ok()?.ok()?;
        Some((client.base().to_string(), info))
    };
    let (own, server) = (env!("CARGO_PKG_VERSION"), server.await);
    if json {
        let server = server.map(|(url, info)| json!({ "url": url, "version": info.version, "api": info.api }));
        return print_json(&json!({ "version": own, "server": server }));
    }
    print_line(&format!("corral {own}"))?;
    match server {
        Some((url, info)) => print_line(&format!("server {} (API {}) at {url}", info.version, info.api)),
        None => Ok(()),
    }
}
