//! Nodes, events and versions.

use crate::cli::{EventsArgs, ServerArgs};
use crate::client::{Client, Lines, fetch, send};
use crate::output::{bytes, print_json, print_json_line, print_line, print_table};
use anyhow::Context as _;
use corral_api::catalogue::{NodeList, VersionInfo};
use corral_api::query::EventQuery;
use corral_api::sandbox::{Event, EventPage};
use serde_json::json;
use std::time::Duration;

/// Pause before a broken stream is opened again.
const RESUME_PAUSE: Duration = Duration::from_secs(1);

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

/// `corral events`.
pub async fn events(client: &Client, args: &EventsArgs, json: bool) -> anyhow::Result<()> {
    let mut query = EventQuery { after: args.after, sandbox_id: args.sandbox.clone(), limit: None };
    if args.follow {
        return follow(client, query, json).await;
    }
    loop {
        let page: EventPage = fetch(client.get(&["v1", "events"]).query(&query)).await?;
        if page.gap {
            eprintln!("corral: older events were dropped");
        }
        let Some(last) = page.events.last().map(|event| event.seq) else { return Ok(()) };
        page.events.iter().try_for_each(|event| print_event(event, json))?;
        if last >= page.last_seq {
            return Ok(());
        }
        query.after = Some(last);
    }
}

/// Follows the stream, and resumes it where it breaks, until the server is gone or refuses.
async fn follow(client: &Client, mut query: EventQuery, json: bool) -> anyhow::Result<()> {
    loop {
        let request = client.get(&["v1", "events"]).query(&query).header("accept", "text/event-stream");
        let mut lines = Lines::new(send(request).await?);
        while let Ok(Some(line)) = lines.next().await {
            let line = String::from_utf8_lossy(&line);
            let Some(data) = line.strip_prefix("data:") else { continue };
            // Remarks of a later version are passed over.
            if let Ok(event) = serde_json::from_str::<Event>(data.trim()) {
                query.after = Some(event.seq);
                print_event(&event, json)?;
            }
        }
        tokio::time::sleep(RESUME_PAUSE).await;
    }
}

fn print_event(event: &Event, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json_line(event);
    }
    let what = serde_json::to_string(&event.what).context("cannot write the event")?;
    print_line(&format!("{:>6}  {}  {}  {what}", event.seq, event.at, event.sandbox_id))
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
