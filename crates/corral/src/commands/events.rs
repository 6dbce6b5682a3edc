//! Events: a page, or the stream as they come.

use super::sandboxes::{outcome_text, why, wire_name};
use crate::cli::EventsArgs;
use crate::client::{Client, Lines, fetch, send};
use crate::output::{print_json_line, print_line, printable, tell};
use corral_api::query::EventQuery;
use corral_api::sandbox::{Event, EventKind, EventPage};
use std::time::Duration;

/// Pause before a broken stream is opened again.
const RESUME_PAUSE: Duration = Duration::from_secs(1);

/// `corral events`.
pub async fn events(client: &Client, args: &EventsArgs, json: bool) -> anyhow::Result<()> {
    let mut query = EventQuery { after: args.after, sandbox_id: args.sandbox.clone(), limit: None };
    if !json {
        // Events come one by one: the columns have fixed widths.
        print_line(&columns("SEQ", "TIME", "SANDBOX", "EVENT", "DETAILS"))?;
    }
    if args.follow {
        return follow(client, query, json).await;
    }
    loop {
        let page: EventPage = fetch(client.get(&["v1", "events"]).query(&query)).await?;
        if page.gap {
            tell(format_args!("corral: older events were dropped\n"));
        }
        let Some(last) = page.events.last().map(|event| event.seq) else { return Ok(()) };
        page.events.iter().try_for_each(|event| print_event(event, json))?;
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
    let (what, details) = describe(&event.what);
    let (seq, sandbox) = (event.seq.to_string(), event.sandbox_id.to_string());
    print_line(&columns(&seq, &event.at, &sandbox, &what, &details))
}

/// What happened, and what more there is to say in a few words.
fn describe(what: &EventKind) -> (String, String) {
    match what {
        EventKind::State { state, end: None } => (wire_name(state), String::new()),
        EventKind::State { state, end: Some(end) } => (wire_name(state), why(end)),
        EventKind::CommandStarted { command_id } => ("command started".into(), command_id.to_string()),
        EventKind::CommandEnded { command_id, outcome } => {
            ("command ended".into(), format!("{command_id} {}", outcome_text(outcome)))
        }
        EventKind::ReadFailed { layer, message, .. } => ("read failed".into(), format!("{layer}: {message}")),
    }
}

fn columns(seq: &str, at: &str, sandbox: &str, what: &str, details: &str) -> String {
    let line = format!("{seq:>8}  {at:<24}  {sandbox:<25}  {what:<15}  {details}");
    printable(line.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_api::command::Outcome;
    use corral_api::sandbox::{EndReason, EndStatus, State};

    #[test]
    fn events_are_told_in_words() {
        let told = |what| {
            let (what, details) = describe(&what);
            columns("7", "2026-01-01T00:00:00Z", "s1", &what, &details)
        };
        let plain = told(EventKind::State { state: State::Running, end: None });
        assert!(
            plain.starts_with("       7  2026-01-01T00:00:00Z      s1 ") && plain.ends_with("  running"),
            "{plain}"
        );
        let end = EndStatus::new(EndReason::MaxTtl, "it lived for its 5 ms");
        let ended = told(EventKind::State { state: State::Ended, end: Some(end) });
        assert!(ended.contains("  ended            max_ttl: it lived for its 5 ms"), "{ended}");
        let command_id = "c0123456789abcdef".parse().unwrap();
        let outcome = Outcome::NotStarted { message: "no \u{1b}[2J".into() };
        let command = told(EventKind::CommandEnded { command_id, outcome });
        assert!(command.ends_with("command ended    c0123456789abcdef not started: no \u{fffd}[2J"), "{command}");
    }
}
