//! Builds: a Dockerfile and its context become an image, step by step, in sandboxes like any other.
//!
//! ```text
//! body ─ spool ─▶ context ─▶ plan ─▶ stage ─▶ step ─ cached? ─ yes ─▶ layers
//!                                              │ no                    ▲
//!                                              └▶ sandbox ─ snapshot ──┘  … ─▶ ImageRecord in the catalogue
//! ```
//!
//! What is wrong with a request, its context or its Dockerfile is told before anything runs. From then on the answer
//! streams; it ends with the image, or with why there is none. A client that hangs up cancels: the sandboxes of the
//! build go, layers of finished steps stay for the next try.

mod bench;
mod command;
mod context;
mod copy;
mod error;
mod pieces;
mod report;
mod stage;
mod sweep;
mod tree;

pub use sweep::sweep;

use crate::catalogue::{CatalogueError, MAX_BUILT_STEPS, MAX_LAYERS};
use crate::refusal::{Answer, Refusal};
use crate::state::{Caller, Gw};
use crate::unsettled::Making;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::IntoResponse as _;
use bench::Bench;
use context::Context;
use corral_api::build::{BuildProgress, BuildQuery};
use corral_api::digest::Digest;
use corral_api::ids::CommandId;
use corral_api::image::{ImageRecord, LayerRecord};
use corral_api::problem::ErrorKind;
use corral_dockerfile::{Base, Graph, Options, Plan};
use error::Failure;
use report::Report;
use stage::StageRun;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tree::Tree;

/// Lines of progress that wait for a slow reader, which then slows the build.
const QUEUE: usize = 256;
/// When a build that was refused may be tried again.
const RETRY_AFTER_MS: u64 = 2000;

/// A build that goes on.
#[derive(Debug)]
struct Build {
    gw: Gw,
    caller: Caller,
    bench: Bench,
    report: Report,
    tree: Arc<Tree>,
    images: BTreeMap<String, ImageRecord>,
    no_cache: bool,
    _making: Making,
}

/// Starts a build and answers with its progress.
///
/// # Errors
/// The request, the context or the Dockerfile is wrong, or there are too many builds.
pub async fn start(gw: Gw, caller: Caller, name: String, query: BuildQuery, body: Body) -> Answer {
    if query.network {
        let text = "network: builds have none; there are no network policies yet";
        return Err(Refusal::new(ErrorKind::Unsupported, text));
    }
    let busy = || Refusal::new(ErrorKind::Overloaded, "too many builds go on").retry_after_ms(RETRY_AFTER_MS);
    let permit = gw.builds.clone().try_acquire_owned().map_err(|_| busy())?;
    let (dir, limit) = (gw.config.spool_dir.clone(), gw.config.build_limit_bytes);
    let spooled = context::spool(body, &dir, limit, "the build context").await?;
    let dockerfile = query.dockerfile.clone();
    let context = copy::blocking(move || Context::open(spooled, &dir, limit, &dockerfile)).await?;
    let options = Options { build_args: query.build_args, target: query.target };
    let graph = Graph::new(&context.dockerfile, options)?;
    let images = find_images(&gw, &caller, &graph).await?;
    let plan = graph.plan(&images.iter().map(|(name, image)| (name.clone(), image.config.clone())).collect())?;

    let (send, receive) = mpsc::channel(QUEUE);
    // As random as any id, and short enough for a label.
    let id = CommandId::random();
    let build = Build {
        _making: gw.unsettled.begin(),
        bench: Bench::new(gw.clone(), caller.clone(), id.as_str(), query.limits),
        report: Report::new(send.clone(), plan.step_count()),
        gw,
        caller,
        tree: Arc::new(context.tree),
        images,
        no_cache: query.no_cache,
    };
    tokio::spawn(go_on(build, plan, name, send, permit));
    let lines = futures_util::stream::unfold(receive, async |mut receive| {
        let progress: BuildProgress = receive.recv().await?;
        let mut line = serde_json::to_vec(&progress).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), receive))
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

/// The images that a Dockerfile names, as far as they are there.
async fn find_images(gw: &Gw, caller: &Caller, graph: &Graph) -> Result<BTreeMap<String, ImageRecord>, Refusal> {
    let names: Vec<String> = graph.images().into_iter().map(str::to_owned).collect();
    let project = caller.project_id.clone();
    gw.catalogue(move |catalogue| {
        let mut found = BTreeMap::new();
        for name in names {
            match catalogue.image(&project, &name) {
                Ok(image) => drop(found.insert(name, image)),
                // The plan tells the line it stands on.
                Err(CatalogueError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    })
    .await
}

/// Builds until it is done, the client hangs up or the gateway stops, and leaves no sandbox in any case.
async fn go_on(
    build: Build,
    plan: Plan,
    name: String,
    send: mpsc::Sender<BuildProgress>,
    permit: OwnedSemaphorePermit,
) {
    let ended = tokio::select! {
        result = build.image(&plan, name) => Some(result),
        () = send.closed() => None,
        () = build.gw.stop.cancelled() => {
            let text = "the gateway shuts down: build again";
            Some(Err(Refusal::new(ErrorKind::Unavailable, text).retry_after_ms(RETRY_AFTER_MS).into()))
        }
    };
    build.bench.clear().await;
    drop(permit);
    let last = match ended {
        None => return,
        Some(Ok(image)) => BuildProgress::Imported { image: Box::new(image) },
        Some(Err(failure)) => {
            let Failure { refusal, number, exit_code, output } = failure;
            tracing::info!(problem = %refusal.problem, detail = refusal.detail, "a build failed");
            BuildProgress::Failed { problem: *refusal.problem, number, exit_code, output }
        }
    };
    // A client that hung up needs no end.
    send.send(last).await.unwrap_or(());
}

impl Build {
    /// Runs the plan and puts the image into the catalogue.
    async fn image(&self, plan: &Plan, name: String) -> Result<ImageRecord, Failure> {
        for arg in &plan.unused_args {
            self.report.note(format!("build argument {arg:?} is not used")).await;
        }
        let mut done: Vec<StageRun> = Vec::with_capacity(plan.stages.len());
        for stage in &plan.stages {
            let layers = match &stage.base {
                Base::Scratch => Vec::new(),
                Base::Image(name) => self.image_layers(name)?,
                Base::Stage(stage) => done[*stage].layers.clone(),
            };
            let mut run = StageRun::on(layers);
            for step in &stage.steps {
                self.report.begin();
                let number = self.report.number();
                let stepped = Box::pin(run.step(self, step, &done)).await;
                stepped.map_err(|failure| failure.in_step(number, step.line, step.name))?;
            }
            run.end(&self.bench).await?;
            done.push(run);
        }
        let layers = done.pop().map(|run| run.layers).unwrap_or_default();
        let config = plan.stages.last().map(|stage| stage.config.clone()).unwrap_or_default();
        if layers.len() > MAX_LAYERS {
            return Err(Failure::build(format!("{} layers: at most {MAX_LAYERS} are allowed", layers.len())));
        }
        let image = ImageRecord::new(name, config, layers);
        let (project, record) = (self.caller.project_id.clone(), image.clone());
        self.gw.catalogue(move |catalogue| catalogue.put_image(&project, &record)).await?;
        Ok(image)
    }

    fn image_layers(&self, name: &str) -> Result<Vec<LayerRecord>, Refusal> {
        let missing = || Refusal::new(ErrorKind::NotFound, format!("there is no image {name:?}"));
        self.images.get(name).map(|image| image.layers.clone()).ok_or_else(missing)
    }

    /// What a step led to before.
    async fn built(&self, key: Digest) -> Result<Option<Vec<LayerRecord>>, Refusal> {
        let project = self.caller.project_id.clone();
        self.gw.catalogue(move |catalogue| catalogue.built_step(&project, &key)).await
    }

    /// Remembers what a step led to.
    async fn keep(&self, key: Digest, layers: &[LayerRecord]) -> Result<(), Refusal> {
        let (project, layers) = (self.caller.project_id.clone(), layers.to_vec());
        let kept =
            move |catalogue: &crate::Catalogue| catalogue.put_built_step(&project, &key, &layers, MAX_BUILT_STEPS);
        crate::api::delete_orphans(&self.gw, &self.caller, self.gw.catalogue(kept).await?).await;
        Ok(())
    }
}
