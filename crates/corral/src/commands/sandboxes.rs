//! Sandboxes: create, list, act on several.

use crate::cli::{CreateArgs, LsArgs, SandboxArgs};
use crate::client::{ApiError, Client, fetch, fetch_pages};
use crate::output::{bytes, print_error, print_json, print_json_line, print_line, print_table, printable, share, tell};
use corral_api::catalogue::{BatchItem, BatchResult, CommandList};
use corral_api::command::{CommandStatus, Outcome};
use corral_api::environment::Limits;
use corral_api::image::{ImageRecord, SnapshotSpec};
use corral_api::sandbox::{
    Checkpoint, EndStatus, ForkSpec, RollbackSpec, SandboxPage, SandboxSpec, SandboxStats, SandboxStatus,
};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Tries of a create that is refused for now, and the time between them at least.
const CREATE_TRIES: u32 = 8;
const CREATE_PAUSE: Duration = Duration::from_millis(200);

/// The specification the options describe.
pub fn spec(environment: &str, args: &SandboxArgs) -> SandboxSpec {
    let usual = Limits::default();
    SandboxSpec {
        environment: Some(environment.to_owned()),
        limits: Limits {
            memory_mib: args.memory_mib.unwrap_or(usual.memory_mib),
            cpus: args.cpus.unwrap_or(usual.cpus),
            disk_mib: args.disk_mib.unwrap_or(usual.disk_mib),
            pids: args.pids.unwrap_or(usual.pids),
            open_files: args.open_files.unwrap_or(usual.open_files),
            ..usual
        },
        env: args.env.iter().cloned().collect(),
        entrypoint: args.startup.entrypoint(),
        cmd: args.startup.cmd(),
        labels: args.labels.iter().cloned().collect(),
        hostname: args.hostname.clone().unwrap_or_default(),
        idle_ttl_ms: args.idle_ttl.unwrap_or_default(),
        max_ttl_ms: args.max_ttl.unwrap_or_default(),
        allow_setuid: args.allow_setuid,
        ..SandboxSpec::default()
    }
}

/// Creates a sandbox. Refusals that may pass are tried again under one idempotency key, so that no try makes a second
/// sandbox. Each wait is told with its reason, on standard error.
///
/// # Errors
/// The server refuses for good or cannot be reached.
pub async fn make(client: &Client, spec: &SandboxSpec, json: bool) -> anyhow::Result<SandboxStatus> {
    let key = format!("cli-{}", corral_api::ids::CommandId::random());
    let mut tries = 1;
    loop {
        let request = client.post(&["v1", "sandboxes"]).header("idempotency-key", &key).json(spec);
        match fetch(request).await {
            Ok(sandbox) => return Ok(sandbox),
            Err(error) => {
                let wait = error.downcast_ref::<ApiError>().and_then(ApiError::retry_after);
                let Some(wait) = wait.filter(|_| tries < CREATE_TRIES) else { return Err(error) };
                let wait = wait.max(CREATE_PAUSE);
                tries += 1;
                if !json {
                    let (reason, seconds) = (printable(&error.to_string()), wait.as_secs_f64());
                    tell(format_args!("corral: {reason}; try {tries} of {CREATE_TRIES} in {seconds:.1} s\n"));
                }
                tokio::time::sleep(wait).await;
            }
        }
    }
}

/// `corral create`.
pub async fn create(client: &Client, args: &CreateArgs, json: bool) -> anyhow::Result<()> {
    let sandbox = make(client, &spec(&args.environment, &args.sandbox), json).await?;
    if json { print_json(&sandbox) } else { print_line(sandbox.id.as_str()) }
}

/// `corral snapshot`.
pub async fn snapshot(client: &Client, id: &str, name: &str, scrub: &[String], json: bool) -> anyhow::Result<()> {
    let spec = SnapshotSpec { name: name.to_owned(), scrub: scrub.to_vec() };
    let image: ImageRecord = fetch(client.post(&["v1", "sandboxes", id, "snapshots"]).json(&spec)).await?;
    if json {
        return print_json(&image);
    }
    let report = image.snapshot.map(|origin| origin.report).unwrap_or_default();
    let (frozen, size) = (report.frozen_us as f64 / 1e3, bytes(report.size_bytes));
    let scrubbed =
        if report.scrubbed_count > 0 { format!(", {} left out", report.scrubbed_count) } else { String::new() };
    print_line(&format!(
        "{}: {} entries, {} of them deletions, {size}{scrubbed}; stood still for {frozen:.1} ms",
        image.name, report.entries, report.deletions
    ))
}

/// `corral checkpoint`.
pub async fn checkpoint(client: &Client, id: &str, json: bool) -> anyhow::Result<()> {
    let made: Checkpoint = fetch(client.post(&["v1", "sandboxes", id, "checkpoints"])).await?;
    if json { print_json(&made) } else { print_line(&made.number.to_string()) }
}

/// `corral rollback`.
pub async fn rollback(client: &Client, id: &str, checkpoint: u32, json: bool) -> anyhow::Result<()> {
    let to = RollbackSpec { checkpoint };
    let sandbox: SandboxStatus = fetch(client.post(&["v1", "sandboxes", id, "rollback"]).json(&to)).await?;
    if json { print_json(&sandbox) } else { print_line(sandbox.id.as_str()) }
}

/// `corral fork`.
pub async fn fork(client: &Client, id: &str, count: u32, json: bool) -> anyhow::Result<ExitCode> {
    let key = format!("cli-{}", corral_api::ids::CommandId::random());
    let spec = ForkSpec { count, labels: None, idempotency_key: Some(key) };
    let result: BatchResult = fetch(client.post(&["v1", "sandboxes", id, "fork"]).json(&spec)).await?;
    if json {
        print_json(&result)?;
    }
    let mut code = ExitCode::SUCCESS;
    for item in &result.items {
        match item {
            BatchItem::Sandbox(sandbox) if !json => print_line(sandbox.id.as_str())?,
            BatchItem::Sandbox(_) => {}
            BatchItem::Problem(problem) => {
                code = ExitCode::FAILURE;
                if !json {
                    print_error(false, &anyhow::anyhow!("{problem}"));
                }
            }
        }
    }
    Ok(code)
}

/// `corral ls`.
pub async fn list(client: &Client, args: &LsArgs, json: bool) -> anyhow::Result<()> {
    let mut query: Vec<(&str, String)> = args.labels.iter().map(|(k, v)| ("label", format!("{k}={v}"))).collect();
    query.extend(args.environment.iter().map(|name| ("environment", name.clone())));
    let mut sandboxes = pages(client, &query, args.state.as_deref()).await?;
    if args.all && args.state.is_none() {
        // A list names ended sandboxes only when they are asked for.
        sandboxes.extend(pages(client, &query, Some("ended")).await?);
    }
    if json {
        return print_json(&SandboxPage { sandboxes, next_cursor: None });
    }
    if args.quiet {
        return sandboxes.iter().try_for_each(|sandbox| print_line(sandbox.id.as_str()));
    }
    print_table(
        &["ID", "STATE", "ENVIRONMENT", "CREATED", "LABELS"],
        sandboxes.iter().map(|s| {
            let labels: Vec<_> = s.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
            vec![s.id.to_string(), state_text(s), s.environment.clone(), s.created_at.clone(), labels.join(",")]
        }),
    )
}

/// Every page of a list.
async fn pages(client: &Client, query: &[(&str, String)], state: Option<&str>) -> anyhow::Result<Vec<SandboxStatus>> {
    let request = || client.get(&["v1", "sandboxes"]).query(query).query(&[("state", state)]);
    fetch_pages(request, |page: SandboxPage| (page.sandboxes, page.next_cursor)).await
}

/// The state, with the reason of an end.
fn state_text(sandbox: &SandboxStatus) -> String {
    let state = wire_name(&sandbox.state);
    match &sandbox.end {
        Some(end) => format!("{state} ({})", wire_name(&end.reason)),
        None => state,
    }
}

/// Why a sandbox ended, for a person.
pub fn why(end: &EndStatus) -> String {
    let reason = wire_name(&end.reason);
    if end.message.is_empty() { reason } else { format!("{reason}: {}", end.message) }
}

/// A value of an enumeration as the API writes it.
pub fn wire_name(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or("?").to_owned()
}

/// `corral ps`.
pub async fn commands(client: &Client, id: &str, json: bool) -> anyhow::Result<()> {
    let list: CommandList = fetch(client.get(&["v1", "sandboxes", id, "commands"])).await?;
    if json {
        return print_json(&list);
    }
    print_table(
        &["ID", "STATUS", "STARTED", "STDOUT", "STDERR", "COMMAND"],
        list.commands.iter().map(|c| {
            vec![
                c.id.to_string(),
                end_text(c),
                c.started_at.clone(),
                bytes(c.stdout.total_bytes),
                bytes(c.stderr.total_bytes),
                c.argv.join(" ").chars().take(80).collect(),
            ]
        }),
    )
}

fn end_text(command: &CommandStatus) -> String {
    command.end.as_ref().map_or_else(|| "running".into(), outcome_text)
}

/// How a command ended, in a few words.
pub fn outcome_text(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exited { code } => format!("exited {code}"),
        Outcome::Signaled { name, oom: true, .. } => format!("{name} (out of memory)"),
        Outcome::Signaled { name, .. } => name.clone(),
        Outcome::TimedOut { .. } => "timed out".into(),
        Outcome::SandboxEnded => "sandbox ended".into(),
        Outcome::RolledBack => "rolled back".into(),
        Outcome::OutcomeUnknown => "unknown".into(),
        Outcome::NotStarted { message } => format!("not started: {message}"),
    }
}

/// `corral stats`.
pub async fn stats(client: &Client, id: &str, json: bool) -> anyhow::Result<()> {
    let stats: SandboxStats = fetch(client.get(&["v1", "sandboxes", id, "stats"])).await?;
    if json {
        return print_json(&stats);
    }
    print_table(
        &["CPU", "MEMORY", "PEAK", "PIDS", "DISK", "OOM KILLS", "READ", "FETCHED", "IMAGE READ"],
        [vec![
            format!("{:.2} s", stats.cpu_ms as f64 / 1000.0),
            bytes(stats.memory_bytes),
            bytes(stats.memory_peak_bytes),
            stats.pids.to_string(),
            bytes(stats.disk_bytes),
            stats.oom_kills.to_string(),
            bytes(stats.read_bytes),
            bytes(stats.fetched_bytes),
            share(stats.image_touched_chunks, stats.image_chunks),
        ]],
    )
}

/// What is done to each of several sandboxes.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    Remove,
    Pause,
    Resume,
}

/// Acts on several sandboxes; goes on past failures and reports each.
pub async fn each(client: &Client, ids: &[String], action: Action, json: bool) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for id in ids {
        let request = match action {
            Action::Remove => client.delete(&["v1", "sandboxes", id]),
            Action::Pause => client.post(&["v1", "sandboxes", id, "pause"]),
            Action::Resume => client.post(&["v1", "sandboxes", id, "resume"]),
        };
        match fetch::<SandboxStatus>(request).await {
            Ok(sandbox) if json => print_json_line(&sandbox)?,
            Ok(_) => print_line(id)?,
            Err(error) => {
                print_error(json, &error);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
