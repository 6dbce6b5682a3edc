//! `RUN`: a command in the stage's sandbox, its output passed on as it comes.

use super::bench::Bench;
use super::error::Failure;
use super::report::Report;
use crate::refusal::Refusal;
use base64::Engine as _;
use bytes::BytesMut;
use corral_api::command::{ExecEvent, ExecSpec, Outcome, StreamName};
use corral_api::ids::SandboxId;
use corral_api::problem::ErrorKind;
use corral_dockerfile::RunStep;
use futures_util::StreamExt as _;

/// The longest event of a command's output.
const LINE_LIMIT: usize = 4 << 20;
/// How much of the output's end a failure tells.
const TAIL_BYTES: usize = 4096;

/// Bytes of a stream that make no whole character yet.
#[derive(Debug, Default)]
struct Text(Vec<u8>);

impl Text {
    /// The characters that are whole; those that cannot be are replaced.
    fn take(&mut self, bytes: &[u8]) -> String {
        self.0.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.0) {
            Ok(text) => text.len(),
            // Cut off at the end: the rest may come.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.0.len(),
        };
        let rest = self.0.split_off(whole);
        let text = String::from_utf8_lossy(&self.0).into_owned();
        self.0 = rest;
        text
    }
}

/// Runs a step's command to its end.
///
/// # Errors
/// It fails, cannot be started, or the node does not answer.
pub async fn run(bench: &Bench, id: &SandboxId, step: &RunStep, report: &Report) -> Result<(), Failure> {
    let spec = ExecSpec {
        argv: step.argv.clone(),
        env: step.env.clone(),
        cwd: Some(step.cwd.clone()),
        user: Some(if step.user.is_empty() { "0".to_owned() } else { step.user.clone() }),
        stdin: step.stdin.clone(),
        ..ExecSpec::default()
    };
    let started = bench.post(id, "/exec?stream=true", &spec).await.map_err(not_started)?;
    let mut body = started.into_body().into_data_stream();
    let broken = || Refusal::new(ErrorKind::UpstreamFailed, "the node broke off during the command");
    let mut held = BytesMut::new();
    let mut tail = String::new();
    let (mut out, mut err) = (Text::default(), Text::default());
    loop {
        let Some(end) = held.iter().position(|b| *b == b'\n') else {
            if held.len() > LINE_LIMIT {
                return Err(broken().into());
            }
            let piece = body.next().await.ok_or_else(broken)?.map_err(|_| broken())?;
            held.extend_from_slice(&piece);
            continue;
        };
        let line = held.split_to(end + 1);
        match serde_json::from_slice(&line).map_err(|_| broken())? {
            ExecEvent::Started { .. } => {}
            ExecEvent::Output { stream, base64, .. } => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(base64).map_err(|_| broken())?;
                let text = if stream == StreamName::Stdout { out.take(&bytes) } else { err.take(&bytes) };
                keep_tail(&mut tail, &text);
                report.output(stream, text).await;
            }
            ExecEvent::Ended { command } => return ended(command.end, tail),
            ExecEvent::Failed { problem } => return Err(not_started(problem.into())),
        }
    }
}

/// What the Dockerfile asks for and the image does not have is the build's failure.
fn not_started(refusal: Refusal) -> Failure {
    match refusal.problem.kind {
        ErrorKind::CommandNotStarted | ErrorKind::UnknownUser => Failure::build(refusal.problem.message),
        _ => refusal.into(),
    }
}

fn keep_tail(tail: &mut String, text: &str) {
    tail.push_str(text);
    if tail.len() > TAIL_BYTES {
        let mut cut = tail.len() - TAIL_BYTES;
        while !tail.is_char_boundary(cut) {
            cut += 1;
        }
        tail.drain(..cut);
    }
}

fn ended(end: Option<Outcome>, tail: String) -> Result<(), Failure> {
    let end = end.unwrap_or(Outcome::OutcomeUnknown);
    let text = match &end {
        Outcome::Exited { code: 0 } => return Ok(()),
        Outcome::Exited { code } => format!("the command exited with {code}"),
        Outcome::Signaled { oom: true, .. } => "the command used up its memory and was killed".to_owned(),
        Outcome::Signaled { name, .. } => format!("the command was killed by {name}"),
        Outcome::NotStarted { message } => format!("the command could not be started: {message}"),
        Outcome::TimedOut { .. } => "the command took too long".to_owned(),
        Outcome::SandboxEnded => "the sandbox ended during the command".to_owned(),
        Outcome::RolledBack => "the sandbox was rolled back during the command".to_owned(),
        Outcome::OutcomeUnknown => "what became of the command is not known".to_owned(),
    };
    let last = tail.trim_end().lines().next_back().unwrap_or_default();
    let text = if last.is_empty() { text } else { format!("{text}: {}", last.chars().take(300).collect::<String>()) };
    Err(Failure { exit_code: Some(end.shell_status()), output: Some(tail), ..Failure::build(text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_not_torn() {
        let mut text = Text::default();
        let bytes = "aé€".as_bytes();
        assert_eq!(text.take(&bytes[..2]), "a");
        assert_eq!(text.take(&bytes[2..5]), "é");
        assert_eq!(text.take(&bytes[5..]), "€");
        assert_eq!(text.take(b"\xff\xfea"), "\u{fffd}\u{fffd}a");
        let mut tail = String::new();
        keep_tail(&mut tail, &"é".repeat(TAIL_BYTES));
        assert!(tail.len() <= TAIL_BYTES && tail.starts_with('é'));
    }

    #[test]
    fn failures_tell_status_and_the_last_line() {
        let failure = ended(Some(Outcome::Exited { code: 3 }), "one\ntwo\n".to_owned()).unwrap_err();
        assert_eq!(failure.exit_code, Some(3));
        assert_eq!(failure.refusal.problem.message, "the command exited with 3: two");
        let failure = failure.in_step(2, 7, "RUN");
        assert_eq!(failure.refusal.problem.message, "Dockerfile line 7, RUN: the command exited with 3: two");
        assert!(ended(Some(Outcome::Exited { code: 0 }), String::new()).is_ok());
    }
}
