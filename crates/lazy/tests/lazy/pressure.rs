//! Little memory: readers and server each in a cgroup that is too small for what they read.

use crate::support::*;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A memory cgroup below the one this test runs in.
struct Group {
    dir: PathBuf,
}

impl Group {
    /// None where no limit can be set: no controller, or nothing below may have one.
    fn new(name: &str, limit: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let place = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
        let v1 = mounts.lines().find(|l| l.contains(" - cgroup ") && l.rsplit(',').any(|o| o == "memory"));
        let v2 = mounts.lines().find(|l| l.contains(" - cgroup2 "));
        let of = |prefix: &str| own.lines().find_map(|l| l.split_once(prefix).map(|(_, path)| path.to_owned()));
        let (mount, path, file) = match (v1, of(":memory:")) {
            (Some(line), Some(path)) => (place(line)?, path, "memory.limit_in_bytes"),
            _ => (place(v2?)?, of("0::")?, "memory.max"),
        };
        let dir = mount.join(path.trim_start_matches('/')).join(format!("lazy-{name}-{}", std::process::id()));
        fs::create_dir(&dir).ok()?;
        let group = Self { dir };
        fs::write(group.dir.join(file), limit.to_string()).ok()?;
        Some(group)
    }

    fn add(&self, pid: i32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Runs a script in it.
    fn run(&self, script: &str, out: Stdio) -> Child {
        let script = format!("echo $$ > {}/cgroup.procs && {script}", self.dir.display());
        Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).stdout(out).spawn().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir(&self.dir).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        if !std::thread::panicking() {
            assert!(!self.dir.exists(), "{} is left", self.dir.display());
        }
    }
}

fn hash_of(at: &Path) -> String {
    let script = format!("cat {}/* | sha256sum", at.display());
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn readers_go_on_when_memory_is_short() {
    within(180, || {
        let (Some(small), Some(server)) = (Group::new("readers", 48 << 20), Group::new("server", 96 << 20)) else {
            println!("skipped: no memory cgroup can be made here");
            return;
        };
        let site = Site::new();
        let layers: Vec<Layer> = (0..3).map(|n| site.layer(files(50, 80 + n))).collect();
        let held = Held::start(&site, |options| options.server.limits.bytes = 32 << 20);
        let who = held.who();
        server.add(who.holder_pid);
        server.add(who.server_pid);
        let mounts: Vec<Mounted> = layers.iter().map(|layer| Mounted::new(&site, layer, true)).collect();
        // All of the memory that readers have, again and again.
        let mut hog = small.run("exec dd if=/dev/zero of=/dev/null bs=36M 2>/dev/null", Stdio::null());
        let mut readers: Vec<Child> = mounts
            .iter()
            .map(|m| small.run(&format!("while cat {}/* | sha256sum; do :; done", m.at.display()), Stdio::piped()))
            .collect();
        let begin = Instant::now();
        let lines: Vec<_> = readers
            .iter_mut()
            .map(|reader| {
                let out = BufReader::new(reader.stdout.take().unwrap());
                std::thread::spawn(move || out.lines().map_while(Result::ok).collect::<Vec<String>>())
            })
            .collect();
        while begin.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_secs(2));
            // It answers all the time, and a new one does as well.
            let killed = held.kill_server();
            until("another server", || held.try_who().is_some_and(|who| who.server_pid != killed));
        }
        for reader in readers.iter_mut().chain([&mut hog]) {
            // Its children end with the pipe.
            reader.kill().unwrap();
            reader.wait().unwrap();
        }
        until("the end of all readers", || fs::read_to_string(small.dir.join("cgroup.procs")).unwrap().is_empty());
        let rounds: Vec<Vec<String>> = lines.into_iter().map(|l| l.join().unwrap()).collect();
        println!("rounds in 20 s: {:?}", rounds.iter().map(Vec::len).collect::<Vec<_>>());
        for ((mounted, layer), rounds) in mounts.iter().zip(&layers).zip(&rounds) {
            mounted.check(layer);
            let right = hash_of(&mounted.at);
            assert!(!rounds.is_empty() && rounds.iter().all(|line| line.trim() == right.trim()), "{rounds:?}");
        }
        drop(mounts);
        held.end();
    });
}
