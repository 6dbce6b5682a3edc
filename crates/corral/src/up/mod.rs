//! `corral up`: node and gateway in one process. The gateway speaks to the node over its UNIX socket, as everywhere.
//!
//! ```text
//! lock data directory → bind → catalogue → node → key → serve … signal → drain gateway → stop node
//! ```

mod access;
mod data_dir;
pub mod down;
mod node;

use crate::cli::{ServerArgs, UpArgs};
use crate::client::default_path;
use crate::output::{print_json_line, print_line};
use access::Access;
use anyhow::Context as _;
use corral_gateway::{Catalogue, Gateway, GatewayConfig, NodeAddress, TlsFiles};
use data_dir::{CATALOGUE, DataDir};
use node::{LocalNode, NodeOptions};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// `corral up`.
///
/// # Errors
/// Something of it cannot be started, or the node ends by itself.
pub async fn run(args: &UpArgs, server: &ServerArgs, json: bool) -> anyhow::Result<()> {
    raise_open_files();
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for signals")?;
    let data = DataDir::of(args)?;
    let listener = bind(args)?;
    let options = NodeOptions {
        data_dir: data.path().to_owned(),
        max_live: args.max_live,
        memory_floor_mib: args.memory_floor_mib,
        start_queue: args.start_queue,
        keep_ended: args.keep_ended,
        keep_output_mib: args.keep_output_mib,
        store: args.store.clone(),
        whole_layers: args.whole_layers,
        cache_mib: args.cache_mib,
        disk_step_mib: args.disk_step_mib,
        disk_reserve_mib: args.disk_reserve_mib,
        ephemeral: args.ephemeral,
    };
    let node = node::start(&options).await?;
    let shutdown = async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tokio::spawn(async move {
            // Whoever asks twice does not want to wait for the drain.
            interrupt.recv().await;
            std::process::exit(130);
        });
    };
    let credentials = server.credentials.clone().map_or_else(default_path, Ok);
    serve(args, &data, listener, node, credentials, json, shutdown).await
}

/// Serves with a node that runs, until `shutdown`.
async fn serve(
    args: &UpArgs,
    data: &DataDir,
    listener: TcpListener,
    node: LocalNode,
    credentials: anyhow::Result<PathBuf>,
    json: bool,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    let catalogue = Arc::new(Catalogue::open(&data.path().join(CATALOGUE))?);
    let tls = args.tls_cert.clone().zip(args.tls_key.clone()).map(|(cert, key)| TlsFiles { cert, key });
    let url = url_of(listener.local_addr().context("the listener has no address")?, tls.is_some());
    let access = Access::ensure(&catalogue, &url, credentials)?;
    let config = GatewayConfig {
        insecure_listen: args.insecure_listen,
        spool_dir: data.path().join("spool"),
        ..GatewayConfig::default()
    };
    let address = NodeAddress::Unix(node.socket.clone());
    let gateway = Gateway::new(config, catalogue, [(node.id.clone(), address)]);
    announce(&url, &access, data, &node, json)?;

    let (ended, node_ended) = oneshot::channel();
    let mut serving = tokio::spawn(node.serving);
    let stop = async move {
        tokio::select! {
            () = shutdown => {}
            _ = node_ended => {}
        }
    };
    let mut front = Box::pin(gateway.serve(listener, tls, stop));
    let (front_result, node_result) = tokio::select! {
        result = &mut front => (result, None),
        result = &mut serving => {
            // The gateway drains; it may be gone already.
            ended.send(()).ok();
            (front.await, Some(result))
        }
    };
    front_result?;
    match node_result {
        Some(result) => {
            result.context("the node failed")?.context("the node failed")?;
            anyhow::bail!("the node ended by itself")
        }
        None => {
            node.stop.cancel();
            serving.await.context("the node failed")?.context("the node failed")
        }
    }
}

fn bind(args: &UpArgs) -> anyhow::Result<TcpListener> {
    let loopback = args.listen.ip().to_canonical().is_loopback();
    anyhow::ensure!(
        loopback || args.tls_cert.is_some() || args.insecure_listen,
        "refusing to serve plain HTTP on {}: give --tls-cert and --tls-key, listen on loopback, or add --insecure-listen",
        args.listen
    );
    TcpListener::bind(args.listen).with_context(|| format!("cannot listen on {}", args.listen))
}

/// Where clients on this machine reach the gateway.
fn url_of(address: SocketAddr, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    match (address.ip().is_unspecified(), address.is_ipv6()) {
        (true, false) => format!("{scheme}://127.0.0.1:{}", address.port()),
        (true, true) => format!("{scheme}://[::1]:{}", address.port()),
        _ => format!("{scheme}://{address}"),
    }
}

fn announce(url: &str, access: &Access, data: &DataDir, node: &LocalNode, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json_line(&serde_json::json!({
            "event": "ready",
            "url": url,
            "key": access.new_key,
            "credentials": access.written,
            "data_dir": data.path(),
            "node_id": node.id,
            "version": env!("CARGO_PKG_VERSION"),
        }));
    }
    print_line(&format!("corral {} at {url}", env!("CARGO_PKG_VERSION")))?;
    if let Some(key) = &access.new_key {
        print_line(&format!("API key (shown this once): {key}"))?;
    }
    match &access.written {
        Some(path) => print_line(&format!("credentials: {}", path.display())),
        None => print_line("credentials: not written; set CORRAL_API_URL and CORRAL_API_KEY"),
    }
}

/// Each sandbox and connection takes descriptors: the soft limit of most systems is far too low.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!(%error, "the limit of open files stays low");
    }
}

#[cfg(test)]
mod tests;
