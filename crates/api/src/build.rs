//! Builds of images from Dockerfiles.

use crate::command::StreamName;
use crate::environment::Limits;
use crate::image::ImageRecord;
use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Label of the sandboxes of a build: its id.
pub const BUILD_LABEL: &str = "corral.build";

/// Query parameters of `PUT /v1/images/{name}/build`.
#[derive(Debug, Clone, PartialEq)]
pub struct BuildQuery {
    /// Path of the Dockerfile in the context.
    pub dockerfile: String,
    /// Name or number of the stage to build; the last one where absent.
    pub target: Option<String>,
    /// Build arguments.
    pub build_args: BTreeMap<String, String>,
    /// Takes nothing from the cache; what is built is put there all the same.
    pub no_cache: bool,
    /// Gives the steps a network.
    pub network: bool,
    /// Limits of each sandbox that a step runs in.
    pub limits: Limits,
}

impl Default for BuildQuery {
    fn default() -> Self {
        Self {
            dockerfile: "Dockerfile".to_owned(),
            target: None,
            build_args: BTreeMap::new(),
            no_cache: false,
            network: false,
            limits: Limits::default(),
        }
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{key}: {:?} is not such a number", crate::command::truncated(value)))
}

impl BuildQuery {
    /// Reads decoded pairs of a query; `build_arg` may be repeated.
    ///
    /// # Errors
    /// A text that names the parameter and what it may be.
    pub fn of_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Result<Self, String> {
        let mut query = Self::default();
        for (key, value) in pairs {
            let switch = || match value.as_str() {
                "true" => Ok(true),
                "false" => Ok(false),
                _ => Err(format!("{key}: true or false")),
            };
            match key.as_str() {
                "dockerfile" => query.dockerfile = value,
                "target" => query.target = Some(value),
                "build_arg" => {
                    let (name, value) = value.split_once('=').ok_or("build_arg: NAME=VALUE")?;
                    query.build_args.insert(name.to_owned(), value.to_owned());
                }
                "no_cache" => query.no_cache = switch()?,
                "network" => query.network = switch()?,
                "memory_mib" => query.limits.memory_mib = number(&key, &value)?,
                "cpus" => query.limits.cpus = number(&key, &value)?,
                "pids" => query.limits.pids = number(&key, &value)?,
                "disk_mib" => query.limits.disk_mib = number(&key, &value)?,
                other => return Err(format!("no parameter {:?}", crate::command::truncated(other))),
            }
        }
        query.limits.check()?;
        crate::command::check_env(&query.build_args)?;
        Ok(query)
    }

    /// The pairs that say what differs from the default.
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let usual = Self::default();
        let mut pairs = Vec::new();
        let mut add = |key, value: String, usual: String| {
            if value != usual {
                pairs.push((key, value));
            }
        };
        add("dockerfile", self.dockerfile.clone(), usual.dockerfile);
        add("no_cache", self.no_cache.to_string(), usual.no_cache.to_string());
        add("network", self.network.to_string(), usual.network.to_string());
        add("memory_mib", self.limits.memory_mib.to_string(), usual.limits.memory_mib.to_string());
        add("cpus", self.limits.cpus.to_string(), usual.limits.cpus.to_string());
        add("pids", self.limits.pids.to_string(), usual.limits.pids.to_string());
        add("disk_mib", self.limits.disk_mib.to_string(), usual.limits.disk_mib.to_string());
        pairs.extend(self.target.clone().map(|target| ("target", target)));
        pairs.extend(self.build_args.iter().map(|(k, v)| ("build_arg", format!("{k}={v}"))));
        pairs
    }
}

/// One line of a build's progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum BuildProgress {
    /// A step begins, or its result was there already.
    Step {
        /// Its number, from 1.
        number: u32,
        /// How many there are, over all stages that are built.
        total: u32,
        /// Line of the Dockerfile.
        line: u32,
        /// The instruction.
        text: String,
        /// Nothing has to be done for it: it is about the configuration, or its result was there.
        cached: bool,
    },
    /// What a command of a step wrote. Bytes that are not UTF-8 are replaced.
    Output {
        /// Number of the step.
        number: u32,
        /// `stdout` or `stderr`.
        stream: StreamName,
        /// What it wrote.
        text: String,
    },
    /// Something to know, such as an instruction without effect.
    Note {
        /// What.
        text: String,
    },
    /// All done; the last line of a build that succeeds.
    Imported {
        /// The image.
        image: Box<ImageRecord>,
    },
    /// The build failed; the last line.
    Failed {
        /// What went wrong.
        problem: Problem,
        /// Number of the step that failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        number: Option<u32>,
        /// Exit status of its command, as a shell reports it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        exit_code: Option<i32>,
        /// The end of what it wrote.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output: Option<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_round_trip_and_bad_ones_are_named() {
        let mut query = BuildQuery { target: Some("t".into()), no_cache: true, ..BuildQuery::default() };
        query.build_args = [("A".to_owned(), "1=2".to_owned()), ("B".to_owned(), String::new())].into();
        query.limits.memory_mib = 300;
        let pairs = query.pairs().into_iter().map(|(k, v)| (k.to_owned(), v));
        assert_eq!(BuildQuery::of_pairs(pairs).unwrap(), query);
        assert!(BuildQuery::default().pairs().is_empty());
        for (key, value) in [("no_cache", "1"), ("build_arg", "A"), ("build_arg", "=x"), ("cpus", "many"), ("tag", "x")]
        {
            let error = BuildQuery::of_pairs([(key.to_owned(), value.to_owned())]).unwrap_err();
            assert!(error.contains(key) || key == "build_arg", "{error}");
        }
    }
}
