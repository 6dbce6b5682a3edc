//! Sandboxes: create, list, and the operations of their life.

use super::parts::{Answer, Body, Live, Named, invalid, json};
use crate::error::runtime_problem;
use crate::ledger::{Change, SandboxRecord};
use crate::node::Core;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use corral_api::catalogue::BatchResult;
use corral_api::ids::SandboxId;
use corral_api::image::SnapshotSpec;
use corral_api::sandbox::{
    CheckpointList, CreateOnNode, EndReason, EndStatus, ForkSpec, RollbackSpec, SandboxPage, State as Phase, TtlUpdate,
};
use std::sync::Arc;

type Node = State<Arc<Core>>;

pub async fn create(State(core): Node, Body(request): Body<CreateOnNode>) -> Answer {
    let created = core.create(request).await?;
    json(if created.repeated { StatusCode::OK } else { StatusCode::CREATED }, &created.status)
}

pub async fn get(State(core): Node, Named(id): Named) -> Answer {
    if let Some(sandbox) = core.live(&id) {
        return json(StatusCode::OK, &sandbox.status());
    }
    match core.ended(&id).await? {
        Some(record) => json(StatusCode::OK, &record.status()),
        None => Err(core.find(&id).await.map_or_else(Into::into, |_| invalid("the sandbox has just appeared"))),
    }
}

/// Ends it; one that has ended stays as it is.
pub async fn delete(State(core): Node, Named(id): Named) -> Answer {
    let Some(sandbox) = core.live(&id) else { return get(State(core), Named(id)).await };
    let status = core.end(&sandbox, EndStatus::new(EndReason::Stopped, "")).await;
    json(StatusCode::OK, &status)
}

pub async fn pause(State(core): Node, Live(sandbox): Live) -> Answer {
    json(StatusCode::OK, &core.pause(&sandbox).await?)
}

pub async fn resume(State(core): Node, Live(sandbox): Live) -> Answer {
    json(StatusCode::OK, &core.resume(&sandbox).await?)
}

pub async fn fork(State(core): Node, Live(sandbox): Live, Body(fork): Body<ForkSpec>) -> Answer {
    let _activity = sandbox.begin();
    json(StatusCode::OK, &BatchResult { items: core.fork(&sandbox, fork).await? })
}

pub async fn snapshot(State(core): Node, Live(sandbox): Live, Body(snapshot): Body<SnapshotSpec>) -> Answer {
    let _activity = sandbox.begin();
    json(StatusCode::CREATED, &core.snapshot(&sandbox, snapshot).await?)
}

pub async fn checkpoint(State(core): Node, Live(sandbox): Live) -> Answer {
    let _activity = sandbox.begin();
    json(StatusCode::CREATED, &core.checkpoint(&sandbox).await?)
}

pub async fn checkpoints(State(_): Node, Live(sandbox): Live) -> Answer {
    json(StatusCode::OK, &CheckpointList { checkpoints: sandbox.lock().record.checkpoints.clone() })
}

pub async fn drop_checkpoint(
    State(core): Node,
    Live(sandbox): Live,
    Path((_, number)): Path<(String, String)>,
) -> Answer {
    let number = number.parse().map_err(|_| invalid("a checkpoint is a number"))?;
    core.drop_checkpoint(&sandbox, number).await?;
    Ok(super::commands::no_content())
}

pub async fn rollback(State(core): Node, Live(sandbox): Live, Body(to): Body<RollbackSpec>) -> Answer {
    let _activity = sandbox.begin();
    json(StatusCode::OK, &core.rollback(&sandbox, to.checkpoint).await?)
}

pub async fn set_ttl(State(core): Node, Live(sandbox): Live, Body(update): Body<TtlUpdate>) -> Answer {
    let record: SandboxRecord = {
        let mut inner = sandbox.lock();
        let spec = &mut inner.record.spec;
        spec.idle_ttl_ms = update.idle_ttl_ms.unwrap_or(spec.idle_ttl_ms);
        spec.max_ttl_ms = update.max_ttl_ms.unwrap_or(spec.max_ttl_ms);
        inner.record.clone()
    };
    sandbox.touch();
    core.ledger.post(vec![Change::Sandbox(Box::new(record))]);
    json(StatusCode::OK, &sandbox.status())
}

pub async fn stats(State(core): Node, Live(sandbox): Live) -> Answer {
    let mut stats = core.containers.stats(&sandbox.id).map_err(|e| runtime_problem(&e))?;
    core.add_lazy_reads(&sandbox, &mut stats).await;
    json(StatusCode::OK, &stats)
}

/// Most sandboxes in one page, and how many without a limit.
const PAGE: (usize, usize) = (1000, 100);

#[derive(Debug, Default)]
struct Filter {
    state: Option<Phase>,
    labels: Vec<(String, String)>,
    environment: Option<String>,
    limit: usize,
    cursor: Option<SandboxId>,
}

impl Filter {
    fn parse(query: &str) -> Result<Self, super::parts::Fail> {
        let mut filter = Self { limit: PAGE.1, ..Self::default() };
        for (key, value) in url_pairs(query) {
            match key.as_str() {
                "state" => {
                    let text = serde_json::Value::String(value.clone());
                    filter.state =
                        Some(serde_json::from_value(text).map_err(|_| invalid(format!("no state {value:?}")))?);
                }
                "label" => {
                    let (k, v) = value.split_once('=').ok_or_else(|| invalid("label: key=value"))?;
                    filter.labels.push((k.to_owned(), v.to_owned()));
                }
                "environment" => filter.environment = Some(value),
                "limit" => {
                    let limit = value.parse().ok().filter(|l| (1..=PAGE.0).contains(l));
                    filter.limit = limit.ok_or_else(|| invalid(format!("limit: 1–{}", PAGE.0)))?;
                }
                "cursor" => {
                    let id = value.parse::<SandboxId>();
                    let text = "cursor: give what `next_cursor` of the page before was, or none";
                    filter.cursor = Some(id.map_err(|_| invalid(text))?);
                }
                other => return Err(invalid(format!("no parameter {other:?}"))),
            }
        }
        Ok(filter)
    }

    fn fits(&self, record: &SandboxRecord) -> bool {
        self.state.is_none_or(|s| s == record.state)
            && self.environment.as_ref().is_none_or(|e| *e == record.environment.name)
            && self.labels.iter().all(|(k, v)| record.spec.labels.get(k) == Some(v))
            && self.cursor.as_ref().is_none_or(|c| record.id > *c)
    }
}

/// Pairs of a query string, decoded.
pub fn url_pairs(query: &str) -> Vec<(String, String)> {
    let decode = |text: &str| {
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text.as_bytes();
        while let Some((first, tail)) = rest.split_first() {
            rest = tail;
            let hex = |b: &[u8]| u8::from_str_radix(std::str::from_utf8(b).ok()?, 16).ok();
            match first {
                b'+' => bytes.push(b' '),
                b'%' if rest.len() >= 2 && hex(&rest[..2]).is_some() => {
                    bytes.extend(hex(&rest[..2]));
                    rest = &rest[2..];
                }
                other => bytes.push(*other),
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    };
    query
        .split('&')
        .filter(|p| !p.is_empty())
        .map(|pair| pair.split_once('=').map_or_else(|| (decode(pair), String::new()), |(k, v)| (decode(k), decode(v))))
        .collect()
}

/// Live sandboxes; ended ones too when the state asked for is `ended`.
pub async fn list(State(core): Node, RawQuery(query): RawQuery) -> Answer {
    let filter = Filter::parse(query.as_deref().unwrap_or(""))?;
    let mut records: Vec<SandboxRecord> = if filter.state == Some(Phase::Ended) {
        let keep = core.config.keep_ended_count;
        // An end that was told is in the list.
        core.read_settled(move |ledger| ledger.ended(keep)).await?
    } else {
        core.all().iter().map(|s| s.lock().record.clone()).filter(|r| r.state != Phase::Ended).collect()
    };
    records.retain(|r| filter.fits(r));
    records.sort_by(|a, b| a.id.cmp(&b.id));
    let more = records.len() > filter.limit;
    records.truncate(filter.limit);
    let next_cursor = records.last().filter(|_| more).map(|r| r.id.to_string());
    json(StatusCode::OK, &SandboxPage { sandboxes: records.iter().map(SandboxRecord::status).collect(), next_cursor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        let f = Filter::parse("state=running&label=a%3Db%20c&limit=5").unwrap();
        assert_eq!((f.state, f.limit), (Some(Phase::Running), 5));
        assert_eq!(f.labels, [("a".to_owned(), "b c".to_owned())]);
        for bad in ["state=odd", "label=x", "limit=0", "limit=5000", "colour=red", "cursor=xx", "cursor="] {
            assert!(Filter::parse(bad).is_err(), "{bad}");
        }
    }
}
