//! Why a build ends without an image.

use crate::refusal::Refusal;
use corral_api::problem::{ErrorKind, Problem};
use corral_dockerfile::DockerfileError;

/// A build that failed, as its last line tells it.
#[derive(Debug)]
pub struct Failure {
    /// What went wrong.
    pub refusal: Refusal,
    /// In which step.
    pub number: Option<u32>,
    /// Exit status of its command.
    pub exit_code: Option<i32>,
    /// The end of what it wrote.
    pub output: Option<String>,
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, number: None, exit_code: None, output: None }
    }
}

impl Failure {
    /// A step's failure, in the caller's words.
    pub fn build(text: impl Into<String>) -> Self {
        Refusal::new(ErrorKind::BuildFailed, text).into()
    }

    /// Names the step, where it is not named yet.
    #[must_use]
    pub fn in_step(mut self, number: u32, line: usize, name: &str) -> Self {
        if self.number.is_none() {
            self.number = Some(number);
            let problem = &mut self.refusal.problem;
            problem.message = format!("Dockerfile line {line}, {name}: {}", problem.message);
            // The sandbox is gone when this is read.
            problem.sandbox_id = None;
        }
        self
    }
}

impl From<DockerfileError> for Refusal {
    fn from(error: DockerfileError) -> Self {
        let kind = if error.is_unsupported() { ErrorKind::Unsupported } else { ErrorKind::InvalidRequest };
        Problem::new(kind, error.to_string()).into()
    }
}
