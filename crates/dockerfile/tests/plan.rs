//! From text to a plan.
#![allow(clippy::unwrap_used, reason = "a test")]

use corral_api::digest::Digest;
use corral_api::image::ImageConfig;
use corral_dockerfile::{
    Action, Base, CopyFrom, CopySource, CopyStep, DockerfileError, Fault, Graph, Options, Plan, RunStep, key,
};
use std::collections::BTreeMap;

fn options(args: &[(&str, &str)], target: Option<&str>) -> Options {
    let build_args = args.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Options { build_args, target: target.map(str::to_owned) }
}

fn images() -> BTreeMap<String, ImageConfig> {
    let config = ImageConfig {
        env: [("PATH".to_owned(), "/bin".to_owned())].into(),
        cmd: vec!["sh".to_owned()],
        ..ImageConfig::default()
    };
    ["bb", "other", "bb:1"].map(|name| (name.to_owned(), config.clone())).into()
}

fn planned(text: &str, options: Options) -> Result<Plan, DockerfileError> {
    Graph::new(text, options)?.plan(&images())
}

fn plan(text: &str) -> Plan {
    planned(text, Options::default()).unwrap()
}

fn only(text: &str) -> (Vec<Action>, ImageConfig) {
    let mut plan = plan(text);
    let stage = plan.stages.pop().unwrap();
    (stage.steps.into_iter().map(|s| s.action).collect(), stage.config)
}

fn run(text: &str) -> RunStep {
    let (actions, _) = only(text);
    actions.into_iter().find_map(|a| if let Action::Run(run) = a { Some(run) } else { None }).unwrap()
}

fn copy(text: &str) -> CopyStep {
    let (actions, _) = only(text);
    actions.into_iter().find_map(|a| if let Action::Copy(copy) = a { Some(copy) } else { None }).unwrap()
}

#[test]
fn a_whole_dockerfile() {
    let text = r#"# syntax=docker/dockerfile:1
ARG BASE=bb
ARG TAG=1

# The tools
FROM --platform=$BUILDPLATFORM ${BASE} AS Tools
WORKDIR /src
COPY a.txt b.txt ./
RUN echo one && \
    # in between
    echo two

FROM other AS unneeded
RUN false

FROM bb:$TAG
ARG TAG
LABEL version="$TAG" "with space"=x
ENV A=1 B="two words" C=$A
ENV PATH=/opt/bin:$PATH
COPY --from=tools --chown=agent:agent --chmod=750 /src /opt
EXPOSE 80
VOLUME /data
STOPSIGNAL SIGINT
HEALTHCHECK CMD true
MAINTAINER nobody
USER agent
ENTRYPOINT ["serve", "--fast"]
CMD ["x"]
"#;
    let plan = planned(text, options(&[("UNKNOWN", "1")], None)).unwrap();
    assert_eq!(plan.unused_args, ["UNKNOWN"]);
    assert_eq!(plan.stages.len(), 2, "the stage in between is not needed");
    let [tools, last] = plan.stages.as_slice() else { panic!() };
    assert_eq!((tools.name.as_deref(), &tools.base), (Some("tools"), &Base::Image("bb".into())));
    assert_eq!(tools.steps[0].action, Action::Workdir("/src".into()));
    let Action::Copy(copied) = &tools.steps[1].action else { panic!() };
    assert_eq!((copied.dest.as_str(), copied.into_directory, &copied.from), ("/src", true, &CopyFrom::Context));
    let Action::Run(run) = &tools.steps[2].action else { panic!() };
    assert_eq!(run.argv, ["/bin/sh", "-c", "echo one &&     echo two"]);
    assert_eq!((run.cwd.as_str(), run.user.as_str()), ("/src", ""));
    assert_eq!((tools.steps[2].line, tools.steps[2].name), (9, "RUN"));

    assert_eq!(last.base, Base::Image("bb:1".into()));
    let config = &last.config;
    assert_eq!(config.labels["version"], "1");
    assert_eq!(config.labels["with space"], "x");
    assert_eq!(config.env["B"], "two words");
    assert_eq!(config.env["C"], "", "variables of the same instruction are not seen");
    assert_eq!(config.env["PATH"], "/opt/bin:/bin");
    assert_eq!((config.user.as_str(), config.workdir.as_str()), ("agent", ""));
    assert_eq!((&config.entrypoint[..], &config.cmd[..]), (&["serve".into(), "--fast".into()][..], &["x".into()][..]));
    let Action::Copy(copied) = &last.steps[4].action else { panic!("{:?}", last.steps[4]) };
    assert_eq!(copied.from, CopyFrom::Stage(0));
    assert_eq!((copied.chown.as_deref(), copied.chmod), (Some("agent:agent"), Some(0o750)));
    assert_eq!(last.steps.iter().filter(|s| s.action == Action::Noted).count(), 5);
}

#[test]
fn the_target_decides_what_is_needed() {
    let text = "FROM bb AS a\nRUN 1\nFROM a AS b\nRUN 2\nFROM bb AS c\nCOPY --from=0 /x /x\nFROM scratch AS d\nCOPY --from=other /y /y\n";
    let stages = |target| planned(text, options(&[], Some(target))).unwrap().stages;
    assert_eq!(stages("b").iter().map(|s| s.name.clone().unwrap()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(stages("B").len(), 2);
    assert_eq!(stages("2").iter().map(|s| s.name.clone().unwrap()).collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(stages("d").len(), 1);
    assert_eq!(stages("b")[1].base, Base::Stage(0));
    let graph = |target| Graph::new(text, options(&[], Some(target))).unwrap();
    assert_eq!(graph("d").images().into_iter().collect::<Vec<_>>(), ["other"]);
    assert_eq!(graph("b").images().into_iter().collect::<Vec<_>>(), ["bb"]);
    let error = planned(text, options(&[], Some("nope"))).unwrap_err();
    assert_eq!(error.fault, Fault::UnknownStage("nope".into()));
    // A stage may be named as its image.
    assert_eq!(plan("FROM bb AS bb\nFROM bb\n").stages.len(), 2);
}

#[test]
fn arguments() {
    let text =
        "ARG G=global\nFROM bb\nARG G\nARG D=default-$G\nARG U\nENV D2=$D\nENV HIDDEN=env\nARG HIDDEN=arg\nRUN x\n";
    let step = planned(text, options(&[], None)).unwrap().stages[0].steps.last().unwrap().action.clone();
    let Action::Run(step) = step else { panic!() };
    let env: Vec<_> = step.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(env, ["D=default-global", "D2=default-global", "G=global", "HIDDEN=env", "PATH=/bin"]);
    let plan = planned(text, options(&[("G", "mine"), ("U", "set")], None)).unwrap();
    let Action::Run(step) = &plan.stages[0].steps.last().unwrap().action else { panic!() };
    assert_eq!((step.env["D"].as_str(), step.env["U"].as_str()), ("default-mine", "set"));
    assert!(plan.unused_args.is_empty());
    assert!(!plan.stages[0].config.env.contains_key("G"), "arguments are no variables of the image");
    let plan = planned("FROM bb AS a\nARG X=1\nRUN x\nFROM a\nRUN y\n", options(&[], None)).unwrap();
    let Action::Run(step) = &plan.stages[1].steps[0].action else { panic!() };
    assert!(!step.env.contains_key("X"), "arguments end with their stage");
    let plan = self::plan("FROM bb\nARG TARGETARCH TARGETOS\nRUN x\n");
    let Action::Run(step) = &plan.stages[0].steps[1].action else { panic!() };
    assert_eq!((step.env["TARGETARCH"].as_str(), step.env["TARGETOS"].as_str()), ("amd64", "linux"));
}

#[test]
fn entry_points_and_shells() {
    let config = |text: &str| only(text).1;
    assert_eq!(config("FROM bb\n").cmd, ["sh"]);
    assert_eq!(config("FROM bb\nENTRYPOINT [\"a\"]\n").cmd, Vec::<String>::new());
    assert_eq!(config("FROM bb\nCMD [\"c\"]\nENTRYPOINT [\"a\"]\n").cmd, ["c"]);
    let shell = config("FROM bb\nENTRYPOINT exec serve\nCMD a b\n");
    assert_eq!(
        (&shell.entrypoint[..], &shell.cmd[..]),
        (&words("/bin/sh -c,exec serve")[..], &words("/bin/sh -c,a b")[..])
    );
    let own = only("FROM bb\nSHELL [\"/bin/bash\", \"-ec\"]\nRUN x $y\nCMD z\n");
    assert_eq!(own.1.cmd, ["/bin/bash", "-ec", "z"]);
    let Action::Run(step) = &own.0[1] else { panic!() };
    assert_eq!(step.argv, ["/bin/bash", "-ec", "x $y"]);
    assert_eq!(run("FROM bb\nRUN [\"a\", \"$b\"]\n").argv, ["a", "$b"]);
    assert_eq!(run("FROM bb\nRUN [ -e x ] && y\n").argv, ["/bin/sh", "-c", "[ -e x ] && y"]);
}

fn words(text: &str) -> Vec<String> {
    let (shell, rest) = text.split_once(',').unwrap();
    shell.split(' ').chain([rest]).map(str::to_owned).collect()
}

#[test]
fn here_documents() {
    assert_eq!(run("FROM bb\nRUN <<EOF\na\nb $c\nEOF\nUSER x\n").argv, ["/bin/sh", "-c", "a\nb $c\n"]);
    let script = run("FROM bb\nRUN <<EOF\n#!/usr/bin/env python3\nprint()\nEOF\n");
    assert_eq!(script.argv, ["/usr/bin/env", "python3", "/dev/stdin"]);
    assert_eq!(script.stdin.as_deref(), Some("#!/usr/bin/env python3\nprint()\n"));
    let rest = run("FROM bb\nRUN <<'EOF' cat > /x\n$a\nEOF\n");
    assert_eq!(rest.argv[2], "<<'CORRAL_END' cat > /x\n$a\nCORRAL_END");
    let copied = copy("FROM bb\nENV A=1\nCOPY <<one <<'two' /d/\n$A\none\n$A\ntwo\n");
    let inline = |name: &str, text: &str| CopySource::Inline { name: name.into(), text: text.into() };
    assert_eq!(copied.sources, [inline("one", "1\n"), inline("two", "$A\n")]);
    for form in ["RUN cat > /x <<EOF\n", "RUN cat <<EOF > /x\n"] {
        let step = run(&format!("FROM bb\n{form}from here\nUSER $x\nEOF\nUSER x\n"));
        assert!(step.argv[2].ends_with("\nfrom here\nUSER $x\nEOF"), "{:?}", step.argv);
    }
}

#[test]
fn directories_and_destinations() {
    let text = "FROM bb\nWORKDIR /a\nWORKDIR b/../c\nWORKDIR $X\n";
    let planned = planned(&text.replace("$X", "../../../d"), Options::default()).unwrap();
    assert_eq!(planned.stages[0].config.workdir, "/d");
    for (dest, at, into) in [
        ("x", "/w/x", false),
        ("x/", "/w/x", true),
        (".", "/w", true),
        ("/", "/", true),
        ("../y", "/y", false),
        ("/a/..", "/", true),
    ] {
        let copied = copy(&format!("FROM bb\nWORKDIR /w\nCOPY f {dest}\n"));
        assert_eq!((copied.dest.as_str(), copied.into_directory), (at, into), "{dest}");
    }
    assert_eq!(copy("FROM bb\nCOPY [\"a b\", \"/c d\"]\n").sources, [CopySource::Path("a b".into())]);
    assert!(copy("FROM bb\nADD x.tar /\n").unpack);
}

#[test]
fn other_escapes() {
    let (actions, config) = only("# escape=`\nFROM bb\nENV A=C:\\x\nRUN a `\n  b\n");
    assert_eq!(config.env["A"], "C:\\x");
    let Action::Run(step) = &actions[1] else { panic!() };
    assert_eq!(step.argv[2], "a   b");
}

#[test]
fn faults_name_line_and_instruction() {
    let cases: &[(&str, usize, &str, &str)] = &[
        ("", 1, "Dockerfile", "at least one FROM"),
        ("RUN x\n", 1, "RUN", "expected FROM"),
        ("FROM bb\nNONSENSE x\n", 2, "NONSENSE", "unknown instruction"),
        ("FROM bb\n\nCOPY a\n", 3, "COPY", "at least two"),
        ("FROM bb\nRUN --mount=type=cache,target=/x y\n", 2, "RUN", "RUN --mount is not supported"),
        ("FROM bb\nRUN --network=host y\n", 2, "RUN", "not supported"),
        ("FROM bb\nRUN --nope=1 y\n", 2, "RUN", "no flag --nope"),
        ("FROM bb\nCOPY --chown=a --chown=b x y\n", 2, "COPY", "given twice"),
        ("FROM bb\nCOPY --chown= x y\n", 2, "COPY", "needs a value"),
        ("FROM bb\nCOPY --chmod=a+x x y\n", 2, "COPY", "octal"),
        ("FROM bb\nCOPY --chmod=77777 x y\n", 2, "COPY", "octal"),
        ("FROM bb\nCOPY --parents x y\n", 2, "COPY", "not supported"),
        ("FROM bb\nADD --from=x x y\n", 2, "ADD", "no flag --from"),
        ("FROM bb\nADD https://example.com/x /x\n", 2, "ADD", "would be fetched"),
        ("FROM bb\nADD git@example.com:x /x\n", 2, "ADD", "would be fetched"),
        ("FROM bb\nCOPY ../x /x\n", 2, "COPY", "leads out of the build context"),
        ("FROM bb\nENV P=..\nCOPY a/$P/$P/x /x\n", 3, "COPY", "leads out of the build context"),
        ("FROM bb\nCOPY a b c\n", 2, "COPY", "does not end with /"),
        ("FROM bb\nCOPY --from=later a b\nFROM bb AS later\n", 2, "COPY", "no stage \"later\" before"),
        ("FROM bb AS self\nCOPY --from=self a b\n", 2, "COPY", "no stage \"self\" before"),
        ("FROM bb\nCOPY --from=0 a b\n", 2, "COPY", "no stage \"0\" before"),
        ("FROM bb\nCOPY --from=7 a b\n", 2, "COPY", "no stage \"7\" before"),
        ("FROM bb\nCOPY --from=$X a b\n", 2, "COPY", "not expanded"),
        ("FROM bb\nCOPY --from=gone a b\n", 2, "COPY", "no image \"gone\": import it first"),
        ("FROM bb AS a\nFROM bb AS A\n", 2, "FROM", "named \"a\" already"),
        ("FROM bb AS 1st\n", 1, "FROM", "cannot be named"),
        ("FROM $NOTHING\n", 1, "FROM", "is empty"),
        ("FROM --platform=linux/arm64 bb\n", 1, "FROM", "linux/amd64"),
        ("FROM --nope=1 bb\n", 1, "FROM", "no flag --nope"),
        ("\n\nFROM gone\n", 3, "FROM", "no image \"gone\": import it first"),
        ("FROM bb\nONBUILD RUN x\n", 2, "ONBUILD", "not supported"),
        ("FROM bb\nENV A\n", 2, "ENV", "no value"),
        ("FROM bb\nENV A=\"x\n", 2, "ENV", "not closed"),
        ("FROM bb\nENV A=${x\n", 2, "ENV", "cannot be read"),
        ("FROM bb\nWORKDIR ${X:?must be given}\n", 2, "WORKDIR", "must be given"),
        ("FROM bb\nUSER $NOBODY\n", 2, "USER", "is empty"),
        ("FROM bb\nLABEL x\n", 2, "LABEL", "no value"),
        ("FROM bb\nSHELL x\n", 2, "SHELL", "JSON"),
        ("FROM bb\nCOPY <<../x /y/\na\n../x\n", 2, "COPY", "cannot name a file"),
        ("FROM bb\nRUN <<EOF\nx\n", 2, "", "end of here-document"),
    ];
    for (text, line, instruction, part) in cases {
        let error = planned(text, Options::default()).expect_err(text);
        let shown = error.to_string();
        assert!(shown.contains(part), "{text:?}: {shown}");
        if !instruction.is_empty() {
            assert_eq!((error.line, error.instruction.as_str()), (*line, *instruction), "{text:?}: {shown}");
        }
    }
    let many = format!("FROM bb\n{}", "RUN x\n".repeat(3000));
    assert!(matches!(planned(&many, Options::default()).unwrap_err().fault, Fault::TooMany { .. }));
    let many = "FROM bb\n".repeat(200);
    assert!(matches!(planned(&many, Options::default()).unwrap_err().fault, Fault::TooMany { .. }));
}

#[test]
fn keys_tell_what_makes_a_difference() {
    let of = |text: &str, layers: &[u8]| {
        let (actions, _) = only(text);
        let layers: Vec<Digest> = layers.iter().map(|b| Digest::of(&[*b])).collect();
        key::step(&layers, actions.last().unwrap(), &[], &[])
    };
    let first = of("FROM bb\nRUN x\n", &[1]);
    assert_eq!(first, of("FROM bb\n# comment\nRUN   x\n", &[1]));
    for (text, layers) in [
        ("FROM bb\nRUN y\n", &[1][..]),
        ("FROM bb\nRUN x\n", &[2]),
        ("FROM bb\nRUN x\n", &[1, 2]),
        ("FROM bb\nENV A=1\nRUN x\n", &[1]),
        ("FROM bb\nUSER a\nRUN x\n", &[1]),
        ("FROM bb\nWORKDIR /a\nRUN x\n", &[1]),
        ("FROM bb\nARG A=1\nRUN x\n", &[1]),
        ("FROM bb\nSHELL [\"/bin/ash\", \"-c\"]\nRUN x\n", &[1]),
    ] {
        assert_ne!(first, of(text, layers), "{text}");
    }
    assert_eq!(
        of("FROM bb AS a\nFROM bb AS b\nCOPY --from=a /x /x\n", &[1]),
        of("FROM bb AS z\nFROM bb AS a\nFROM bb AS b\nCOPY --from=1 /x /x\n", &[1]),
        "the place of a stage makes none"
    );
}
