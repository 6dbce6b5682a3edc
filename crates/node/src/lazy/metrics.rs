//! Counters of lazy reads and of the cache of layers, in Prometheus's text format.
//!
//! What the server counts begins anew when it is started anew, as counters may; how often it was is kept by its holder.

use crate::cache::CacheState;
use crate::node::Core;
use corral_lazy::control::{FetchLatency, Stats};
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the server may take: less than a scrape waits.
const WITHIN: Duration = Duration::from_secs(1);

impl Core {
    /// The metrics; none where nothing is read lazily.
    pub async fn lazy_metrics(&self) -> String {
        let Some(lazy) = &self.lazy else { return String::new() };
        let stats = tokio::time::timeout(WITHIN, lazy.stats()).await.ok().and_then(Result::ok);
        text(stats.as_ref(), &self.cache)
    }
}

/// Metrics as text, a family after the other.
#[derive(Default)]
struct Families(String);

impl Families {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}.\n# TYPE {name} {kind}"));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.line(format_args!("{name}_total {value}"));
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "gauge", help);
        self.line(format_args!("{name} {value}"));
    }

    fn histogram(&mut self, name: &str, help: &str, latency: &FetchLatency) {
        let seconds = |us: u64| us as f64 / 1e6;
        self.family(name, "histogram", help);
        let mut count = 0;
        for (bound, here) in latency.bounds_us.iter().zip(&latency.counts) {
            count += here;
            self.line(format_args!("{name}_bucket{{le=\"{}\"}} {count}", seconds(*bound)));
        }
        let count: u64 = latency.counts.iter().sum();
        self.line(format_args!("{name}_bucket{{le=\"+Inf\"}} {count}"));
        self.line(format_args!("{name}_sum {}\n{name}_count {count}", seconds(latency.sum_us)));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a text does not fail.
        writeln!(self.0, "{line}").unwrap_or(());
    }
}

fn text(stats: Option<&Stats>, cache: &CacheState) -> String {
    let mut out = Families::default();
    let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    out.gauge("corral_lazy_server_up", "Whether the server of lazy reads answers", stats.is_some().into());
    if let Some(stats) = stats {
        server(&mut out, stats);
    }
    out.gauge("corral_lazy_cache_bytes", "Data of layers here that the store has as well", of(&cache.bytes));
    out.gauge("corral_lazy_cache_limit_bytes", "The most of it that is kept if nobody uses it", of(&cache.limit_bytes));
    out.counter("corral_lazy_evictions", "Layers whose data was given up", of(&cache.evictions));
    out.counter("corral_lazy_evicted_bytes", "Bytes of data that was given up", of(&cache.evicted_bytes));
    out.0
}

fn server(out: &mut Families, stats: &Stats) {
    let total = &stats.total;
    out.counter("corral_lazy_read_bytes", "Bytes that were asked for of layers that are read lazily", total.read_bytes);
    out.counter("corral_lazy_fetched_bytes", "Bytes that came from the store", total.fetched_stored_bytes);
    out.counter("corral_lazy_cache_hits", "Reads of what was here", total.hits);
    out.counter("corral_lazy_cache_misses", "Reads that waited for the store", total.misses);
    out.counter("corral_lazy_read_errors", "Reads that failed", total.errors);
    out.counter("corral_lazy_bad_chunks", "Chunks that came wrong and were fetched again", total.wrong_answers);
    out.histogram("corral_lazy_fetch_duration_seconds", "Time of reads of the store", &total.fetch_latency);
    out.gauge("corral_lazy_waiting_reads", "Reads that wait for the store", stats.waiting_reads);
    out.gauge("corral_lazy_in_flight_bytes", "Bytes on their way from the store", stats.in_flight_bytes);
    let name = "corral_lazy_server_restarts";
    out.family(name, "counter", "Servers of lazy reads that were replaced, by what became of them");
    out.line(format_args!("{name}_total{{cause=\"crashed\"}} {}", stats.restarts.crashed));
    out.line(format_args!("{name}_total{{cause=\"still\"}} {}", stats.restarts.still));
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_lazy::control::{ReadStats, Restarts};

    #[test]
    fn families_are_whole_and_buckets_add_up() {
        let fetch_latency = FetchLatency { bounds_us: vec![250, 1_000_000], counts: vec![3, 2, 1], sum_us: 2_500_000 };
        let total = ReadStats { read_bytes: 7, misses: 2, fetch_latency, ..ReadStats::default() };
        let stats = Stats {
            layers: Vec::new(),
            total,
            cgroups: Vec::new(),
            in_flight_bytes: 0,
            in_flight_peak_bytes: 0,
            waiting_reads: 0,
            restarts: Restarts { crashed: 4, still: 1 },
        };
        let cache = CacheState::new(Some(9), std::path::Path::new("/"));
        let told = text(Some(&stats), &cache);
        for line in [
            "corral_lazy_server_up 1",
            "# TYPE corral_lazy_read_bytes counter",
            "corral_lazy_read_bytes_total 7",
            "corral_lazy_cache_misses_total 2",
            "corral_lazy_fetch_duration_seconds_bucket{le=\"0.00025\"} 3",
            "corral_lazy_fetch_duration_seconds_bucket{le=\"1\"} 5",
            "corral_lazy_fetch_duration_seconds_bucket{le=\"+Inf\"} 6",
            "corral_lazy_fetch_duration_seconds_sum 2.5",
            "corral_lazy_fetch_duration_seconds_count 6",
            "corral_lazy_server_restarts_total{cause=\"still\"} 1",
            "corral_lazy_cache_limit_bytes 9",
        ] {
            assert!(told.lines().any(|told| told == line), "{line} is missing in\n{told}");
        }
        let silent = text(None, &cache);
        assert!(silent.starts_with("# HELP corral_lazy_server_up") && silent.contains("corral_lazy_server_up 0\n"));
        assert!(!silent.contains("read_bytes") && silent.contains("corral_lazy_evictions_total 0\n"));
    }
}
