//! `corral up` around a node that only exists in tests.

#[path = "../../../gateway/tests/support/mod.rs"]
mod support;

use super::*;
use crate::client::read_credentials;
use clap::Parser as _;
use tokio::sync::Notify;

fn args(dir: &std::path::Path) -> UpArgs {
    let dir = dir.join("data");
    let line = ["corral", "up", "--listen", "127.0.0.1:0", "--data-dir", dir.to_str().unwrap()];
    match crate::cli::Cli::parse_from(line).command {
        crate::cli::Command::Up(args) => args,
        _ => unreachable!(),
    }
}

fn local(node: &support::FakeNode, serving: impl Future<Output = anyhow::Result<()>> + Send + 'static) -> LocalNode {
    LocalNode {
        id: node.seen.id.clone(),
        socket: node.socket.clone(),
        serving: Box::pin(serving),
        stop: tokio_util::sync::CancellationToken::new(),
    }
}

#[tokio::test]
async fn it_serves_with_the_written_key_and_stops_the_node_last() {
    let dir = tempfile::tempdir().unwrap();
    let args = args(dir.path());
    let data = DataDir::of(&args).unwrap();
    let second = DataDir::of(&args).unwrap_err().to_string();
    assert!(second.contains("is in use by another `corral up`"), "{second}");
    let fake = support::FakeNode::start();
    let mut node = local(&fake, std::future::pending());
    let stopped = node.stop.clone();
    node.serving = Box::pin(async move {
        stopped.cancelled().await;
        Ok(())
    });
    let path = dir.path().join("credentials.json");
    let shutdown = Arc::new(Notify::new());
    let (told, listener) = (Arc::clone(&shutdown), bind(&args).unwrap());
    let (serve_args, serve_path) = (args, path.clone());
    let up = tokio::spawn(async move {
        let stop = async move { told.notified().await };
        serve(&serve_args, &data, listener, node, Ok(serve_path), true, stop).await
    });
    let credentials = loop {
        if let Some(credentials) = read_credentials(&path).unwrap() {
            break credentials;
        }
        tokio::task::yield_now().await;
    };
    let http = reqwest::Client::new();
    let list = format!("{}/v1/sandboxes", credentials.url);
    assert_eq!(http.get(&list).bearer_auth(&credentials.key).send().await.unwrap().status(), 200);
    shutdown.notify_one();
    up.await.unwrap().unwrap();
    assert!(http.get(&list).send().await.is_err());
}

#[tokio::test]
async fn a_node_that_ends_by_itself_ends_it_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let args = args(dir.path());
    let data = DataDir::of(&args).unwrap();
    let fake = support::FakeNode::start();
    let node = local(&fake, async { anyhow::bail!("disk gone") });
    let path = dir.path().join("credentials.json");
    let listener = bind(&args).unwrap();
    let error = serve(&args, &data, listener, node, Ok(path), true, std::future::pending()).await.unwrap_err();
    assert_eq!(format!("{error:#}"), "the node failed: disk gone");
}

#[test]
fn beyond_loopback_needs_tls_or_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let mut args = args(dir.path());
    args.listen = "0.0.0.0:0".parse().unwrap();
    assert!(bind(&args).unwrap_err().to_string().contains("--insecure-listen"));
    args.insecure_listen = true;
    assert_eq!(url_of(bind(&args).unwrap().local_addr().unwrap(), false).split(':').nth(1), Some("//127.0.0.1"));
}
