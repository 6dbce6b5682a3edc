//! `corral doctor`: what this machine can do, found out by trying, not by version numbers.
//!
//! Every probe leaves the machine as it was: mounts are detached ones that go with their descriptor.

mod cgroups;
mod kernel;
mod storage;

use crate::cli::DoctorArgs;
use crate::output::{print_json, print_table};
use anyhow::Context as _;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It works.
    Ok,
    /// It works in part, or could not be tried.
    Degraded,
    /// It does not work.
    Missing,
}

/// One feature.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub feature: &'static str,
    /// What was found.
    pub state: State,
    /// Whether nothing works without it.
    pub required: bool,
    /// How it was found out.
    pub detail: String,
    /// What it costs when it does not work.
    pub without: &'static str,
}

/// A probe's finding before it is put into a row.
type Found = (State, String);

/// It works.
fn ok(detail: impl Into<String>) -> Found {
    (State::Ok, detail.into())
}

/// It works in part.
fn degraded(detail: impl Into<String>) -> Found {
    (State::Degraded, detail.into())
}

/// It does not work.
fn missing(detail: impl Into<String>) -> Found {
    (State::Missing, detail.into())
}

fn needed(feature: &'static str, without: &'static str, (state, detail): Found) -> Row {
    Row { feature, state, required: true, detail, without }
}

fn useful(feature: &'static str, without: &'static str, (state, detail): Found) -> Row {
    Row { feature, state, required: false, detail, without }
}

fn rows(data_dir: &Path) -> Vec<Row> {
    let mut rows = kernel::rows();
    rows.extend(storage::rows(data_dir));
    rows.extend(cgroups::rows());
    rows
}

/// Prints the table. Exit code 1 when something required is missing.
///
/// # Errors
/// Standard output is closed.
pub fn run(args: &DoctorArgs, json: bool) -> anyhow::Result<ExitCode> {
    let data_dir = std::path::absolute(&args.data_dir).context("the data directory has no absolute path")?;
    let rows = rows(&data_dir);
    let lacking = rows.iter().any(|row| row.required && row.state == State::Missing);
    if json {
        print_json(&serde_json::json!({ "usable": !lacking, "features": rows }))?;
    } else {
        print_table(
            &["FEATURE", "STATE", "FOUND", "WITHOUT IT"],
            rows.iter().map(|row| {
                let state = match (row.state, row.required) {
                    (State::Ok, _) => "ok",
                    (State::Degraded, _) => "degraded",
                    (State::Missing, true) => "MISSING",
                    (State::Missing, false) => "missing",
                };
                let without = if row.state == State::Ok { "" } else { row.without };
                vec![row.feature.into(), state.into(), row.detail.clone(), without.into()]
            }),
        )?;
    }
    Ok(if lacking { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_has_one_row_that_says_what_it_costs() {
        let rows = rows(Path::new("/nowhere/data"));
        let mut names: Vec<_> = rows.iter().map(|row| row.feature).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        for row in &rows {
            assert!(!row.detail.is_empty() && !row.without.is_empty(), "{row:?}");
        }
        let data = rows.iter().find(|row| row.feature == "btrfs for data").unwrap();
        assert!(data.detail.starts_with("/nowhere/data "), "{data:?}");
        let kernel = rows.iter().find(|row| row.feature == "kernel").unwrap();
        assert_eq!(kernel.state, State::Ok, "{kernel:?}");
    }
}
