//! The state of a stage between its instructions: configuration, arguments, shell.

use crate::copy::clean_text;
use crate::error::Fault;
use crate::expand::Scope;
use crate::parse::{Command, Copy, Instruction, Op, Run, Source};
use crate::plan::{Action, CopyFrom, CopySource, CopyStep, RunStep, Step};
use crate::words::shown;
use corral_api::image::ImageConfig;
use std::collections::{BTreeMap, BTreeSet};

/// A stage so far.
#[derive(Debug, Clone)]
pub struct Stage<'a> {
    /// The image's configuration.
    pub config: ImageConfig,
    /// Arguments of the caller that were taken.
    pub used: BTreeSet<String>,
    args: BTreeMap<String, String>,
    shell: Vec<String>,
    cmd_given: bool,
    globals: Option<&'a BTreeMap<String, String>>,
    given: Option<&'a BTreeMap<String, String>>,
    escape: char,
}

impl<'a> Stage<'a> {
    /// A stage on an image.
    pub fn new(config: ImageConfig) -> Self {
        Self {
            config,
            used: BTreeSet::new(),
            args: BTreeMap::new(),
            shell: ["/bin/sh", "-c"].map(str::to_owned).to_vec(),
            cmd_given: false,
            globals: None,
            given: None,
            escape: '\\',
        }
    }

    /// A stage on this one: arguments end with their stage.
    pub fn next(&self) -> Self {
        Self { args: BTreeMap::new(), cmd_given: false, ..self.clone() }
    }

    /// Tells what is known outside of it.
    pub fn enter(&mut self, globals: &'a BTreeMap<String, String>, given: &'a BTreeMap<String, String>, escape: char) {
        (self.globals, self.given, self.escape) = (Some(globals), Some(given), escape);
    }

    fn scope(&self) -> Scope<'_> {
        Scope { env: &self.config.env, args: &self.args, escape: self.escape }
    }

    fn expand(&self, text: &str) -> Result<String, Fault> {
        let text = self.scope().expand(text).map_err(Fault::Expansion)?;
        if text.contains('\0') { Err(Fault::Syntax("it holds a NUL byte".to_owned())) } else { Ok(text) }
    }

    /// Pairs, expanded with what was known before the instruction.
    fn pairs(&self, pairs: &[(String, String)]) -> Result<Vec<(String, String)>, Fault> {
        let expanded = pairs.iter().map(|(name, value)| {
            let name = self.expand(name)?;
            if name.is_empty() { Err(Fault::Empty("a name")) } else { Ok((name, self.expand(value)?)) }
        });
        expanded.collect()
    }

    fn absolute(&self, path: &str) -> String {
        let absolute = self.config.absolute(path);
        // Above the root is the root.
        let mut names: Vec<&str> = Vec::new();
        for name in absolute.split('/') {
            match name {
                "" | "." => {}
                ".." => drop(names.pop()),
                other => names.push(other),
            }
        }
        format!("/{}", names.join("/"))
    }

    fn argv(&self, command: &Command) -> Vec<String> {
        match command {
            Command::Exec(words) => words.clone(),
            Command::Shell(text) => [self.shell.as_slice(), std::slice::from_ref(text)].concat(),
        }
    }

    /// Takes an instruction in. `from` is whose files it copies.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn step(&mut self, instruction: &Instruction, from: CopyFrom) -> Result<Step, Fault> {
        let mut action = Action::Config;
        match &instruction.op {
            Op::Arg(args) => self.args(args)?,
            Op::Env(pairs) => {
                let pairs = self.pairs(pairs)?;
                if pairs.iter().any(|(name, _)| name.contains('=')) {
                    return Err(Fault::Syntax("a variable's name holds =".to_owned()));
                }
                self.config.env.extend(pairs);
            }
            Op::Label(pairs) => {
                let pairs = self.pairs(pairs)?;
                self.config.labels.extend(pairs);
            }
            Op::User(user) => {
                let user = self.expand(user.trim())?;
                if user.is_empty() {
                    return Err(Fault::Empty("the user"));
                }
                self.config.user = user;
            }
            Op::Workdir(path) => {
                let path = self.expand(path.trim())?;
                if path.is_empty() {
                    return Err(Fault::Empty("the directory"));
                }
                self.config.workdir = self.absolute(&path);
                action = Action::Workdir(self.config.workdir.clone());
            }
            Op::Cmd(command) => {
                self.config.cmd = self.argv(command);
                self.cmd_given = true;
            }
            Op::Entrypoint(command) => {
                self.config.entrypoint = self.argv(command);
                // The arguments of the image below were meant for its own entry point.
                if !self.cmd_given {
                    self.config.cmd.clear();
                }
            }
            Op::Shell(words) => self.shell.clone_from(words),
            Op::Run(run) => action = Action::Run(self.run(run)?),
            Op::Copy(copy) => action = Action::Copy(self.copy(copy, from)?),
            Op::Noted => action = Action::Noted,
        }
        Ok(Step { line: instruction.line, name: instruction.name, text: instruction.text.clone(), action })
    }

    fn args(&mut self, args: &[(String, Option<String>)]) -> Result<(), Fault> {
        for (name, default) in args {
            let name = self.expand(name)?;
            if name.is_empty() {
                return Err(Fault::Empty("a name"));
            }
            let given = self.given.and_then(|given| given.get(&name)).cloned();
            if given.is_some() {
                self.used.insert(name.clone());
            }
            let value = match (given, default) {
                (Some(given), _) => Some(given),
                (None, Some(default)) => Some(self.expand(default)?),
                (None, None) => self.globals.and_then(|globals| globals.get(&name)).cloned(),
            };
            match value {
                Some(value) => drop(self.args.insert(name, value)),
                None => drop(self.args.remove(&name)),
            }
        }
        Ok(())
    }

    fn run(&self, run: &Run) -> Result<RunStep, Fault> {
        let (argv, stdin) = match run {
            Run::Command(command) => (self.argv(command), None),
            Run::Script { rest, text, .. } if rest.is_empty() => match text.strip_prefix("#!") {
                // Its own interpreter reads it.
                Some(after) => {
                    let line = after.lines().next().unwrap_or_default();
                    let mut argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
                    if argv.is_empty() {
                        return Err(Fault::Empty("the interpreter"));
                    }
                    argv.push("/dev/stdin".to_owned());
                    (argv, Some(text.clone()))
                }
                None => (self.argv(&Command::Shell(text.clone())), None),
            },
            Run::Script { rest, text, expand } => {
                let mut mark = "CORRAL_END".to_owned();
                while text.lines().any(|line| line == mark) {
                    mark.push('_');
                }
                let quoted = if *expand { mark.clone() } else { format!("'{mark}'") };
                (self.argv(&Command::Shell(format!("<<{quoted} {rest}\n{text}{mark}"))), None)
            }
        };
        if argv.first().is_none_or(String::is_empty) {
            return Err(Fault::Empty("the program"));
        }
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(Fault::Syntax("it holds a NUL byte".to_owned()));
        }
        let mut env = self.args.clone();
        env.extend(self.config.env.clone());
        let cwd = self.config.absolute("");
        Ok(RunStep { argv, env, cwd, user: self.config.user.clone(), stdin })
    }

    fn copy(&self, copy: &Copy, from: CopyFrom) -> Result<CopyStep, Fault> {
        let mut sources = Vec::new();
        for source in &copy.sources {
            sources.push(match source {
                Source::Path(path) => {
                    let path = self.expand(path)?;
                    if path.is_empty() {
                        return Err(Fault::Empty("a source"));
                    }
                    if copy.add && is_remote(&path) {
                        return Err(Fault::Remote(shown(&path)));
                    }
                    if clean_text(&path).is_none() {
                        return Err(Fault::Outside(shown(&path)));
                    }
                    CopySource::Path(path)
                }
                Source::Inline { name, text, expand } => {
                    if name.is_empty() || name.contains('/') || name == "." || name == ".." {
                        return Err(Fault::Syntax(format!("{:?} cannot name a file", shown(name))));
                    }
                    let text = match expand {
                        true => self.scope().expand_text(text).map_err(Fault::Expansion)?,
                        false => text.clone(),
                    };
                    CopySource::Inline { name: name.clone(), text }
                }
            });
        }
        let dest = self.expand(&copy.dest)?;
        if dest.is_empty() {
            return Err(Fault::Empty("the destination"));
        }
        let into_directory = matches!(dest.rsplit('/').next(), Some("" | "." | ".."));
        if sources.len() > 1 && !into_directory {
            return Err(Fault::NotADirectory(shown(&dest)));
        }
        let chmod = match &copy.chmod {
            None => None,
            Some(text) => {
                let text = self.expand(text)?;
                let mode = u32::from_str_radix(&text, 8).ok().filter(|m| *m <= 0o7777);
                let why = "permission bits in octal, such as 755";
                Some(mode.ok_or_else(|| Fault::BadFlag { flag: "chmod".into(), value: shown(&text), why })?)
            }
        };
        let chown = copy.chown.as_deref().map(|text| self.expand(text)).transpose()?;
        Ok(CopyStep { from, sources, dest: self.absolute(&dest), into_directory, chown, chmod, unpack: copy.add })
    }
}

fn is_remote(source: &str) -> bool {
    let lower = source.to_lowercase();
    lower.contains("://") || lower.starts_with("git@")
}
