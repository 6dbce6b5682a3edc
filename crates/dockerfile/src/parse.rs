//! From text to instructions: what `parse-dockerfile` reads, with flags checked and lines named. Nothing is expanded.

use crate::error::{DockerfileError, Fault};
use crate::{heredoc, words};
use parse_dockerfile as pd;
use std::collections::BTreeMap;

/// The most instructions of a Dockerfile.
const MAX_INSTRUCTIONS: usize = 2000;
/// The longest text of a step that is shown.
const SHOWN: usize = 200;

/// A Dockerfile as it is written.
#[derive(Debug)]
pub struct Parsed {
    /// The escape sign.
    pub escape: char,
    /// `ARG` before the first stage.
    pub globals: Vec<Instruction>,
    /// Stages.
    pub stages: Vec<ParsedStage>,
}

/// A stage as it is written.
#[derive(Debug)]
pub struct ParsedStage {
    /// `FROM`.
    pub from: From,
    /// What follows it.
    pub instructions: Vec<Instruction>,
}

/// `FROM`.
#[derive(Debug)]
pub struct From {
    /// Its line.
    pub line: usize,
    /// The image or stage.
    pub image: String,
    /// `--platform`.
    pub platform: Option<String>,
    /// The stage's name, in lower case.
    pub name: Option<String>,
}

/// An instruction.
#[derive(Debug)]
pub struct Instruction {
    /// Its line.
    pub line: usize,
    /// As it is shown.
    pub text: String,
    /// Its name.
    pub name: &'static str,
    /// What it says.
    pub op: Op,
}

/// What an instruction says.
#[derive(Debug)]
pub enum Op {
    /// Build arguments and their defaults.
    Arg(Vec<(String, Option<String>)>),
    /// Variables.
    Env(Vec<(String, String)>),
    /// Labels.
    Label(Vec<(String, String)>),
    /// A command to run.
    Run(Run),
    /// `COPY` and `ADD`.
    Copy(Copy),
    /// Working directory.
    Workdir(String),
    /// User.
    User(String),
    /// Arguments of the entry point.
    Cmd(Command),
    /// Entry point.
    Entrypoint(Command),
    /// The shell of shell forms.
    Shell(Vec<String>),
    /// Understood, without effect here.
    Noted,
}

/// A command in one of its forms.
#[derive(Debug)]
pub enum Command {
    /// Program and arguments.
    Exec(Vec<String>),
    /// A line for the shell.
    Shell(String),
}

/// `RUN`.
#[derive(Debug)]
pub enum Run {
    /// Without a here-document.
    Command(Command),
    /// A here-document, and what stands behind its mark.
    Script {
        /// The rest of the line.
        rest: String,
        /// The document.
        text: String,
        /// The mark was not quoted.
        expand: bool,
    },
}

/// `COPY` and `ADD`.
#[derive(Debug)]
pub struct Copy {
    /// `--from`.
    pub from: Option<String>,
    /// `--chown`.
    pub chown: Option<String>,
    /// `--chmod`.
    pub chmod: Option<String>,
    /// Sources.
    pub sources: Vec<Source>,
    /// Destination.
    pub dest: String,
    /// It is `ADD`.
    pub add: bool,
}

/// A source of `COPY`.
#[derive(Debug)]
pub enum Source {
    /// A path or pattern.
    Path(String),
    /// A here-document.
    Inline {
        /// The mark, which names the file.
        name: String,
        /// The content.
        text: String,
        /// Variables in it are expanded.
        expand: bool,
    },
}

/// Reads a Dockerfile.
///
/// # Errors
/// It cannot be read, or asks for what there is not.
pub fn parse(text: &str) -> Result<Parsed, DockerfileError> {
    let lifted = heredoc::lift(text.trim_start_matches('\u{feff}'))?;
    let text = lifted.text.as_str();
    let file = pd::parse(text).map_err(|error| {
        // An error of the whole file has no line.
        let line = error.line().max(1);
        let first = text.lines().nth(line - 1).unwrap_or_default().split_whitespace().next().unwrap_or("Dockerfile");
        DockerfileError::new(line, first, Fault::Syntax(format!("{error:#}")))
    })?;
    if file.instructions.len() > MAX_INSTRUCTIONS {
        let fault = Fault::TooMany { what: "instructions", limit: MAX_INSTRUCTIONS };
        return Err(DockerfileError::new(1, "Dockerfile", fault));
    }
    let escape = file.parser_directives.escape.as_ref().map_or('\\', |d| d.value.value);
    let lines: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let reader = Reader { text, escape, lines, documents: &lifted.documents };
    let mut parsed = Parsed { escape, globals: Vec::new(), stages: Vec::new() };
    for instruction in &file.instructions {
        if let pd::Instruction::From(from) = instruction {
            parsed.stages.push(ParsedStage { from: reader.from(from)?, instructions: Vec::new() });
            continue;
        }
        let read = reader.instruction(instruction)?;
        match parsed.stages.last_mut() {
            Some(stage) => stage.instructions.push(read),
            None => parsed.globals.push(read),
        }
    }
    Ok(parsed)
}

struct Reader<'a> {
    text: &'a str,
    escape: char,
    lines: Vec<usize>,
    documents: &'a BTreeMap<usize, String>,
}

/// The flags of one instruction.
struct Flags {
    at: (usize, &'static str),
    given: Vec<(String, Option<String>)>,
}

impl Flags {
    fn new(at: (usize, &'static str), flags: &[pd::Flag<'_>]) -> Result<Self, DockerfileError> {
        let mut given: Vec<(String, Option<String>)> = Vec::new();
        for flag in flags {
            let name = flag.name.value.to_string();
            if given.iter().any(|(n, _)| *n == name) {
                return Err(DockerfileError::new(at.0, at.1, Fault::RepeatedFlag(words::shown(&name))));
            }
            given.push((name, flag.value.as_ref().map(|v| v.value.to_string())));
        }
        Ok(Self { at, given })
    }

    fn take(&mut self, name: &str) -> Result<Option<String>, DockerfileError> {
        let Some(at) = self.given.iter().position(|(n, _)| n == name) else { return Ok(None) };
        match self.given.remove(at).1 {
            Some(value) if !value.is_empty() => Ok(Some(value)),
            _ => {
                let fault = Fault::BadFlag { flag: name.to_owned(), value: String::new(), why: "it needs a value" };
                Err(self.error(fault))
            }
        }
    }

    /// A switch, with or without a value.
    fn drop(&mut self, name: &str) {
        self.given.retain(|(n, _)| n != name);
    }

    fn refuse(&self, name: &str, what: &'static str) -> Result<(), DockerfileError> {
        if self.given.iter().any(|(n, _)| n == name) { Err(self.error(Fault::Unsupported(what))) } else { Ok(()) }
    }

    fn error(&self, fault: Fault) -> DockerfileError {
        DockerfileError::new(self.at.0, self.at.1, fault)
    }

    fn done(self) -> Result<(), DockerfileError> {
        match self.given.first() {
            Some((name, _)) => Err(self.error(Fault::UnknownFlag(words::shown(name)))),
            None => Ok(()),
        }
    }
}

fn strings<'b, 'c: 'b>(texts: impl IntoIterator<Item = &'b pd::UnescapedString<'c>>) -> Vec<String> {
    texts.into_iter().map(|t| t.value.to_string()).collect()
}

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|newline| *newline < at) + 1
    }

    fn from(&self, from: &pd::FromInstruction<'_>) -> Result<From, DockerfileError> {
        let line = self.line(from.from.span.start);
        let mut flags = Flags::new((line, "FROM"), &from.options)?;
        let platform = flags.take("platform")?;
        flags.done()?;
        let name = from.as_.as_ref().map(|(_, name)| name.value.to_lowercase());
        if let Some(name) = &name {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(fits) || name == "scratch" {
                return Err(DockerfileError::new(line, "FROM", Fault::BadStageName(words::shown(name))));
            }
        }
        Ok(From { line, image: from.image.value.to_string(), platform, name })
    }

    fn command(&self, command: &pd::Command<'_>) -> Option<Command> {
        match command {
            pd::Command::Exec(words) => Some(Command::Exec(strings(&words.value))),
            pd::Command::Shell(text) => Some(Command::Shell(words::join(text.value, self.escape))),
            _ => None,
        }
    }

    fn instruction(&self, instruction: &pd::Instruction<'_>) -> Result<Instruction, DockerfileError> {
        use pd::Instruction as I;
        let (name, span) = match instruction {
            I::Add(i) => ("ADD", &i.add.span),
            I::Arg(i) => ("ARG", &i.arg.span),
            I::Cmd(i) => ("CMD", &i.cmd.span),
            I::Copy(i) => ("COPY", &i.copy.span),
            I::Entrypoint(i) => ("ENTRYPOINT", &i.entrypoint.span),
            I::Env(i) => ("ENV", &i.env.span),
            I::Expose(i) => ("EXPOSE", &i.expose.span),
            I::Healthcheck(i) => ("HEALTHCHECK", &i.healthcheck.span),
            I::Label(i) => ("LABEL", &i.label.span),
            I::Maintainer(i) => ("MAINTAINER", &i.maintainer.span),
            I::Onbuild(i) => ("ONBUILD", &i.onbuild.span),
            I::Run(i) => ("RUN", &i.run.span),
            I::Shell(i) => ("SHELL", &i.shell.span),
            I::Stopsignal(i) => ("STOPSIGNAL", &i.stopsignal.span),
            I::User(i) => ("USER", &i.user.span),
            I::Volume(i) => ("VOLUME", &i.volume.span),
            I::Workdir(i) => ("WORKDIR", &i.workdir.span),
            _ => return Err(DockerfileError::new(1, "Dockerfile", Fault::Unsupported("an instruction"))),
        };
        let line = self.line(span.start);
        let bad = |fault| DockerfileError::new(line, name, fault);
        let syntax = |text: String| bad(Fault::Syntax(text));
        let no_form = || syntax("its form is not known".to_owned());
        let raw = words::join(&self.text[span.end..], self.escape);
        let op = match instruction {
            I::Arg(i) => {
                let words = words::split(&i.arguments.value, self.escape).map_err(syntax)?;
                let pair = |word: String| match word.split_once('=') {
                    Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                    None => (word, None),
                };
                Op::Arg(words.into_iter().map(pair).collect())
            }
            I::Env(i) => Op::Env(words::pairs(&i.arguments.value, self.escape).map_err(syntax)?),
            I::Label(i) => Op::Label(words::pairs(&i.arguments.value, self.escape).map_err(syntax)?),
            I::Run(i) => Op::Run(self.run(line, i)?),
            I::Copy(i) => Op::Copy(self.copy((line, "COPY"), &i.options, &i.src, &i.dest.value, &raw)?),
            I::Add(i) => Op::Copy(self.copy((line, "ADD"), &i.options, &i.src, &i.dest.value, &raw)?),
            I::Workdir(i) => Op::Workdir(i.arguments.value.to_string()),
            I::User(i) => Op::User(i.arguments.value.to_string()),
            I::Cmd(i) => Op::Cmd(self.command(&i.arguments).ok_or_else(no_form)?),
            I::Entrypoint(i) => Op::Entrypoint(self.command(&i.arguments).ok_or_else(no_form)?),
            I::Shell(i) => Op::Shell(strings(&i.arguments)),
            I::Onbuild(_) => return Err(bad(Fault::Unsupported("ONBUILD"))),
            _ => Op::Noted,
        };
        let text = format!("{name} {raw}").chars().take(SHOWN).collect();
        Ok(Instruction { line, text, name, op })
    }

    fn run(&self, line: usize, run: &pd::RunInstruction<'_>) -> Result<Run, DockerfileError> {
        let mut flags = Flags::new((line, "RUN"), &run.options)?;
        flags.refuse("mount", "RUN --mount")?;
        flags.refuse("security", "RUN --security")?;
        flags.refuse("device", "RUN --device")?;
        match flags.take("network")?.as_deref() {
            // There is no network in a build: both mean what there is.
            None | Some("none" | "default") => {}
            Some(_) => return Err(flags.error(Fault::Unsupported("RUN --network=host"))),
        }
        flags.done()?;
        let command = self.command(&run.arguments);
        let command = command
            .ok_or_else(|| DockerfileError::new(line, "RUN", Fault::Syntax("its form is not known".to_owned())))?;
        match (run.here_docs.first(), command) {
            (Some(doc), Command::Shell(rest)) => {
                Ok(Run::Script { rest, text: doc.value.to_string(), expand: doc.expand })
            }
            (None, Command::Shell(text)) if self.documents.contains_key(&line) => {
                let document = self.documents[&line].trim_end_matches(['\n', '\r']);
                Ok(Run::Command(Command::Shell(format!("{text}\n{document}"))))
            }
            (_, Command::Shell(text)) if text.is_empty() => {
                Err(DockerfileError::new(line, "RUN", Fault::Empty("the command")))
            }
            (_, command) => Ok(Run::Command(command)),
        }
    }

    fn copy(
        &self,
        at: (usize, &'static str),
        options: &[pd::Flag<'_>],
        sources: &[pd::Source<'_>],
        dest: &str,
        raw: &str,
    ) -> Result<Copy, DockerfileError> {
        let add = at.1 == "ADD";
        let mut flags = Flags::new(at, options)?;
        // Layers are what a step wrote: there is nothing else to link.
        flags.drop("link");
        let from = if add { None } else { flags.take("from")? };
        let (chown, chmod) = (flags.take("chown")?, flags.take("chmod")?);
        flags.refuse("parents", "--parents")?;
        flags.refuse("exclude", "--exclude")?;
        if add {
            flags.refuse("checksum", "ADD --checksum")?;
            flags.refuse("keep-git-dir", "ADD --keep-git-dir")?;
            flags.refuse("unpack", "ADD --unpack")?;
        }
        flags.done()?;
        let mut marks = raw.split_whitespace().filter_map(|word| word.strip_prefix("<<"));
        let mut source = |source: &pd::Source<'_>| match source {
            pd::Source::Path(path) => Some(Source::Path(path.value.to_string())),
            pd::Source::HereDoc(doc) => {
                let mark = marks.next().unwrap_or_default();
                let name = mark.trim_start_matches('-').replace(['"', '\'', '\\'], "");
                Some(Source::Inline { name, text: doc.value.to_string(), expand: doc.expand })
            }
            _ => None,
        };
        let sources = sources.iter().map(&mut source).collect::<Option<Vec<_>>>();
        let sources = sources
            .ok_or_else(|| DockerfileError::new(at.0, at.1, Fault::Syntax("a source's form is not known".into())))?;
        Ok(Copy { from, chown, chmod, sources, dest: dest.to_owned(), add })
    }
}
