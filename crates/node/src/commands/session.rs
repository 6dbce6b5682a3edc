//! Shell sessions: a shell that lives between commands, so that directory, variables and functions stay.

use super::Command;
use super::exec::Start;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::{SessionSpec, SessionStatus};
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SessionId};
use corral_api::problem::{ErrorKind, Problem};
use corral_runtime::RuntimeError;
use std::sync::Arc;

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Its shell.
    pub shell: Arc<Command>,
    /// One command at a time.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
}

impl Session {
    /// A session around its shell.
    pub fn new(id: SessionId, shell: Arc<Command>) -> Self {
        Self { id, shell, turn: Arc::default() }
    }

    /// As callers see it.
    pub fn status(&self) -> SessionStatus {
        SessionStatus { id: self.id.clone(), command_id: self.shell.id.clone(), open: self.shell.is_running() }
    }
}

impl Core {
    /// Opens a session.
    ///
    /// # Errors
    /// When no shell can be started.
    pub async fn open_session(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        spec: SessionSpec,
    ) -> Result<Arc<Session>, Problem> {
        corral_api::command::check_env(&spec.env).map_err(|t| Problem::new(ErrorKind::InvalidRequest, t))?;
        let id = SessionId::random();
        let shells = spec.shell.clone().map_or_else(|| vec!["/bin/bash".to_owned(), "/bin/sh".to_owned()], |s| vec![s]);
        let mut last = Problem::new(ErrorKind::CommandNotStarted, "no shell");
        for shell in shells {
            let start = Start {
                env: spec.env.clone(),
                cwd: spec.cwd.clone(),
                user: spec.user.clone(),
                open_stdin: true,
                shell_of: Some(id.clone()),
                ..Start::new(CommandId::random(), vec![shell], Digest::of(id.as_str().as_bytes()))
            };
            let (this, of) = (self.clone(), sandbox.clone());
            let started = tokio::spawn(async move { this.start_or_find(&of, start).await })
                .await
                .unwrap_or_else(|_| Err(Problem::new(ErrorKind::Internal, "starting the shell failed unexpectedly")));
            match started {
                Ok(command) => {
                    let session = Arc::new(Session::new(id.clone(), command));
                    sandbox.lock().sessions.insert(id, session.clone());
                    return Ok(session);
                }
                Err(problem) if problem.kind == ErrorKind::CommandNotStarted => last = problem,
                Err(problem) => return Err(problem),
            }
        }
        Err(last)
    }

    /// Closes a session and kills what it started.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn close_session(self: &Arc<Self>, sandbox: &Arc<Sandbox>, session: &Session) -> Result<(), Problem> {
        self.kill_shell(sandbox, session).await.map_err(|e| crate::error::runtime_problem(&e))?;
        sandbox.lock().sessions.remove(&session.id);
        Ok(())
    }

    /// Kills a session's shell with all it started, and waits for its end.
    pub(super) async fn kill_shell(&self, sandbox: &Sandbox, session: &Session) -> Result<(), RuntimeError> {
        self.containers.kill_command(&sandbox.id, &session.shell.id)?;
        session.shell.ended().await;
        Ok(())
    }
}
