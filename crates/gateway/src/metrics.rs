//! The gateway's own counters, in the Prometheus text format.

use crate::refusal::Refusal;
use axum::http::Method;
use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Served {
    route: String,
    method: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Timed {
    route: String,
    method: &'static str,
}

/// What is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Served, Counter>,
    durations: Family<Timed, Histogram, fn() -> Histogram>,
    in_flight: Gauge,
    refused_keys: Counter,
}

/// From 100 µs to 200 s, in steps of about 3. Only the time to the head of the answer is measured.
fn histogram() -> Histogram {
    Histogram::new([0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0, 200.0])
}

/// Counts a request as in flight until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Metrics>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.dec();
    }
}

impl Metrics {
    /// Counters at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("corral_gateway");
        let requests = Family::default();
        let durations = Family::new_with_constructor(histogram as fn() -> Histogram);
        let (in_flight, refused_keys) = (Gauge::default(), Counter::default());
        registry.register("requests", "Requests answered", requests.clone());
        registry.register(
            "request_duration_seconds",
            "Time from a request's head to the head of its answer",
            durations.clone(),
        );
        registry.register("requests_in_flight", "Requests whose answer has not begun", in_flight.clone());
        registry.register("refused_keys", "Requests with no or an unknown key", refused_keys.clone());
        Self { registry, requests, durations, in_flight, refused_keys }
    }

    /// A request came.
    pub fn begin(self: &Arc<Self>) -> InFlight {
        self.in_flight.inc();
        InFlight(Arc::clone(self))
    }

    /// A request was answered.
    pub fn answered(&self, route: &str, method: &Method, status: u16, took: Duration) {
        let method = method_name(method);
        self.requests.get_or_create(&Served { route: route.into(), method, status }).inc();
        self.durations.get_or_create(&Timed { route: route.into(), method }).observe(took.as_secs_f64());
    }

    /// A key was refused.
    pub fn refused_key(&self) {
        self.refused_keys.inc();
    }

    /// All of it as text.
    ///
    /// # Errors
    /// A metric cannot be written.
    pub fn text(&self) -> Result<String, Refusal> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)
            .map_err(|error| Refusal::internal("writing the metrics", &error))?;
        Ok(text)
    }
}

/// Callers may invent methods: the label stays bounded.
fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "PUT" => "PUT",
        "POST" => "POST",
        "DELETE" => "DELETE",
        "HEAD" => "HEAD",
        "OPTIONS" => "OPTIONS",
        "PATCH" => "PATCH",
        _ => "OTHER",
    }
}
