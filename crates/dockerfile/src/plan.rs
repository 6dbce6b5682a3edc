//! A build as it will be done: stages in order, with everything expanded.

use corral_api::image::ImageConfig;
use serde::Serialize;
use std::collections::BTreeMap;

/// What a build does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The stages that the target needs, each after those it stands on; the last is the target.
    pub stages: Vec<StagePlan>,
    /// Build arguments that no stage took.
    pub unused_args: Vec<String>,
}

impl Plan {
    /// How many steps there are.
    pub fn step_count(&self) -> usize {
        self.stages.iter().map(|s| s.steps.len()).sum()
    }
}

/// What a stage begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// Nothing.
    Scratch,
    /// An image of the catalogue.
    Image(String),
    /// A stage before it, by its place in the plan.
    Stage(usize),
}

/// A stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagePlan {
    /// Its name.
    pub name: Option<String>,
    /// What it begins with.
    pub base: Base,
    /// Its steps, without `FROM`.
    pub steps: Vec<Step>,
    /// The configuration after the last step.
    pub config: ImageConfig,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Line of its instruction.
    pub line: usize,
    /// The instruction's name.
    pub name: &'static str,
    /// The instruction as it is written.
    pub text: String,
    /// What is done.
    pub action: Action,
}

/// What a step does to the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Nothing: it is about the configuration.
    Config,
    /// Nothing, and nothing else: the instruction has no effect in Corral.
    Noted,
    /// Runs a command.
    Run(RunStep),
    /// Copies files.
    Copy(CopyStep),
    /// Makes the working directory where it is missing.
    Workdir(String),
}

/// `RUN`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RunStep {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// All its variables.
    pub env: BTreeMap<String, String>,
    /// Working directory.
    pub cwd: String,
    /// User; empty for root.
    pub user: String,
    /// Text for its standard input.
    pub stdin: Option<String>,
}

/// Whose files `COPY` takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyFrom {
    /// The context's.
    Context,
    /// A stage's, by its place in the plan.
    Stage(usize),
    /// An image's.
    Image(String),
}

/// A source of `COPY`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopySource {
    /// A path or pattern.
    Path(String),
    /// A file given in the Dockerfile.
    Inline {
        /// Its name.
        name: String,
        /// Its content.
        text: String,
    },
}

/// `COPY` and `ADD`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CopyStep {
    /// Whose files.
    pub from: CopyFrom,
    /// Which.
    pub sources: Vec<CopySource>,
    /// Where to: absolute, without a slash at its end.
    pub dest: String,
    /// The destination is a directory, also where it is missing.
    pub into_directory: bool,
    /// Owner instead of root.
    pub chown: Option<String>,
    /// Permission bits instead of the files' own.
    pub chmod: Option<u32>,
    /// Archives are unpacked.
    pub unpack: bool,
}
