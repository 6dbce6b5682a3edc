//! `corral down`: takes from the host what a data directory's sandboxes left there once no `corral up` serves it.

use super::data_dir::DataDir;
use crate::cli::DownArgs;
use crate::output::{print_json, print_line};
use anyhow::Context as _;
use corral_node::{Node, NodeConfig};

/// `corral down`.
///
/// # Errors
/// There is no such data directory, something serves it, or not all of it could be ended.
pub async fn run(args: &DownArgs, json: bool) -> anyhow::Result<()> {
    let path = &args.data_dir;
    anyhow::ensure!(path.join("node-id").exists(), "{} is no data directory of `corral up`", path.display());
    let data = DataDir::open(path).context("end it first: `corral down` is for what stays behind")?;
    // The node takes over what lives, as at any start, and then ends it.
    let handle = Node::start(NodeConfig::ending(data.path())).await?;
    let ended = handle.taken_over();
    let left = handle.stop_everything().await;
    handle.close().await;
    if json {
        print_json(&serde_json::json!({"data_dir": data.path(), "ended": ended, "left": left}))?;
    } else {
        print_line(&format!("{ended} sandboxes ended; images and records stay in {}", data.path().display()))?;
    }
    anyhow::ensure!(left.is_empty(), "not all of it is gone from the host: {}", left.join("; "));
    Ok(())
}
