//! What can be wrong with a Dockerfile.

/// A fault of a Dockerfile, with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Dockerfile line {line}, {instruction}: {fault}")]
pub struct DockerfileError {
    /// Line of the instruction, from 1.
    pub line: usize,
    /// The instruction, as it is written.
    pub instruction: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with an instruction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// It cannot be read.
    #[error("{0}")]
    Syntax(String),
    /// A flag that it does not have.
    #[error("it has no flag --{0}")]
    UnknownFlag(String),
    /// A flag's value that cannot be.
    #[error("--{flag}={value}: {why}")]
    BadFlag {
        /// The flag.
        flag: String,
        /// Its value.
        value: String,
        /// What it may be.
        why: &'static str,
    },
    /// A flag given twice.
    #[error("--{0} is given twice")]
    RepeatedFlag(String),
    /// Something Docker has and Corral does not.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// A variable that cannot be expanded.
    #[error("{0}")]
    Expansion(String),
    /// A stage that is not defined before it is used.
    #[error("there is no stage {0:?} before this line")]
    UnknownStage(String),
    /// A name that stands for two stages.
    #[error("a stage is named {0:?} already")]
    RepeatedStage(String),
    /// A stage name that cannot be.
    #[error("a stage cannot be named {0:?}: letters, digits, -, _ and ., beginning with a letter")]
    BadStageName(String),
    /// A platform that there are no sandboxes of.
    #[error("platform {0:?}: only linux/amd64 is built")]
    Platform(String),
    /// An image that is not in the catalogue.
    #[error("there is no image {0:?}: import it first")]
    UnknownImage(String),
    /// What is left of an argument is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// `COPY` of several sources to something that is no directory.
    #[error("several sources need a directory as destination: {0:?} does not end with /")]
    NotADirectory(String),
    /// A source that leads out of the context.
    #[error("source {0:?} leads out of the build context")]
    Outside(String),
    /// A source of `ADD` that would be fetched.
    #[error("source {0:?} would be fetched: there is no network in a build; put the file into the context")]
    Remote(String),
    /// There are too many of something.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The most.
        limit: usize,
    },
}

impl DockerfileError {
    /// Whether it asks for something that Docker has and Corral does not.
    pub fn is_unsupported(&self) -> bool {
        matches!(self.fault, Fault::Unsupported(_) | Fault::Platform(_) | Fault::Remote(_))
    }

    pub(crate) fn new(line: usize, instruction: &str, fault: Fault) -> Self {
        Self { line, instruction: instruction.chars().take(40).collect(), fault }
    }
}
