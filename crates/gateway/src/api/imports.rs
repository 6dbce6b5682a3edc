//! Imports and builds: the node's NDJSON progress passes through line by line, and the record in its last line is put
//! into the catalogue before the caller sees that line.

use crate::refusal::Refusal;
use crate::state::Gw;
use crate::unsettled::Making;
use axum::body::{Body, Bytes};
use axum::response::Response;
use corral_api::image::ImportProgress;
use corral_api::problem::{ErrorKind, Problem};
use futures_util::{StreamExt as _, stream};
use std::sync::Arc;

/// The longest line of progress: the record of an image with some hundreds of layers is far below.
const LINE_LIMIT: usize = 4 << 20;

struct Lines {
    body: axum::body::BodyDataStream,
    held: Vec<u8>,
    gw: Gw,
    project: Arc<str>,
    name: Option<String>,
    ended: bool,
    _making: Making,
}

/// Lets the lines of a successful answer pass and records what they bring. `name` is the image's name.
/// It was under way since before the node was asked.
pub fn record(gw: Gw, making: Making, project: Arc<str>, name: Option<String>, response: Response) -> Response {
    if !response.status().is_success() {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(axum::http::header::CONTENT_LENGTH);
    let body = body.into_data_stream();
    let lines = Lines { body, held: Vec::new(), gw, project, name, ended: false, _making: making };
    let passed = stream::unfold(lines, |mut lines| async move { lines.next().await.map(|chunk| (chunk, lines)) });
    Response::from_parts(parts, Body::from_stream(passed))
}

impl Lines {
    /// The next whole lines.
    async fn next(&mut self) -> Option<Result<Bytes, axum::Error>> {
        while !self.ended {
            match self.body.next().await {
                Some(Ok(chunk)) => {
                    self.held.extend_from_slice(&chunk);
                    if let Some(end) = self.held.iter().rposition(|&b| b == b'\n') {
                        let rest = self.held.split_off(end + 1);
                        let whole = std::mem::replace(&mut self.held, rest);
                        return Some(Ok(self.pass(whole).await));
                    }
                    if self.held.len() > LINE_LIMIT {
                        self.ended = true;
                        return Some(Ok(failed(Problem::new(
                            ErrorKind::UpstreamFailed,
                            "a line of progress is too long",
                        ))));
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    tracing::warn!(%error, "an import's progress broke off");
                    let problem = Problem::new(ErrorKind::UpstreamFailed, "the node broke off during the import");
                    return Some(Ok(failed(problem)));
                }
                None => {
                    self.ended = true;
                    if !self.held.is_empty() {
                        let whole = std::mem::take(&mut self.held);
                        return Some(Ok(self.pass(whole).await));
                    }
                }
            }
        }
        None
    }

    async fn pass(&mut self, lines: Vec<u8>) -> Bytes {
        let mut out = Vec::with_capacity(lines.len());
        for line in lines.split_inclusive(|&b| b == b'\n') {
            match self.keep(line).await {
                Ok(()) => out.extend_from_slice(line),
                Err(refusal) => {
                    tracing::warn!(detail = ?refusal.detail, "an imported record could not be kept");
                    out.extend_from_slice(&failed(*refusal.problem));
                    self.ended = true;
                    break;
                }
            }
        }
        out.into()
    }

    async fn keep(&mut self, line: &[u8]) -> Result<(), Refusal> {
        let project = self.project.clone();
        // Lines of a later version are passed on as they are.
        match serde_json::from_slice::<ImportProgress>(line) {
            Ok(ImportProgress::Imported { mut image }) => {
                if let Some(name) = &self.name {
                    image.name.clone_from(name);
                }
                self.gw.catalogue(move |c| c.put_image(&project, &image)).await
            }
            Ok(ImportProgress::Built { layer }) => self.gw.catalogue(move |c| c.put_layer(&project, &layer)).await,
            _ => Ok(()),
        }
    }
}

fn failed(problem: Problem) -> Bytes {
    let mut line = serde_json::to_vec(&ImportProgress::Failed { problem }).unwrap_or_default();
    line.push(b'\n');
    line.into()
}
