//! `corral key`.

use super::delete_each;
use crate::cli::KeyCommand;
use crate::client::{Client, fetch};
use crate::output::{print_json, print_line, print_table};
use corral_api::catalogue::{KeyList, KeySpec, NewKey};
use std::process::ExitCode;

/// `corral key`.
pub async fn run(client: &Client, command: &KeyCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        KeyCommand::Create { name } => {
            let spec = KeySpec { name: name.clone() };
            let key: NewKey = fetch(client.post(&["v1", "keys"]).json(&spec)).await?;
            if json {
                print_json(&key)?;
            } else {
                print_line(&key.key)?;
            }
        }
        KeyCommand::Ls => {
            let list: KeyList = fetch(client.get(&["v1", "keys"])).await?;
            if json {
                print_json(&list)?;
            } else {
                print_table(
                    &["ID", "NAME", "PROJECT", "CREATED"],
                    list.keys
                        .iter()
                        .map(|k| vec![k.id.clone(), k.name.clone(), k.project_id.clone(), k.created_at.clone()]),
                )?;
            }
        }
        KeyCommand::Rm { ids } => return delete_each(client, "keys", ids, json).await,
    }
    Ok(ExitCode::SUCCESS)
}
