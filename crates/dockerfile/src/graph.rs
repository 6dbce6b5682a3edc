//! The stages of a Dockerfile: what each stands on, and which the target needs.

use crate::error::{DockerfileError, Fault};
use crate::expand::Scope;
use crate::parse::{self, From, Op, Parsed};
use crate::plan::{Base, CopyFrom, Plan, StagePlan};
use crate::stage::Stage;
use crate::words::shown;
use corral_api::image::ImageConfig;
use std::collections::{BTreeMap, BTreeSet};

/// The most stages of a Dockerfile.
const MAX_STAGES: usize = 100;
/// What a platform may be called.
const PLATFORMS: [&str; 3] = ["linux/amd64", "linux", "linux/x86_64"];
/// Arguments that are known before the first line; a stage sees those it declares.
const PREDEFINED: [(&str, &str); 8] = [
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
    ("TARGETVARIANT", ""),
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("BUILDVARIANT", ""),
];

/// What a caller gives beside the Dockerfile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Build arguments.
    pub build_args: BTreeMap<String, String>,
    /// Name or number of the stage to build; the last one where absent.
    pub target: Option<String>,
}

/// A Dockerfile, its stages related to each other.
#[derive(Debug)]
pub struct Graph {
    parsed: Parsed,
    options: Options,
    /// Arguments before the first stage.
    globals: BTreeMap<String, String>,
    /// Taken by an `ARG` before the first stage.
    used: BTreeSet<String>,
    bases: Vec<Base>,
    /// Of each stage, whose files each of its instructions copies.
    copies: Vec<BTreeMap<usize, CopyFrom>>,
    /// Stages the target needs, in order.
    needed: Vec<usize>,
}

impl Graph {
    /// Reads a Dockerfile.
    ///
    /// # Errors
    /// It cannot be read, asks for what there is not, or names a stage or target that is not there.
    pub fn new(text: &str, options: Options) -> Result<Self, DockerfileError> {
        let parsed = parse::parse(text)?;
        if parsed.stages.len() > MAX_STAGES {
            let line = parsed.stages[MAX_STAGES].from.line;
            return Err(DockerfileError::new(line, "FROM", Fault::TooMany { what: "stages", limit: MAX_STAGES }));
        }
        let mut graph = Self {
            parsed,
            options,
            globals: PREDEFINED.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            used: BTreeSet::new(),
            bases: Vec::new(),
            copies: Vec::new(),
            needed: Vec::new(),
        };
        graph.take_globals()?;
        for index in 0..graph.parsed.stages.len() {
            let base = graph.base(index)?;
            graph.bases.push(base);
            let copies = graph.copies_of(index)?;
            graph.copies.push(copies);
        }
        let target = graph.target()?;
        graph.need(target);
        Ok(graph)
    }

    fn take_globals(&mut self) -> Result<(), DockerfileError> {
        let nothing = BTreeMap::new();
        for instruction in &self.parsed.globals {
            let Op::Arg(args) = &instruction.op else { continue };
            for (name, default) in args {
                let error = |text| DockerfileError::new(instruction.line, "ARG", Fault::Expansion(text));
                let given = self.options.build_args.get(name);
                self.used.insert(name.clone());
                let value = match (given, default) {
                    (Some(value), _) => value.clone(),
                    (None, Some(default)) => {
                        let scope = Scope { env: &nothing, args: &self.globals, escape: self.parsed.escape };
                        scope.expand(default).map_err(error)?
                    }
                    (None, None) => continue,
                };
                self.globals.insert(name.clone(), value);
            }
        }
        Ok(())
    }

    fn expand(&self, from: &From, text: &str) -> Result<String, DockerfileError> {
        let nothing = BTreeMap::new();
        let scope = Scope { env: &nothing, args: &self.globals, escape: self.parsed.escape };
        scope.expand(text).map_err(|text| DockerfileError::new(from.line, "FROM", Fault::Expansion(text)))
    }

    fn named(&self, name: &str) -> Option<usize> {
        let name = name.to_lowercase();
        self.parsed.stages.iter().position(|s| s.from.name.as_ref() == Some(&name))
    }

    fn base(&self, index: usize) -> Result<Base, DockerfileError> {
        let from = &self.parsed.stages[index].from;
        let error = |fault| DockerfileError::new(from.line, "FROM", fault);
        if let Some(platform) = &from.platform {
            let platform = self.expand(from, platform)?;
            if !PLATFORMS.contains(&platform.as_str()) {
                return Err(error(Fault::Platform(shown(&platform))));
            }
        }
        if let Some(name) = &from.name
            && self.named(name) != Some(index)
        {
            return Err(error(Fault::RepeatedStage(name.clone())));
        }
        let image = self.expand(from, &from.image)?;
        match image.as_str() {
            "" => Err(error(Fault::Empty("the image's name"))),
            "scratch" => Ok(Base::Scratch),
            name => match self.named(name) {
                Some(stage) if stage < index => Ok(Base::Stage(stage)),
                // A stage may have the name of the image it is made from.
                _ => Ok(Base::Image(image)),
            },
        }
    }

    fn copies_of(&self, index: usize) -> Result<BTreeMap<usize, CopyFrom>, DockerfileError> {
        let mut copies = BTreeMap::new();
        for (at, instruction) in self.parsed.stages[index].instructions.iter().enumerate() {
            let Op::Copy(copy) = &instruction.op else { continue };
            let Some(from) = &copy.from else { continue };
            let error = |fault| DockerfileError::new(instruction.line, instruction.name, fault);
            let unknown = || error(Fault::UnknownStage(shown(from)));
            let found = match (from.parse::<usize>(), self.named(from)) {
                (Ok(stage), _) if stage < index => CopyFrom::Stage(stage),
                (_, Some(stage)) if stage < index => CopyFrom::Stage(stage),
                (Ok(_), _) | (_, Some(_)) => return Err(unknown()),
                _ if from.contains('$') => {
                    let why = "variables are not expanded here";
                    return Err(error(Fault::BadFlag { flag: "from".into(), value: shown(from), why }));
                }
                _ if from == "scratch" => return Err(unknown()),
                _ => CopyFrom::Image(from.clone()),
            };
            copies.insert(at, found);
        }
        Ok(copies)
    }

    fn target(&self) -> Result<usize, DockerfileError> {
        let last = self.parsed.stages.len() - 1;
        let Some(target) = &self.options.target else { return Ok(last) };
        let number = target.parse::<usize>().ok().filter(|n| *n <= last);
        self.named(target).or(number).ok_or_else(|| {
            let line = self.parsed.stages[last].from.line;
            DockerfileError::new(line, "target", Fault::UnknownStage(shown(target)))
        })
    }

    /// Notes what a stage needs, all of which lies before it.
    fn need(&mut self, target: usize) {
        let mut needed = BTreeSet::from([target]);
        for index in (0..=target).rev() {
            if !needed.contains(&index) {
                continue;
            }
            if let Base::Stage(stage) = self.bases[index] {
                needed.insert(stage);
            }
            needed.extend(self.copies[index].values().filter_map(|from| match from {
                CopyFrom::Stage(stage) => Some(*stage),
                _ => None,
            }));
        }
        self.needed = needed.into_iter().collect();
    }

    /// Names of the images it needs.
    pub fn images(&self) -> BTreeSet<&str> {
        let bases = self.needed.iter().filter_map(|stage| match &self.bases[*stage] {
            Base::Image(name) => Some(name.as_str()),
            _ => None,
        });
        let copied = self.needed.iter().flat_map(|stage| self.copies[*stage].values()).filter_map(|from| match from {
            CopyFrom::Image(name) => Some(name.as_str()),
            _ => None,
        });
        bases.chain(copied).collect()
    }

    /// The plan, with the configurations of the images it needs.
    ///
    /// # Errors
    /// An image is not there, or an instruction cannot be expanded.
    pub fn plan(&self, images: &BTreeMap<String, ImageConfig>) -> Result<Plan, DockerfileError> {
        let place = |stage: usize| self.needed.iter().position(|n| *n == stage).unwrap_or_default();
        let mut done: Vec<(StagePlan, Stage<'_>)> = Vec::new();
        let mut used = self.used.clone();
        for &index in &self.needed {
            let parsed = &self.parsed.stages[index];
            let missing = |line, instruction: &str, name: &str| {
                DockerfileError::new(line, instruction, Fault::UnknownImage(shown(name)))
            };
            let (base, mut stage) = match &self.bases[index] {
                Base::Scratch => (Base::Scratch, Stage::new(ImageConfig::default())),
                Base::Image(name) => {
                    let config = images.get(name).ok_or_else(|| missing(parsed.from.line, "FROM", name))?;
                    (Base::Image(name.clone()), Stage::new(config.clone()))
                }
                Base::Stage(stage) => (Base::Stage(place(*stage)), done[place(*stage)].1.next()),
            };
            stage.enter(&self.globals, &self.options.build_args, self.parsed.escape);
            let mut steps = Vec::new();
            for (at, instruction) in parsed.instructions.iter().enumerate() {
                let from = match self.copies[index].get(&at) {
                    Some(CopyFrom::Stage(stage)) => CopyFrom::Stage(place(*stage)),
                    Some(CopyFrom::Image(name)) if !images.contains_key(name) => {
                        return Err(missing(instruction.line, instruction.name, name));
                    }
                    Some(other) => other.clone(),
                    None => CopyFrom::Context,
                };
                let step = stage.step(instruction, from);
                steps.push(step.map_err(|fault| DockerfileError::new(instruction.line, instruction.name, fault))?);
            }
            used.extend(stage.used.iter().cloned());
            let config = stage.config.clone();
            done.push((StagePlan { name: parsed.from.name.clone(), base, steps, config }, stage));
        }
        let unused_args = self.options.build_args.keys().filter(|k| !used.contains(*k)).cloned().collect();
        Ok(Plan { stages: done.into_iter().map(|(plan, _)| plan).collect(), unused_args })
    }
}
