//! The command line against a gateway over a node that only exists in tests: exit codes, output, what reaches the node.
#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../../gateway/tests/support/mod.rs"]
mod support;

use corral_api::ids::SandboxId;
use serde_json::Value;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::process::{Output, Stdio};
use support::Front;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

struct Cli {
    front: Front,
    home: tempfile::TempDir,
}

impl Cli {
    async fn new() -> Self {
        Self { front: Front::start().await, home: tempfile::tempdir().unwrap() }
    }

    fn command(&self, line: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_corral"));
        command.args(line).env_clear().env("HOME", self.home.path()).current_dir(self.home.path());
        command.env("CORRAL_API_URL", self.front.url("")).env("CORRAL_API_KEY", &self.front.key);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    async fn output(&self, line: &[&str]) -> Output {
        self.command(line).output().await.unwrap()
    }

    /// Exit code, standard output, standard error.
    async fn run(&self, line: &[&str]) -> (i32, String, String) {
        let output = self.output(line).await;
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    async fn json(&self, line: &[&str]) -> Value {
        let (code, out, err) = self.run(line).await;
        assert_eq!(code, 0, "{line:?}: {err}");
        serde_json::from_str(&out).unwrap()
    }

    fn id(&self) -> String {
        SandboxId::new(&self.front.node.seen.id).to_string()
    }

    fn removed(&self) -> usize {
        self.front.node.seen.removed.lock().unwrap().len()
    }
}

#[tokio::test]
async fn run_passes_output_and_exit_code_and_removes_the_sandbox() {
    let cli = Cli::new().await;
    let (code, out, err) = cli.run(&["run", "base", "--", "exit", "3"]).await;
    assert_eq!((code, out.as_str(), err.as_str()), (3, "exit 3\n", "to stderr\n"));
    assert_eq!(cli.removed(), 1);
    assert_eq!(cli.run(&["run", "base", "kill", "9"]).await.0, 137);
    let (code, out, _) = cli
        .run(&[
            "run",
            "-e",
            "A=1",
            "--memory-mib",
            "64",
            "--timeout",
            "2s",
            "--open-files",
            "99",
            "--hostname",
            "box",
            "base",
            "echo",
            "--json",
        ])
        .await;
    assert_eq!((code, out.as_str()), (0, "echo --json\n"));
    let create = cli.front.node.seen.creates.lock().unwrap().last().unwrap().clone();
    assert_eq!((create.spec.limits.memory_mib, create.environment.config.env["A"].as_str()), (64, "1"));
    assert_eq!((create.spec.limits.open_files, create.spec.hostname.as_str()), (99, "box"));
    assert!(create.idempotency_key.is_some());
    assert_eq!(cli.front.node.seen.execs.lock().unwrap().last().unwrap().timeout_ms, 2000);
    assert_eq!(cli.removed(), 3);
    let (code, out, _) = cli.run(&["--json", "run", "base", "exit", "4"]).await;
    let result: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &result["exit_code"], &result["stdout"]["text"]), (4, &4.into(), &"exit 4\n".into()));
    assert!(result["sandbox_id"].as_str().unwrap().parse::<SandboxId>().is_ok());
    let (code, _, err) = cli.run(&["run", "--keep", "base", "true"]).await;
    assert!(code == 0 && err.contains("kept sandbox s"), "{err}");
    assert_eq!(cli.removed(), 4);
}

#[tokio::test]
async fn exit_codes_tell_who_failed() {
    let cli = Cli::new().await;
    let (code, _, err) = cli.run(&["run", "base", "missing"]).await;
    assert_eq!((code, err.as_str()), (125, "corral: no such program\n"));
    assert_eq!(cli.removed(), 1, "also after a failure");
    let (code, _, err) = cli.run(&["run", "nope", "true"]).await;
    assert_eq!((code, err.as_str()), (125, "corral: there is no environment or image \"nope\"\n"));
    assert_eq!(cli.run(&["exec", "x", "true"]).await.0, 125);
    let (code, _, err) = cli.run(&["--json", "image", "inspect", "nope"]).await;
    let problem: Value = serde_json::from_str(&err).unwrap();
    assert_eq!((code, problem["kind"].as_str()), (1, Some("not_found")));
    assert_eq!(cli.run(&["run", "base"]).await.0, 2);
    assert_eq!(cli.run(&["frobnicate"]).await.0, 2);
    let gone = |line: &[&str]| {
        let mut command = cli.command(line);
        command.env("CORRAL_API_URL", "http://127.0.0.1:1").env("http_proxy", "http://127.0.0.1:2");
        async move { command.output().await.unwrap() }
    };
    assert_eq!(gone(&["run", "base", "true"]).await.status.code(), Some(125));
    let output = gone(&["ls"]).await;
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && err.contains("cannot reach http://127.0.0.1:1"), "{err}");
    let mut command = cli.command(&["ls"]);
    let output = command.env_remove("CORRAL_API_KEY").output().await.unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("no credentials: run `corral up`"));
    // The credentials file takes the place of the variables.
    let path = cli.home.path().join(".config/corral/credentials.json");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, format!("{{\"url\":\"{}\",\"key\":\"{}\"}}", cli.front.url(""), cli.front.key)).unwrap();
    let mut command = cli.command(&["ls"]);
    let output = command.env_remove("CORRAL_API_KEY").env_remove("CORRAL_API_URL").output().await.unwrap();
    assert!(output.status.success());
}

#[tokio::test]
async fn exec_passes_input_and_options() {
    let cli = Cli::new().await;
    let id = cli.id();
    let result = cli.json(&["--json", "exec", "-w", "/w", "-u", "me", "-e", "K=V", &id, "--", "echo", "hi"]).await;
    assert_eq!(result["stdout"]["text"], "echo hi\n");
    let spec = cli.front.node.seen.execs.lock().unwrap()[0].clone();
    assert_eq!((spec.cwd.as_deref(), spec.user.as_deref(), spec.env["K"].as_str()), (Some("/w"), Some("me"), "V"));
    let (code, out, _) = cli.run(&["exec", "-d", &id, "true"]).await;
    assert_eq!((code, out.as_str()), (0, "c0123456789abcdef\n"));
    let mut child = cli.command(&["exec", "-i", &id, "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"typed\n").await.unwrap();
    drop(input);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), b"typed\n".as_slice()));
}

#[tokio::test]
async fn an_interrupted_run_removes_its_sandbox() {
    let cli = Cli::new().await;
    let child = cli.command(&["run", "base", "hang"]).spawn().unwrap();
    cli.front.node.seen.begun.notified().await;
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(cli.removed(), 1);
}

#[tokio::test]
async fn a_terminal_passes_bytes_and_ends_with_the_exit_status() {
    let cli = Cli::new().await;
    let mut child = cli.command(&["sh", &cli.id(), "--", "bash", "-l"]).stdin(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"echo").await.unwrap();
    let mut echoed = [0u8; 4];
    output.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"echo");
    assert!(cli.front.node.seen.last_uri.lock().unwrap().ends_with("/pty?argv=bash&argv=-l"));
    input.write_all(b"exit").await.unwrap();
    assert_eq!(child.wait().await.unwrap().code(), Some(7));
}

#[tokio::test]
async fn files_and_directories_are_copied_both_ways() {
    let cli = Cli::new().await;
    let (id, home) = (cli.id(), cli.home.path());
    std::fs::write(home.join("a.txt"), "content").unwrap();
    let to = |path: &str| format!("{id}:{path}");
    assert_eq!(cli.run(&["cp", "a.txt", &to("/dir")]).await.0, 0);
    assert_eq!(cli.front.node.seen.files.lock().unwrap()["/dir/a.txt"], b"content");
    assert_eq!(cli.run(&["cp", &to("/dir/a.txt"), "b.txt"]).await.0, 0);
    assert_eq!(std::fs::read(home.join("b.txt")).unwrap(), b"content");
    let (code, out, _) = cli.run(&["cp", &to("/dir/a.txt"), "-"]).await;
    assert_eq!((code, out.as_str()), (0, "content"));
    std::fs::create_dir_all(home.join("tree/sub")).unwrap();
    std::fs::write(home.join("tree/sub/file"), "deep").unwrap();
    std::os::unix::fs::symlink("sub/file", home.join("tree/link")).unwrap();
    assert_eq!(cli.run(&["cp", "tree", &to("/dir")]).await.0, 0);
    let tar = cli.front.node.seen.files.lock().unwrap()["tar:/dir/tree"].clone();
    cli.front.node.seen.files.lock().unwrap().insert("tar:/dir".into(), tar);
    assert_eq!(cli.run(&["cp", &to("/dir"), "out"]).await.0, 0);
    assert_eq!(std::fs::read(home.join("out/sub/file")).unwrap(), b"deep");
    assert_eq!(std::fs::read_link(home.join("out/link")).unwrap().to_str(), Some("sub/file"));
    let (code, _, err) = cli.run(&["cp", &to("/none"), "x"]).await;
    assert!(code == 1 && err.contains("/none"), "{err}");
    assert_eq!(cli.run(&["cp", "a.txt", "b.txt"]).await.0, 1);
    assert!(!home.join("x").exists());
}

/// What a client sends of its own that is no network's fault: each is sent, left out with a word, or an error that
/// names it.
#[tokio::test]
async fn files_that_cannot_be_sent_are_named() {
    let cli = Cli::new().await;
    let (home, to) = (cli.home.path(), format!("{}:/dir/x", cli.id()));
    std::fs::create_dir(home.join("tree")).unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"tree/caf\xe9");
    std::fs::write(home.join(odd), "latin").unwrap();
    let _sockets = ["tree/a.sock", "tree/b.sock"].map(|name| UnixListener::bind(home.join(name)).unwrap());
    for line in [
        &["cp", "tree", &to][..],
        &["image", "import", "./tree"],
        &["layer", "build", "--kind", "toolkit", "--at", "/w", "tree"],
    ] {
        let (code, _, err) = cli.run(line).await;
        assert_eq!((code, err.matches("2 sockets are left out, the first of them").count()), (0, 1), "{line:?}: {err}");
        assert!(err.contains("tree/a.sock\n"), "{err}");
    }
    let sent = cli.front.node.seen.files.lock().unwrap()["tar:/dir/x"].clone();
    let mut archive = tar::Archive::new(sent.as_slice());
    let names = archive.entries().unwrap().map(|entry| entry.unwrap().path_bytes().into_owned());
    assert_eq!(names.collect::<Vec<_>>(), [&b"./"[..], b"caf\xe9"]);

    // Nobody reads the first byte of its own memory.
    for line in
        [&["cp", "/proc/self/mem", &to][..], &["layer", "build", "--kind", "toolkit", "--at", "/w", "/proc/self/mem"]]
    {
        let (code, _, err) = cli.run(line).await;
        assert_eq!((code, err.as_str()), (1, "corral: cannot read /proc/self/mem: Input/output error (os error 5)\n"));
    }
    let mut command = cli.command(&["cp", "-", &to]);
    let output = command.stdin(std::fs::File::open(home).unwrap()).output().await.unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    let said = "corral: cannot read standard input: Is a directory (os error 21)\n";
    assert_eq!((output.status.code(), err.as_str()), (Some(1), said));
}

#[tokio::test]
async fn an_unreadable_file_is_named() {
    let cli = Cli::new().await;
    let (home, to) = (cli.home.path(), format!("{}:/dir/x", cli.id()));
    std::fs::create_dir(home.join("tree")).unwrap();
    std::fs::write(home.join("tree/Dockerfile"), "FROM scratch").unwrap();
    std::fs::write(home.join("tree/secret"), "x").unwrap();
    for (path, mode) in [("", 0o755), ("tree", 0o755), ("tree/secret", 0o000)] {
        std::fs::set_permissions(home.join(path), Permissions::from_mode(mode)).unwrap();
    }
    for line in [
        &["cp", "tree", &to][..],
        &["image", "import", "./tree"],
        &["image", "build", "-t", "x", "tree"],
        &["layer", "build", "--kind", "toolkit", "--at", "/w", "tree"],
    ] {
        let mut command = cli.command(line);
        if rustix::process::geteuid().is_root() {
            // Root reads everything.
            command.uid(65534).gid(65534);
        }
        let output = match command.output().await {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                println!("skipped: only root reaches the program to test");
                return;
            }
            output => output.unwrap(),
        };
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line:?}: {err}");
        assert!(err.starts_with("corral: cannot read "), "{err}");
        assert!(err.ends_with("tree/secret: Permission denied (os error 13)\n"), "{err}");
    }
}

#[tokio::test]
async fn images_layers_environments_and_keys() {
    let cli = Cli::new().await;
    let home = cli.home.path();
    std::fs::create_dir_all(home.join("My-Root/etc")).unwrap();
    std::fs::write(home.join("My-Root/etc/passwd"), "root").unwrap();
    let (code, out, err) = cli.run(&["image", "import", "./My-Root"]).await;
    assert!(code == 0 && out.starts_with("my-root sha256:"), "{err}");
    assert!(err.contains("1 layers"), "plain lines off a terminal: {err}");
    assert!(cli.front.node.seen.last_uri.lock().unwrap().contains("\"kind\":\"rootfs\""));
    assert!(cli.front.node.seen.read_bytes.load(std::sync::atomic::Ordering::SeqCst) > 1024);
    std::fs::write(home.join("bad.tar"), "broken").unwrap();
    let (code, _, err) = cli.run(&["image", "import", "bad.tar", "--name", "bad"]).await;
    assert_eq!((code, err.as_str()), (1, "corral: not an archive\n"));
    for missing in ["./missing", "/missing", "missing.tar", "dir/missing.tar.zst"] {
        let (code, _, err) = cli.run(&["image", "import", missing]).await;
        assert_eq!((code, err), (1, format!("corral: there is no file {missing}\n")));
    }
    let images = cli.json(&["image", "ls", "--json"]).await;
    assert_eq!(images["images"].as_array().unwrap().len(), 2);
    let (_, table, _) = cli.run(&["image", "ls"]).await;
    assert!(table.starts_with("NAME") && table.contains("my-root"), "{table}");

    let (code, digest, _) = cli.run(&["layer", "build", "--kind", "toolkit", "--at", "/opt", "My-Root/etc"]).await;
    let digest = digest.trim();
    assert!(code == 0 && digest.starts_with("sha256:"));
    let line = ["env", "create", "task", "--base", "my-root", "--toolkit", digest, "-e", "A=1", "-w", "/work"];
    assert_eq!(cli.run(&line).await.0, 0);
    let record = cli.json(&["env", "inspect", "task"]).await;
    assert_eq!((&record["spec"]["workdir"], &record["spec"]["toolkits"][0]), (&"/work".into(), &digest.into()));
    let (code, _, err) = cli.run(&["image", "rm", "my-root"]).await;
    assert!(code == 1 && err.contains("in use by environment \"task\""), "{err}");
    assert_eq!(cli.run(&["env", "rm", "task"]).await.0, 0);
    assert_eq!(cli.run(&["layer", "rm", digest]).await.0, 0);

    let (code, key, _) = cli.run(&["key", "create", "ci"]).await;
    assert!(code == 0 && key.starts_with("corral_"));
    let keys = cli.json(&["--json", "key", "ls"]).await;
    let ci = keys["keys"].as_array().unwrap().iter().find(|k| k["name"] == "ci").unwrap();
    assert_eq!(cli.run(&["key", "rm", ci["id"].as_str().unwrap()]).await.0, 0);
    assert_eq!(cli.json(&["--json", "node", "ls"]).await["nodes"][0]["max_live"], 10);
}

#[tokio::test]
async fn sandboxes_are_created_listed_and_removed() {
    let cli = Cli::new().await;
    let (code, id, _) = cli.run(&["create", "-l", "a=b", "base"]).await;
    assert!(code == 0 && id.trim().parse::<SandboxId>().is_ok());
    let page = cli.json(&["--json", "ls", "-l", "a=b", "--state", "running"]).await;
    assert_eq!(page["sandboxes"].as_array().unwrap().len(), 1);
    assert!(cli.front.node.seen.last_uri.lock().unwrap().contains("label=a%3Db&state=running"));
    let (code, out, err) = cli.run(&["rm", id.trim(), "x"]).await;
    assert_eq!((code, out.trim()), (1, id.trim()), "goes on past failures");
    assert!(err.contains("there is no sandbox \"x\""), "{err}");
    assert_eq!(cli.run(&["pause", id.trim()]).await.0, 0);
    assert_eq!(cli.run(&["create", "-l", "full=1", "base"]).await.0, 1, "refused for now, also after more tries");
    assert!(cli.front.node.seen.creates.lock().unwrap().len() > 3);
}

#[tokio::test]
async fn a_create_that_waits_says_why() {
    let cli = Cli::new().await;
    let (code, out, said) = cli.run(&["create", "-l", "full=1", "base"]).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(said.starts_with("corral: full; try 2 of 8 in 0.5 s\n"), "{said}");
    assert!(said.ends_with("in 0.5 s\ncorral: full\n"), "{said}");
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let unheard = cli.command(&["create", "-l", "full=1", "base"]).stderr(closed).status().await.unwrap();
    assert_eq!(unheard.code(), Some(1), "whoever closed standard error is not told");
    let (_, _, document) = cli.run(&["--json", "create", "-l", "full=1", "base"]).await;
    assert_eq!(serde_json::from_str::<Value>(&document).unwrap()["message"], "full", "no more than the outcome");
}

#[tokio::test]
async fn what_needs_no_server() {
    let cli = Cli::new().await;
    let (code, out, _) = cli.run(&["openapi"]).await;
    assert_eq!((code, out.as_str()), (0, corral_gateway::openapi_document()));
    let (code, out, _) = cli.run(&["completions", "bash"]).await;
    assert!(code == 0 && out.contains("complete -F _corral"), "{out}");
    assert_eq!(cli.json(&["--json", "version"]).await["server"]["api"], "v1");
    let doctor: Value = serde_json::from_str(&cli.run(&["--json", "doctor"]).await.1).unwrap();
    let feature = |doctor: &Value, name: &str| {
        doctor["features"].as_array().unwrap().iter().find(|row| row["feature"] == name).unwrap().clone()
    };
    assert!(doctor["features"].as_array().unwrap().len() > 20);
    assert!(feature(&doctor, "autofs")["detail"].is_string());
    assert!(feature(&doctor, "btrfs for data")["detail"].as_str().unwrap().starts_with("/var/lib/corral is on "));
    let elsewhere: Value = serde_json::from_str(&cli.run(&["--json", "doctor", "--data-dir", "data"]).await.1).unwrap();
    let data = cli.home.path().join("data").display().to_string();
    assert!(feature(&elsewhere, "btrfs for data")["detail"].as_str().unwrap().starts_with(&data), "{elsewhere}");
    let (code, _, err) = cli.run(&["up", "--listen", "0.0.0.0:0", "--data-dir", "data"]).await;
    assert!(code == 1 && err.contains("--insecure-listen"), "{err}");
}
