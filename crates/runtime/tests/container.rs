//! Containers on the real kernel, without a node above them. Needs root, busybox-static, and the static programs
//! (`make programs`), whose directory `CORRAL_LIBEXEC` names.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use corral_api::environment::Limits;
use corral_api::ids::{CommandId, NodeId, SandboxId};
use corral_keeper::protocol::{Io, LogBounds, Program, Request};
use corral_runtime::container::{ContainerSpec, Containers, ProcessSpec};
use corral_runtime::keeper_link::{KeeperLink, Notice};
use corral_runtime::keeper_process::{Programs, start};
use corral_runtime::log_reader::LogReader;
use corral_runtime::users::User;
use corral_runtime::writable::WritableConfig;
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;

const BOUNDS: LogBounds = LogBounds { head_bytes: 1 << 20, tail_bytes: 1 << 20 };

struct Host {
    dir: tempfile::TempDir,
    rootfs: PathBuf,
    containers: Option<Arc<Containers>>,
    keeper: KeeperLink,
    process: tokio::process::Child,
    notices: mpsc::UnboundedReceiver<Notice>,
    node: NodeId,
}

impl Host {
    async fn start() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let rootfs = dir.path().join("rootfs");
        for sub in ["bin", "tmp", "root", "etc"] {
            std::fs::create_dir_all(rootfs.join(sub)).unwrap();
        }
        std::fs::copy("/bin/busybox", rootfs.join("bin/busybox")).unwrap();
        for applet in
            ["sh", "echo", "cat", "id", "sleep", "ls", "true", "nproc", "grep", "hostname", "touch", "mount", "ps"]
        {
            std::os::unix::fs::symlink("busybox", rootfs.join("bin").join(applet)).unwrap();
        }
        let node = NodeId::random();
        let config = WritableConfig { step_bytes: 512 << 20, reserve_bytes: 64 << 20, low_water_bytes: 32 << 20 };
        let containers = Containers::open(dir.path(), &format!("corral-test-{node}"), config).unwrap();
        let socket = dir.path().join("keeper.sock");
        let process = start(&Programs::find().unwrap(), &socket).await.unwrap();
        let (send, notices) = mpsc::unbounded_channel();
        let keeper = KeeperLink::connect(&socket, move |notice| send.send(notice).is_ok()).await.unwrap();
        Self { dir, rootfs, containers: Some(Arc::new(containers)), keeper, process, notices, node }
    }

    fn containers(&self) -> &Arc<Containers> {
        self.containers.as_ref().unwrap()
    }

    async fn create(&self, slot: u32) -> SandboxId {
        let id = SandboxId::new(&self.node);
        let layer =
            open_tree(CWD, &self.rootfs, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).unwrap();
        let spec = ContainerSpec {
            id: id.clone(),
            slot,
            layers: vec![layer],
            limits: Limits::default(),
            hostname: String::new(),
            affinity: vec![0],
            allow_setuid: false,
            from: None,
        };
        self.containers().create(&self.keeper, spec).await.unwrap();
        id
    }

    /// Runs a command to its end: exit code and output.
    async fn run(&mut self, id: &SandboxId, shell: &str) -> (Option<i32>, String) {
        let command = CommandId::random();
        let path = self.dir.path().join(command.as_str());
        let log: OwnedFd = std::fs::File::create_new(&path).unwrap().into();
        let spec = ProcessSpec {
            sandbox: id.clone(),
            command: command.clone(),
            slot: 0,
            program: Program {
                argv: ["sh", "-c", shell].map(str::to_owned).to_vec(),
                env: vec!["PATH=/bin".into()],
                cwd: "/".into(),
            },
            user: User::root(),
            open_files: 256,
            affinity: vec![0],
            allow_setuid: false,
            io: Io::Pipes { stdin: false, merge: true, control: false, bounds: BOUNDS },
        };
        self.containers().start(&self.keeper, spec, vec![log]).await.unwrap();
        loop {
            match self.notices.recv().await.unwrap() {
                Notice::Command(n) if n.command == command && n.exit.is_some() => {
                    let reader = LogReader::open(&path, BOUNDS).unwrap();
                    let chunk = reader.read(0, 1 << 20, n.totals[0]).unwrap();
                    self.keeper.ask(Request::Acknowledge { command }).await.unwrap();
                    return (n.exit.unwrap().code, String::from_utf8(chunk.bytes).unwrap());
                }
                Notice::Lost => panic!("the keeper is gone"),
                _ => {}
            }
        }
    }

    async fn end(&mut self, id: &SandboxId) {
        self.containers().kill(id).unwrap();
        loop {
            match self.notices.recv().await.unwrap() {
                Notice::Sandbox(n) if n.sandbox == *id && n.exit.is_some() => break,
                _ => {}
            }
        }
        self.keeper.ask(Request::Forget { sandbox: id.clone() }).await.unwrap();
        self.containers().remove(id).await.unwrap();
    }

    async fn stop(mut self) {
        self.keeper.ask(Request::Shutdown).await.unwrap();
        self.process.wait().await.unwrap();
        let containers = self.containers.take().unwrap();
        assert_eq!(containers.list().unwrap(), []);
        assert!(containers.detach().is_ok());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // After `stop` there is nothing left to do; a failed test leaves the host clean all the same.
        if let Some(containers) = self.containers.take() {
            for id in containers.list().unwrap_or_default() {
                containers.kill(&id).unwrap_or(());
            }
            self.process.start_kill().unwrap_or(());
            std::thread::sleep(std::time::Duration::from_millis(200));
            for id in containers.list().unwrap_or_default() {
                containers.cgroups().remove(id.as_str()).unwrap_or(());
            }
            // The test has failed already.
            let _left = containers.detach();
        }
    }
}

#[tokio::test]
async fn a_container_is_confined_and_its_commands_report() {
    let mut host = Host::start().await;
    let id = host.create(1).await;
    let (code, out) =
        host.run(&id, "id -u; hostname; nproc; grep MemTotal /proc/meminfo; cat /etc/hostname; exit 7").await;
    assert_eq!(code, Some(7), "{out}");
    assert_eq!(out, "0\nsandbox\n1\nMemTotal:         524288 kB\nsandbox\n");
    let (_, out) = host.run(&id, "touch /made && ls /made; mount -t tmpfs x /tmp; ls /proc/kcore -l; echo x >/proc/sysrq-trigger; ps | grep -c .").await;
    assert!(out.contains("/made\n") && out.contains("permission denied") || out.contains("not permitted"), "{out}");
    println!("{out}");
    let other = host.create(2).await;
    let (_, out) = host.run(&other, "ls /made").await;
    assert!(out.contains("No such file"), "{out}");
    host.end(&id).await;
    host.end(&other).await;
    host.stop().await;
}

#[tokio::test]
async fn creating_is_quick() {
    let mut host = Host::start().await;
    let begun = std::time::Instant::now();
    let mut ids = Vec::new();
    for slot in 0..100 {
        ids.push(host.create(slot).await);
    }
    println!("100 creates {:?}", begun.elapsed());
    let begun = std::time::Instant::now();
    for id in &ids {
        assert_eq!(host.run(id, "true").await.0, Some(0));
    }
    println!("100 execs {:?}", begun.elapsed());
    for id in &ids {
        host.end(id).await;
    }
    host.stop().await;
}

#[test]
fn the_test_machine_has_what_is_needed() {
    assert!(rustix::process::getuid().is_root(), "these tests need root");
    assert!(Path::new("/bin/busybox").exists(), "these tests need the package busybox-static");
}
