//! A real S3 server (`s3s` over a directory) on loopback, with a hook before and after each request.
//!
//! It checks and then writes, so two conditional writers could both succeed, which S3 rules out: the hook lets one at a
//! time through.

use corral_store::{S3Config, S3Credentials, S3Store};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpError};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

pub const KEY_ID: &str = "AKIDTEST";
pub const SECRET: &str = "secret-of-the-test";
pub const BUCKET: &str = "layers";

/// How an answer with a body is spoiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spoil {
    /// The connection ends before the announced length.
    Cut,
    /// Fewer bytes, and a length that says so, for the range that was asked.
    Short,
}

/// What the server does beside serving.
pub struct Hook {
    /// Conditions are ignored, as by services that do not know them.
    pub unconditional: AtomicBool,
    /// How many of the next requests are answered with 503.
    pub busy: AtomicU64,
    pub spoil: Mutex<Option<Spoil>>,
    /// Uploads of parts and completions wait here while it has no permits.
    pub parts: Semaphore,
    /// Parts that arrived, waiting ones included.
    pub arrived: watch::Sender<u64>,
    /// Uploads that were aborted.
    pub aborted: watch::Sender<u64>,
    one_at_a_time: tokio::sync::Mutex<()>,
}

pub struct Server {
    pub dir: TempDir,
    pub hook: Arc<Hook>,
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    /// A server with the test's credentials and bucket.
    pub async fn start() -> Self {
        Self::with(true).await
    }

    pub async fn with(auth: bool) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join(BUCKET)).expect("a bucket");
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(dir.path()).expect("a file system"));
        if auth {
            builder.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        }
        let service = builder.build();
        let hook = Arc::new(Hook {
            unconditional: AtomicBool::new(false),
            busy: AtomicU64::new(0),
            spoil: Mutex::new(None),
            parts: Semaphore::new(1 << 20),
            arrived: watch::Sender::new(0),
            aborted: watch::Sender::new(0),
            one_at_a_time: tokio::sync::Mutex::new(()),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let task = tokio::spawn(serve(listener, service, Arc::clone(&hook)));
        Self { dir, hook, address, task }
    }

    pub fn config(&self) -> S3Config {
        let mut config = S3Config::new(BUCKET, "us-east-1");
        config.endpoint = Some(format!("http://{}", self.address).parse().expect("a URL"));
        config.path_style = true;
        config.allow_http = true;
        config.prefix = Some("some/prefix".parse().expect("a key"));
        config.credentials = S3Credentials::Static { key_id: KEY_ID.into(), secret: SECRET.into(), token: None };
        config.timeout = Duration::from_secs(30);
        config
    }

    pub fn store(&self) -> S3Store {
        S3Store::open(self.config()).expect("a store")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, service: S3Service, hook: Arc<Hook>) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("no delay");
        let (service, hook) = (service.clone(), Arc::clone(&hook));
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let (service, hook) = (service.clone(), Arc::clone(&hook));
                async move { hook.answer(&service, request).await }
            });
            // A client that hangs up is no failure of the test.
            let _ended = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answer).await;
        });
    }
}

impl Hook {
    async fn answer(
        &self,
        service: &S3Service,
        request: http::Request<Incoming>,
    ) -> Result<http::Response<Body>, HttpError> {
        let mut request = request.map(Body::from);
        let query = request.uri().query().unwrap_or_default().to_owned();
        let method = request.method().clone();
        if self.busy.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            return Ok(http::Response::builder().status(503).body(Body::empty()).expect("an answer"));
        }
        if query.contains("uploadId=") && matches!(method, http::Method::PUT | http::Method::POST) {
            self.arrived.send_modify(|count| *count += 1);
            self.parts.acquire().await.expect("a permit").forget();
        }
        let mut _turn = None;
        if request.headers().contains_key("if-none-match") {
            _turn = Some(self.one_at_a_time.lock().await);
        }
        if self.unconditional.load(Ordering::Relaxed) {
            request.headers_mut().remove("if-none-match");
        }
        let answer = service.call(request).await?;
        if query.contains("uploadId=") && method == http::Method::DELETE {
            self.aborted.send_modify(|count| *count += 1);
        }
        let spoil = *self.spoil.lock().expect("a lock");
        match spoil {
            Some(spoil) if method == http::Method::GET && answer.status().is_success() => {
                Ok(spoiled(answer, spoil).await)
            }
            _ => Ok(answer),
        }
    }
}

async fn spoiled(answer: http::Response<Body>, spoil: Spoil) -> http::Response<Body> {
    let (mut head, body) = answer.into_parts();
    let whole = body.collect().await.expect("a body").to_bytes();
    let short = whole.slice(..whole.len() / 2);
    let body = match spoil {
        Spoil::Short => {
            head.headers.insert("content-length", short.len().into());
            Body::from(short)
        }
        Spoil::Cut => {
            let frames =
                futures_util::stream::iter([Ok(hyper::body::Frame::data(short)), Err(std::io::Error::other("cut"))]);
            Body::http_body(http_body_util::StreamBody::new(frames))
        }
    };
    http::Response::from_parts(head, body)
}
