"""The command line client."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import socket
import subprocess
import tarfile
import time
import uuid
from pathlib import Path

import pytest

import corral
from support import PROGRAM, Server, busybox_rootfs, until


def ok(done: subprocess.CompletedProcess[bytes]) -> str:
    assert done.returncode == 0, done
    return done.stdout.decode()


def test_run_passes_everything_through(server: Server, bb: str) -> None:
    done = server.cli("run", "-e", "A=1", bb, "--", "sh", "-c", "echo out $A; echo err >&2; exit 42")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out 1\n", b"err\n")
    assert server.cli("run", bb, "sh", "-c", "kill -9 $$").returncode == 137
    assert server.cli("run", "--timeout", "1s", bb, "sleep", "1000").returncode == 124
    assert server.cli("run", "no-such-image", "true").returncode == 125
    assert server.cli("run", bb, "no-such-program").returncode in {125, 126, 127}


def test_a_sandbox_that_ends_under_a_command_is_told(server: Server, client: corral.Client, bb: str) -> None:
    with client.sandboxes.create(bb) as box:
        running = subprocess.Popen(
            [PROGRAM, "exec", box.id, "sleep", "100"], env=server.environment, stderr=subprocess.PIPE
        )
        until(lambda: any(command.status.running for command in box.commands()))
        box.delete()
        _, said = running.communicate(timeout=60)
    assert running.returncode == 125
    assert said.startswith(b"corral: the sandbox ended before the command did: stopped")


def test_an_upload_that_is_refused_at_once_is_told_why(server: Server, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(8 << 20))
    build = ["layer", "build", "--kind", "workspace", "--at"]
    for at in ("", "work", "/proc", "/etc/hosts"):
        for _ in range(3):
            done = server.cli(*build, at, str(tree))
            assert done.returncode == 1
            assert b"at: " in done.stderr, done.stderr
    for words in (
        ["image", "import", str(tree), "--name", "BAD NAME"],
        ["image", "build", "-t", "BAD NAME", str(tree)],
    ):
        assert b"BAD NAME" in server.cli(*words).stderr
    strangers = {**server.environment, "CORRAL_API_URL": server.url, "CORRAL_API_KEY": "wrong"}
    for _ in range(3):
        words = [str(PROGRAM), "image", "import", str(tree), "--name", "x"]
        refused = subprocess.run(words, env=strangers, capture_output=True, timeout=60, check=False)
        assert b"the API key is not known" in refused.stderr, refused.stderr


def test_run_leaves_no_sandbox(server: Server, client: corral.Client, bb: str) -> None:
    mark = uuid.uuid4().hex
    server.cli("run", "-l", f"mark={mark}", bb, "true")
    assert not list(client.sandboxes.list(labels={"mark": mark}, state="running"))
    assert len(list(client.sandboxes.list(labels={"mark": mark}, state="ended"))) == 1


def test_a_life_by_commands(server: Server, bb: str, tmp_path: Path) -> None:
    sandbox = ok(server.cli("create", "--memory-mib", "64", "-l", "by=cli", bb)).strip()
    try:
        assert sandbox in ok(server.cli("ls", "-q")).split()
        listed = json.loads(ok(server.cli("--json", "ls", "-l", "by=cli")))
        assert sandbox in json.dumps(listed)
        assert (
            ok(server.cli("exec", "-w", "/tmp", "-u", "agent", sandbox, "--", "sh", "-c", "pwd; id -u"))
            == "/tmp\n1000\n"
        )
        done = server.cli("exec", "-i", sandbox, "cat", stdin=b"through")
        assert done.stdout == b"through"
        step = ["exec", "--step-key", "k", sandbox, "--", "sh", "-c", "echo x >> /tmp/n; wc -l < /tmp/n"]
        assert [ok(server.cli(*step)) for _ in range(2)] == ["1\n", "1\n"]
        command = ok(server.cli("exec", "-d", sandbox, "--", "sh", "-c", "echo one; echo two >&2")).strip()
        logs = server.cli("logs", "-f", sandbox, command)
        assert (logs.stdout, logs.stderr) == (b"one\n", b"two\n")
        assert command in ok(server.cli("ps", sandbox))
        ok(server.cli("pause", sandbox))
        assert "paused" in ok(server.cli("ls"))
        ok(server.cli("resume", sandbox))
        assert "memory" in ok(server.cli("--json", "stats", sandbox))
        events = ok(server.cli("events", "--sandbox", sandbox)).splitlines()
        assert events[0].split() == ["SEQ", "TIME", "SANDBOX", "EVENT", "DETAILS"]
        column = events[0].index("EVENT")
        assert {line[column:].split("  ")[0] for line in events[1:]} >= {"running", "command started", "command ended"}
        assert events[0].index("SANDBOX") == events[1].index(sandbox)
        assert "exited 0" in "\n".join(events)
    finally:
        ok(server.cli("rm", sandbox))
    assert server.cli("exec", sandbox, "true").returncode == 125
    assert sandbox in ok(server.cli("ls", "-aq")).split()


def test_copies(server: Server, box: corral.Sandbox, tmp_path: Path) -> None:
    file, tree = tmp_path / "file", tmp_path / "tree"
    file.write_bytes(os.urandom(100_000))
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "x").write_text("x")
    ok(server.cli("cp", str(file), f"{box.id}:/tmp/file"))
    assert box.files.read_bytes("/tmp/file") == file.read_bytes()
    ok(server.cli("cp", f"{box.id}:/tmp/file", str(tmp_path / "back")))
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    assert server.cli("cp", f"{box.id}:/tmp/file", "-").stdout == file.read_bytes()
    ok(server.cli("cp", "-", f"{box.id}:/tmp/from-stdin", stdin=b"piped"))
    assert box.files.read("/tmp/from-stdin") == "piped"
    ok(server.cli("cp", str(tree), f"{box.id}:/tmp"))
    assert box.files.read("/tmp/tree/sub/x") == "x"
    box.exec(
        "mkfifo /tmp/tree/pipe; mkdir /tmp/tree/closed; touch /tmp/tree/closed/in; chmod 500 /tmp/tree/closed",
        check=True,
    )
    copied = server.cli("cp", f"{box.id}:/tmp/tree", str(tmp_path / "out"))
    ok(copied)
    assert copied.stderr.endswith(b"pipe is left out\n"), copied.stderr
    assert (tmp_path / "out/closed/in").exists()
    assert not (tmp_path / "out/pipe").exists()
    assert (tmp_path / "out/closed").stat().st_mode & 0o777 == 0o500
    assert (tmp_path / "out" / "sub" / "x").read_text() == "x"
    assert server.cli("cp", f"{box.id}:/nope", str(tmp_path / "nope")).returncode != 0
    assert not (tmp_path / "nope").exists()


def test_a_terminal(server: Server, box: corral.Sandbox) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, [str(PROGRAM), "sh", box.id], server.environment | {"TERM": "xterm"})
    seen = b""
    sent = False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([fd], [], [], 1)[0]:
                continue
            try:
                chunk = os.read(fd, 4096)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
            if not sent and (b"# " in seen or b"$ " in seen):
                os.write(fd, b"echo from-$((40+2)); exit 9\n")
                sent = True
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(fd)
    assert b"from-42" in seen
    assert os.waitstatus_to_exitcode(status) == 9


def test_errors_for_people_and_programs(server: Server) -> None:
    done = server.cli("exec", "sabcd0000000000000000000a", "true")
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: ")
    machine = server.cli("--json", "rm", "sabcd0000000000000000000a")
    assert machine.returncode == 1
    assert json.loads(machine.stderr)["kind"] == "not_found"
    assert server.cli("no-such-command").returncode == 2


def test_images_and_environments(server: Server, bb: str, tmp_path: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:8]}"
    root, work = tmp_path / "root", tmp_path / "work"
    with tarfile.open(fileobj=io.BytesIO(busybox_rootfs())) as archive:
        archive.extractall(root, filter="fully_trusted", numeric_owner=True)
    work.mkdir()
    (work / "f").write_text("from the workspace\n")
    ok(server.cli("image", "import", str(root), "--name", name))
    assert name in ok(server.cli("image", "ls"))
    layer = json.loads(
        ok(server.cli("--json", "layer", "build", str(work), "--kind", "workspace", "--at", "/w")).splitlines()[-1]
    )
    digest = layer["digest"] if "digest" in layer else layer["layer"]["digest"]
    assert digest in ok(server.cli("--json", "layer", "ls"))
    ok(server.cli("env", "create", name + "-env", "--base", name, "--workspace", digest))
    assert ok(server.cli("run", name + "-env", "cat", "/w/f")) == "from the workspace\n"
    ok(server.cli("env", "rm", name + "-env"))
    ok(server.cli("image", "rm", name))
    assert name not in ok(server.cli("image", "ls"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions(server: Server, shell: str) -> None:
    text = ok(server.cli("completions", shell))
    assert "corral" in text
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0


def test_documents_of_its_own(server: Server) -> None:
    assert json.loads(ok(server.cli("openapi")))["openapi"].startswith("3.")
    assert "0." in ok(server.cli("version"))
    assert ok(server.cli("doctor"))
    node = json.loads(ok(server.cli("--json", "node", "ls")))
    assert server.node_id in json.dumps(node)
    key = json.loads(ok(server.cli("--json", "key", "create", "from the cli")))
    assert key["id"] in ok(server.cli("key", "ls"))
    ok(server.cli("key", "rm", key["id"]))


def test_a_server_that_does_not_answer_can_be_left(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [PROGRAM, "exec", "s1", "--", "true"],
            env=server.environment | {"CORRAL_API_URL": url, "CORRAL_API_KEY": "k"},
            stdin=subprocess.DEVNULL,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            process.terminate()
            assert process.wait(60) == 130


def test_the_log_of_a_daemon_is_plain_in_a_file(server: Server) -> None:
    log = server.log.read_text()
    assert "INFO" in log
    assert "\x1b" not in log
