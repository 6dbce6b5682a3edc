//! Counters of the node, in Prometheus's text format.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Label of a result.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// `ok` or the kind of the problem.
    pub result: String,
}

/// Label of an end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// Why.
    pub reason: String,
}

/// The counters.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Creates by result.
    pub creates: Family<ResultLabel, Counter>,
    /// Time of successful creates.
    pub create_seconds: Histogram,
    /// Commands by result of their start.
    pub commands: Family<ResultLabel, Counter>,
    /// Time from the request to the running command.
    pub command_start_seconds: Histogram,
    /// Ends of sandboxes by reason.
    pub ends: Family<ReasonLabel, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("corral_node");
        let histogram = || Histogram::new(exponential_buckets(0.000_5, 2.0, 16));
        let (creates, commands, ends) = (Family::default(), Family::default(), Family::default());
        let (create_seconds, command_start_seconds) = (histogram(), histogram());
        registry.register("sandbox_creates", "Creates by result", Family::clone(&creates));
        registry.register_with_unit(
            "sandbox_create_duration",
            "Time of successful creates",
            Unit::Seconds,
            create_seconds.clone(),
        );
        registry.register("command_starts", "Commands by result of their start", Family::clone(&commands));
        registry.register_with_unit(
            "command_start_duration",
            "Time until a command runs",
            Unit::Seconds,
            command_start_seconds.clone(),
        );
        registry.register("sandbox_ends", "Ends of sandboxes by reason", Family::clone(&ends));
        Self { registry, creates, create_seconds, commands, command_start_seconds, ends }
    }
}

impl Metrics {
    /// Counts a result: `ok` or the kind of the problem.
    pub fn count<T>(family: &Family<ResultLabel, Counter>, result: &Result<T, corral_api::problem::Problem>) {
        let result = result.as_ref().map_or_else(|p| p.kind.as_str(), |_| "ok").to_owned();
        family.get_or_create(&ResultLabel { result }).inc();
    }

    /// All counters, followed by gauges that are read now and by families that are text already.
    pub fn text(&self, gauges: &[(&str, &str, f64)], families: &str) -> String {
        let mut text = String::new();
        if prometheus_client::encoding::text::encode(&mut text, &self.registry).is_err() {
            tracing::error!("the metrics could not be written");
        }
        let body = text.trim_end().trim_end_matches("# EOF").to_owned();
        let extra: String = gauges
            .iter()
            .map(|(name, help, value)| format!("# HELP {name} {help}.\n# TYPE {name} gauge\n{name} {value}\n"))
            .collect();
        format!("{body}{extra}{families}# EOF\n")
    }
}
