//! `corral-load`: load for the benches, on a gateway or a Docker engine, and a store for them. Prints one JSON line per
//! measurement.
#![forbid(unsafe_code)]

mod http;
mod reading;
mod remote;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use http::{Connection, Target};
use hyper::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
struct Args {
    /// `host:port` of a gateway.
    #[arg(long, default_value = "127.0.0.1:7070")]
    gateway: String,
    /// API key of the gateway.
    #[arg(long, env = "CORRAL_API_KEY", default_value = "")]
    key: String,
    /// Socket of a Docker engine, measured instead of a gateway.
    #[arg(long)]
    docker: Option<String>,
    /// Environment or image.
    #[arg(long, default_value = "bench")]
    image: String,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Clone, Subcommand)]
enum What {
    /// Create so many, then remove them.
    Create { count: usize, in_flight: usize },
    /// One at a time: create, then `true` as first command, then more of it.
    Latency { count: usize },
    /// Commands over so many sandboxes.
    Exec { sandboxes: usize, commands: usize, in_flight: usize },
    /// Create so many and keep them: a line when all run and have answered a command; removed when standard input ends.
    Live { count: usize, in_flight: usize },
    /// Read files of a directory, those named or all, none of them cached: front to back, or so many pieces anywhere.
    Read {
        directory: std::path::PathBuf,
        names: Vec<String>,
        #[arg(long)]
        random: Option<u64>,
    },
    /// Serve a directory store as a bucket that is far away, until standard input ends: prints its port, and for each
    /// line that it is given what went through. Without `--traces` these are not shown and not kept.
    Remote {
        directory: std::path::PathBuf,
        latency_ms: u64,
        #[arg(long)]
        traces: bool,
    },
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let target = match &args.docker {
        Some(socket) => Target::Docker { socket: socket.clone() },
        None => Target::Gateway { address: args.gateway.clone(), key: args.key.clone() },
    };
    let load = Arc::new(Load { target, image: args.image.clone() });
    let line = match args.what {
        What::Create { count, in_flight } => {
            let made = load.create_all(count, in_flight).await?;
            let removal = load.remove_all(&made.ids, in_flight).await?;
            json!({"per_second": made.per_second(), "seconds": made.seconds, "p50_ms": made.p(50), "p99_ms": made.p(99), "remove_seconds": removal})
        }
        What::Latency { count } => load.latency(count).await?,
        What::Exec { sandboxes, commands, in_flight } => load.exec_rate(sandboxes, commands, in_flight).await?,
        What::Live { count, in_flight } => load.live(count, in_flight).await?,
        What::Remote { directory, latency_ms, traces } => return remote::serve(directory, latency_ms, traces).await,
        What::Read { directory, names, random } => reading::read(&directory, &names, random)?,
    };
    println!("{line}");
    Ok(())
}

struct Load {
    target: Target,
    image: String,
}

struct Made {
    ids: Vec<String>,
    latencies: Vec<Duration>,
    seconds: f64,
}

impl Made {
    fn per_second(&self) -> f64 {
        self.ids.len() as f64 / self.seconds
    }

    fn p(&self, percent: usize) -> f64 {
        percentile(&self.latencies, percent)
    }
}

fn percentile(latencies: &[Duration], percent: usize) -> f64 {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(0.0, |d| d.as_secs_f64() * 1000.0)
}

impl Load {
    fn is_docker(&self) -> bool {
        matches!(self.target, Target::Docker { .. })
    }

    async fn create(&self, c: &mut Connection) -> Result<String> {
        if self.is_docker() {
            let body = json!({"Image": self.image, "Cmd": ["sleep", "100000"], "HostConfig": {"NetworkMode": "none",
                "Memory": 512 << 20, "NanoCpus": 1_000_000_000u64, "PidsLimit": 512}});
            let made = c.json(Method::POST, "/containers/create", Some(&body)).await?;
            let id = made["Id"].as_str().context("no id")?.to_owned();
            c.call(Method::POST, &format!("/containers/{id}/start"), None).await?;
            return Ok(id);
        }
        let body = json!({"environment": self.image, "limits": {"memory_mib": 512, "cpus": 1.0, "pids": 512, "disk_mib": 1024}});
        let made = c.json(Method::POST, "/v1/sandboxes", Some(&body)).await?;
        Ok(made["id"].as_str().context("no id")?.to_owned())
    }

    async fn exec(&self, c: &mut Connection, id: &str) -> Result<()> {
        if self.is_docker() {
            let body = json!({"Cmd": ["true"], "AttachStdout": true, "AttachStderr": true});
            let made = c.json(Method::POST, &format!("/containers/{id}/exec"), Some(&body)).await?;
            let exec = made["Id"].as_str().context("no id")?;
            c.call(Method::POST, &format!("/exec/{exec}/start"), Some(&json!({"Detach": false, "Tty": false}))).await?;
            // The engine takes a connection over for a command's streams and closes it at their end.
            *c = Connection::open(&self.target).await?;
            let status = c.json(Method::GET, &format!("/exec/{exec}/json"), None).await?;
            anyhow::ensure!(status["ExitCode"] == 0, "the command failed: {status}");
            return Ok(());
        }
        let result =
            c.json(Method::POST, &format!("/v1/sandboxes/{id}/exec"), Some(&json!({"argv": ["true"]}))).await?;
        anyhow::ensure!(result["exit_code"] == 0, "the command failed: {result}");
        Ok(())
    }

    async fn remove(&self, c: &mut Connection, id: &str) -> Result<()> {
        let path =
            if self.is_docker() { format!("/containers/{id}?force=true") } else { format!("/v1/sandboxes/{id}") };
        c.call(Method::DELETE, &path, None).await.map(|_| ())
    }

    async fn create_all(self: &Arc<Self>, count: usize, in_flight: usize) -> Result<Made> {
        let next = Arc::new(AtomicUsize::new(0));
        let begun = Instant::now();
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..in_flight {
            let (this, next) = (self.clone(), next.clone());
            workers.spawn(async move {
                let mut c = Connection::open(&this.target).await?;
                let mut made = Vec::new();
                while next.fetch_add(1, Ordering::Relaxed) < count {
                    let at = Instant::now();
                    made.push((this.create(&mut c).await?, at.elapsed()));
                }
                anyhow::Ok(made)
            });
        }
        let (mut ids, mut latencies) = (Vec::new(), Vec::new());
        while let Some(done) = workers.join_next().await {
            for (id, took) in done?? {
                ids.push(id);
                latencies.push(took);
            }
        }
        Ok(Made { ids, latencies, seconds: begun.elapsed().as_secs_f64() })
    }

    async fn each(self: &Arc<Self>, ids: &[String], in_flight: usize, remove: bool) -> Result<f64> {
        let next = Arc::new(AtomicUsize::new(0));
        let ids: Arc<[String]> = ids.into();
        let begun = Instant::now();
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..in_flight {
            let (this, next, ids) = (self.clone(), next.clone(), ids.clone());
            workers.spawn(async move {
                let mut c = Connection::open(&this.target).await?;
                while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if remove { this.remove(&mut c, id).await? } else { this.exec(&mut c, id).await? }
                }
                anyhow::Ok(())
            });
        }
        while let Some(done) = workers.join_next().await {
            done??;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    async fn remove_all(self: &Arc<Self>, ids: &[String], in_flight: usize) -> Result<f64> {
        self.each(ids, in_flight, true).await
    }

    async fn latency(self: &Arc<Self>, count: usize) -> Result<Value> {
        let mut c = Connection::open(&self.target).await?;
        let (mut creates, mut firsts, mut execs) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let begun = Instant::now();
            let id = self.create(&mut c).await?;
            creates.push(begun.elapsed());
            self.exec(&mut c, &id).await?;
            firsts.push(begun.elapsed());
            for _ in 0..5 {
                let begun = Instant::now();
                self.exec(&mut c, &id).await?;
                execs.push(begun.elapsed());
            }
            self.remove(&mut c, &id).await?;
        }
        Ok(json!({"create_p50_ms": percentile(&creates, 50), "first_command_p50_ms": percentile(&firsts, 50),
            "exec_p50_ms": percentile(&execs, 50), "create_p99_ms": percentile(&creates, 99), "exec_p99_ms": percentile(&execs, 99)}))
    }

    async fn exec_rate(self: &Arc<Self>, sandboxes: usize, commands: usize, in_flight: usize) -> Result<Value> {
        let made = self.create_all(sandboxes, in_flight.min(32)).await?;
        let all: Vec<String> = (0..commands).map(|i| made.ids[i % made.ids.len()].clone()).collect();
        let seconds = self.each(&all, in_flight, false).await?;
        self.remove_all(&made.ids, in_flight).await?;
        Ok(json!({"per_second": commands as f64 / seconds}))
    }

    async fn live(self: &Arc<Self>, count: usize, in_flight: usize) -> Result<Value> {
        let made = self.create_all(count, in_flight).await?;
        let answered = self.each(&made.ids, in_flight, false).await?;
        println!("{}", json!({"live": made.ids.len(), "create_seconds": made.seconds, "exec_seconds": answered}));
        let mut line = String::new();
        tokio::task::spawn_blocking(move || std::io::stdin().read_line(&mut line)).await??;
        Ok(json!({"remove_seconds": self.remove_all(&made.ids, in_flight).await?}))
    }
}
