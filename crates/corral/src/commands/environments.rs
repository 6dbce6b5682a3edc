//! `corral env`.

use super::delete_each;
use crate::cli::{EnvCommand, EnvCreateArgs};
use crate::client::{Client, fetch, fetch_pages};
use crate::output::{print_json, print_line, print_table};
use anyhow::Context as _;
use corral_api::catalogue::EnvironmentList;
use corral_api::environment::{EnvironmentRecord, EnvironmentSpec};
use std::path::Path;
use std::process::ExitCode;

/// `corral env`.
pub async fn run(client: &Client, command: &EnvCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        EnvCommand::Create(args) => {
            let request = client.put(&["v1", "environments", &args.name]).json(&spec(args)?);
            let record: EnvironmentRecord = fetch(request).await?;
            if json {
                print_json(&record)?;
            } else {
                print_line(&record.name)?;
            }
        }
        EnvCommand::Ls => {
            let split = |page: EnvironmentList| (page.environments, page.next_cursor);
            let environments = fetch_pages(|| client.get(&["v1", "environments"]), split).await?;
            let list = EnvironmentList { environments, next_cursor: None };
            if json {
                print_json(&list)?;
            } else {
                print_table(
                    &["NAME", "BASE", "WORKSPACES", "TOOLKITS", "CREATED"],
                    list.environments.iter().map(|e| {
                        let (workspaces, toolkits) = (e.spec.workspaces.len(), e.spec.toolkits.len());
                        let base = e.spec.base.clone();
                        vec![e.name.clone(), base, workspaces.to_string(), toolkits.to_string(), e.created_at.clone()]
                    }),
                )?;
            }
        }
        EnvCommand::Inspect { name } => {
            print_json(&fetch::<EnvironmentRecord>(client.get(&["v1", "environments", name])).await?)?;
        }
        EnvCommand::Rm { names } => return delete_each(client, "environments", names, json).await,
    }
    Ok(ExitCode::SUCCESS)
}

fn spec(args: &EnvCreateArgs) -> anyhow::Result<EnvironmentSpec> {
    if let Some(path) = &args.file {
        let text = if path == Path::new("-") {
            std::io::read_to_string(std::io::stdin())
        } else {
            std::fs::read_to_string(path)
        };
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        return serde_json::from_str(&text).with_context(|| format!("{} is no specification", path.display()));
    }
    Ok(EnvironmentSpec {
        base: args.base.clone().context("--base is needed")?,
        workspaces: args.workspaces.clone(),
        toolkits: args.toolkits.clone(),
        env: args.env.iter().cloned().collect(),
        workdir: args.cwd.clone(),
        user: args.user.clone(),
        entrypoint: args.startup.entrypoint(),
        cmd: args.startup.cmd(),
    })
}
