//! One stage: its steps in order, each from the cache or in a sandbox.
//!
//! Steps that miss the cache follow each other in one sandbox, which stands on the layers of the last hit. A snapshot
//! is all that a sandbox wrote since it began, so that the newest one alone lies on those layers.

use super::bench::Bench;
use super::copy::{blocking, fetch, put};
use super::error::Failure;
use super::pieces;
use super::report::Report;
use super::tree::Tree;
use super::{Build, command};
use crate::refusal::Refusal;
use corral_api::digest::Digest;
use corral_api::files::MkdirRequest;
use corral_api::ids::SandboxId;
use corral_api::image::LayerRecord;
use corral_dockerfile::{Action, CopyFrom, CopyStep, Step, key};
use std::sync::Arc;

/// A stage so far.
#[derive(Debug)]
pub struct StageRun {
    /// Its layers, lowest first.
    pub layers: Vec<LayerRecord>,
    live: Option<Live>,
}

#[derive(Debug)]
struct Live {
    id: SandboxId,
    /// What it stands on.
    base: Vec<LayerRecord>,
}

fn digests(layers: &[LayerRecord]) -> Vec<Digest> {
    layers.iter().map(|l| l.digest).collect()
}

/// What a step needs from outside of its stage.
enum Input {
    None,
    /// Pieces of the context, as they go in.
    Pieces(Arc<Tree>, Vec<pieces::Piece>),
    /// Files of these layers.
    Layers(Vec<LayerRecord>),
}

impl StageRun {
    /// A stage on these layers.
    pub fn on(layers: Vec<LayerRecord>) -> Self {
        Self { layers, live: None }
    }

    /// Does a step, or takes its result from the cache.
    ///
    /// # Errors
    /// The step fails, or the node does not answer.
    pub async fn step(&mut self, build: &Build, step: &Step, done: &[Self]) -> Result<(), Failure> {
        let report = &build.report;
        match &step.action {
            Action::Config => {
                report.step(step, true).await;
                return Ok(());
            }
            Action::Noted => {
                report.step(step, true).await;
                report.note(format!("line {}: {} has no effect here", step.line, step.name)).await;
                return Ok(());
            }
            Action::Run(_) | Action::Copy(_) | Action::Workdir(_) => {}
        }
        let mut copied = Vec::new();
        let input = match &step.action {
            Action::Copy(copy) => self.input(build, copy, done, &mut copied).await?,
            _ => Input::None,
        };
        let source = if let Input::Layers(layers) = &input { digests(layers) } else { Vec::new() };
        let key = key::step(&digests(&self.layers), &step.action, &copied, &source);
        if !build.no_cache
            && let Some(layers) = build.built(key).await?
        {
            report.step(step, true).await;
            self.layers = layers;
            return self.end(&build.bench).await.map_err(Into::into);
        }
        report.step(step, false).await;
        self.work(build, step, input, report).await?;
        build.keep(key, &self.layers).await?;
        Ok(())
    }

    async fn input(
        &self,
        build: &Build,
        copy: &CopyStep,
        done: &[Self],
        copied: &mut Vec<key::Content>,
    ) -> Result<Input, Failure> {
        match &copy.from {
            CopyFrom::Context => {
                let (tree, step) = (Arc::clone(&build.tree), copy.clone());
                let (tree, pieces, contents) = blocking(move || {
                    let pieces = pieces::find(&tree, &step)?;
                    let contents = pieces::contents(&tree, &pieces)?;
                    Ok((tree, pieces, contents))
                })
                .await?;
                *copied = contents;
                Ok(Input::Pieces(tree, pieces))
            }
            CopyFrom::Stage(stage) => Ok(Input::Layers(done[*stage].layers.clone())),
            CopyFrom::Image(name) => Ok(Input::Layers(build.image_layers(name)?)),
        }
    }

    /// The stage's sandbox.
    async fn sandbox(&mut self, bench: &Bench) -> Result<SandboxId, Refusal> {
        if let Some(live) = &self.live {
            return Ok(live.id.clone());
        }
        let id = bench.create(digests(&self.layers)).await?;
        self.live = Some(Live { id: id.clone(), base: self.layers.clone() });
        Ok(id)
    }

    async fn work(&mut self, build: &Build, step: &Step, input: Input, report: &Report) -> Result<(), Failure> {
        let bench = &build.bench;
        let id = self.sandbox(bench).await?;
        match (&step.action, input) {
            (Action::Run(run), _) => command::run(bench, &id, run, report).await?,
            (Action::Workdir(path), _) => match bench.is_directory(&id, path).await? {
                // Nothing to do, and nothing to pack.
                Some(true) => return Ok(()),
                Some(false) => return Err(Failure::build(format!("{path} is no directory"))),
                None => {
                    let user = Some("0".to_owned());
                    let made = MkdirRequest { path: path.clone(), parents: true, mode: Some(0o755), user };
                    bench.post(&id, "/files/mkdir", &made).await?;
                }
            },
            (Action::Copy(copy), Input::Pieces(tree, pieces)) => put(bench, &id, copy, tree, pieces).await?,
            (Action::Copy(copy), Input::Layers(layers)) => {
                let source = bench.create(digests(&layers)).await?;
                let fetched = fetch(&build.gw, bench, &source, copy).await;
                bench.remove(&source).await?;
                let (tree, step) = (Arc::new(fetched?), copy.clone());
                let (tree, pieces) = blocking(move || {
                    let pieces = pieces::find(&tree, &step)?;
                    Ok((tree, pieces))
                })
                .await?;
                put(bench, &id, copy, tree, pieces).await?;
            }
            _ => {}
        }
        self.pack(bench, &id).await.map_err(Into::into)
    }

    /// Takes the newest snapshot of the sandbox as its layer.
    async fn pack(&mut self, bench: &Bench, id: &SandboxId) -> Result<(), Refusal> {
        let image = bench.snapshot(id).await?;
        let wrote = image.snapshot.as_ref().is_none_or(|s| s.report.entries > 0);
        self.layers = match &self.live {
            // An empty layer would only be one more to mount.
            Some(live) if !wrote => live.base.clone(),
            _ => image.layers,
        };
        Ok(())
    }

    /// Gives the sandbox up; its layers stay.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn end(&mut self, bench: &Bench) -> Result<(), Refusal> {
        match self.live.take() {
            Some(live) => bench.remove(&live.id).await,
            None => Ok(()),
        }
    }
}
