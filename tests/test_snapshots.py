"""Snapshots and forks: what a sandbox wrote goes on in other sandboxes, exactly."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import corral
from conftest import SMALL, Make
from support import Server, cgroups, until, with_busybox

WRITE = r"""
set -e
cd /tmp; mkdir -p d/e; echo one > d/e/f; chmod 4751 d/e/f; chown 1000:1000 d/e/f; ln d/e/f hard; ln -s d/e/f soft
printf 'x' > sparse; dd if=/dev/zero of=sparse bs=1 count=1 seek=3000000 2>/dev/null
mkfifo pipe; touch -d '2001-02-03 04:05:06' d
echo changed > /etc/passwd.new; rm /etc/hostname-of-image 2>/dev/null || true
rm /bin/ls; rm -r /home; mkdir /home; echo fresh > /home/new
"""
LOOK = r"""
cd /tmp; stat -c '%n %f %u %g %Y' d d/e; stat -c '%n %f %u %g %h %s %Y' d/e/f hard soft sparse pipe
readlink soft; cat hard; md5sum sparse
[ -e /bin/ls ] || echo no ls; find /home | sort; cat /home/new
"""


@pytest.fixture
def names(client: corral.Client) -> Iterator[list[str]]:
    """Names of images that are removed with the test, the last first."""
    used = [f"snap-{uuid.uuid4().hex[:12]}-{n}" for n in range(4)]
    yield used
    known = {image.name for image in client.images.list()}
    for name in reversed(used):
        if name in known:
            client.images.delete(name)


def test_a_snapshot_is_the_sandbox_again(make: Make, box: corral.Sandbox, names: list[str]) -> None:
    box.exec(WRITE, check=True)
    before = box.exec(LOOK, check=True).stdout
    assert "no ls" in before
    image = box.snapshot(names[0])
    assert image.snapshot is not None
    report = image.snapshot.report
    assert (image.snapshot.sandbox_id, image.snapshot.parent) == (box.id, None)
    assert report.entries > 10
    assert report.deletions == 2, "a whiteout for ls and an opaque home"
    assert image.layers[-1].kind == corral.LayerKind.SNAPSHOT
    box.exec("rm -r /tmp/d; echo later > /tmp/later", check=True)
    restored = make(names[0])
    assert restored.exec(LOOK, check=True).stdout == before
    assert not restored.files.exists("/tmp/later"), "it is as it was then"
    assert box.exec("cat /tmp/later").stdout == "later\n", "and the sandbox goes on"


def test_snapshots_of_snapshots_are_a_tree(make: Make, box: corral.Sandbox, names: list[str]) -> None:
    box.exec("echo 1 > /tmp/a", check=True)
    first = box.snapshot(names[0])
    box.exec("echo 2 > /tmp/a; echo b > /tmp/b", check=True)
    second = box.snapshot(names[1])
    assert second.snapshot is not None
    assert second.snapshot.parent == names[0], "of its own last one"
    other = make(names[0])
    other.exec("rm /tmp/a; echo c > /tmp/c", check=True)
    third = other.snapshot(names[2])
    assert third.snapshot is not None
    assert third.snapshot.parent == names[0], "of the one it was made from"
    assert len(third.layers) == len(first.layers) + 1
    look = "cat /tmp/a /tmp/b /tmp/c 2>/dev/null"
    assert [make(name).exec(look).stdout for name in names[:3]] == ["1\n", "2\nb\n", "c\n"]


def test_what_differs_is_told(server: Server, client: corral.Client, box: corral.Sandbox, names: list[str]) -> None:
    box.exec("mkdir -p /d/e /gone/deep; echo 1 > /d/same; echo 1 > /d/e/changed; echo 1 > /gone/deep/f", check=True)
    box.exec("ln -s a /d/link; echo 1 > /d/mode; echo 1 > /d/typed", check=True)
    box.snapshot(names[0])
    box.exec("echo 2 > /d/e/changed; rm -r /gone; mkdir -p /new/sub; echo n > /new/sub/f; ln -sf b /d/link", check=True)
    box.exec("chmod 600 /d/mode; rm /d/typed; mkdir /d/typed; echo x > /d/typed/in; rm /bin/ls", check=True)
    box.exec("rm -r /home; mkdir /home; mv /d/same /d/copy; mv /d/copy /d/same", check=True)
    box.snapshot(names[1])
    seen = {entry.path: str(entry.change) for entry in client.images.diff(names[1], from_=names[0]).entries}
    expected = {
        "/bin/ls": "deleted",
        "/d/e/changed": "changed",
        "/d/link": "changed",
        "/d/mode": "changed",
        "/d/typed": "changed",
        "/d/typed/in": "added",
        "/gone": "deleted",
        "/gone/deep": "deleted",
        "/gone/deep/f": "deleted",
        "/new": "added",
        "/new/sub": "added",
        "/new/sub/f": "added",
    }
    homes = {path for path in seen if path.startswith("/home/")}
    assert {path: seen[path] for path in seen if path not in homes} == expected
    assert all(seen[path] == "deleted" for path in homes)
    back = {entry.path: str(entry.change) for entry in client.images.diff(names[0], from_=names[1]).entries}
    turned = {"added": "deleted", "deleted": "added", "changed": "changed"}
    assert {path: turned[change] for path, change in back.items() if path != "/d/typed/in"} == {
        path: change for path, change in seen.items() if path != "/d/typed/in"
    }
    assert client.images.diff(names[0], from_=names[0]).entries == ()
    assert len(client.images.diff(names[1], from_=names[0], limit=3).entries) == 3
    assert client.images.diff(names[1], from_=names[0], limit=3).truncated
    told = server.cli("image", "diff", names[0], names[1]).stdout.decode().splitlines()
    assert "D /gone/deep/f" in told
    assert "C /d/mode" in told
    with pytest.raises(corral.NotFound):
        client.images.diff(names[1], from_="no-such-image")


def test_a_difference_in_a_name_that_is_no_text(client: corral.Client, box: corral.Sandbox, names: list[str]) -> None:
    box.snapshot(names[0])
    box.exec("echo x > $(printf '/tmp/caf\\351')", check=True)
    box.snapshot(names[1])
    [entry] = client.images.diff(names[0], from_=names[1]).entries
    assert base64.b64decode(entry.path_base64 or "") == b"/tmp/caf\xe9"


def test_equal_snapshots_are_one_layer(box: corral.Sandbox, names: list[str]) -> None:
    box.exec("echo same > /tmp/same", check=True)
    one, two = box.snapshot(names[0]), box.snapshot(names[1])
    assert one.layers == two.layers
    assert one.digest == two.digest


def test_rules_leave_residue_out(make: Make, box: corral.Sandbox, names: list[str]) -> None:
    box.exec("mkdir -p /root/.cache/x /tmp/p/__pycache__; echo s > /root/.history; echo k > /tmp/p/kept", check=True)
    box.exec("touch /root/.cache/x/1 /root/.cache/x/2 /tmp/p/__pycache__/m.pyc; rm /bin/ls", check=True)
    image = box.snapshot(names[0], scrub=["/root/.cache", "/root/.history", "/**/__pycache__", "/bin/*"])
    assert image.snapshot is not None
    report = image.snapshot.report
    assert set(report.scrubbed) == {"/root/.cache", "/root/.history", "/tmp/p/__pycache__", "/bin/ls"}
    assert report.scrubbed_count == 4
    restored = make(names[0])
    found = restored.exec("find /root/.cache /root/.history /tmp/p 2>/dev/null | sort").stdout.split()
    assert found == ["/tmp/p", "/tmp/p/kept"]
    assert restored.exec("ls /bin/ls").ok, "a deletion that is left out did not happen"
    for bad in (["relative"], ["/"], ["/a["], ["/x"] * 1001):
        with pytest.raises(corral.InvalidRequest):
            box.snapshot(names[1], scrub=bad)


def test_a_paused_sandbox_stays_paused(box: corral.Sandbox, make: Make, names: list[str]) -> None:
    box.exec("echo x > /tmp/x", check=True)
    box.pause()
    box.snapshot(names[0])
    [fork] = box.fork()
    assert box.refresh().state == corral.State.PAUSED
    assert isinstance(fork, corral.Sandbox)
    assert fork.exec("cat /tmp/x").stdout == "x\n"
    fork.delete()
    assert make(names[0]).exec("cat /tmp/x").stdout == "x\n"


def test_forks_share_the_past_and_nothing_else(server: Server, box: corral.Sandbox) -> None:
    writer = box.start("echo begun > /tmp/n; n=0; while :; do n=$((n+1)); echo $n > /tmp/n.$n; sleep 0.01; done")
    until(lambda: box.files.exists("/tmp/n.5"))
    box.exec(WRITE, check=True)
    before = box.exec(LOOK, check=True).stdout
    forks = box.fork(8, labels={"fork": "yes"})
    assert all(isinstance(fork, corral.Sandbox) for fork in forks), forks
    made = [fork for fork in forks if isinstance(fork, corral.Sandbox)]
    try:
        assert len({fork.id for fork in made}) == 8
        for number, fork in enumerate(made):
            assert fork.labels == {"fork": "yes"}
            assert fork.exec(LOOK, check=True).stdout == before
            assert fork.stats().pids <= 1, "processes are not copied"
            fork.exec(f"echo {number} > /tmp/own; rm /tmp/soft", check=True)
        assert [fork.exec("cat /tmp/own").stdout for fork in made] == [f"{n}\n" for n in range(8)]
        assert not box.files.exists("/tmp/own")
        assert box.files.exists("/tmp/soft")
        assert writer.refresh().running
        # A fork of a fork, and one whose source has gone.
        [again] = made[0].fork()
        assert isinstance(again, corral.Sandbox)
        made[0].delete()
        made.append(again)
        assert again.exec("cat /tmp/own").stdout == "0\n"
    finally:
        for fork in made:
            fork.delete()
    left = [path.name for path in (server.data / "writable").iterdir() if path.name.startswith("tmp-")]
    assert not left, left


def test_a_fork_has_a_quota_of_its_own(make: Make) -> None:
    source = make(limits=corral.Limits(memory_mib=128, pids=64, disk_mib=16))
    source.exec("dd if=/dev/urandom of=/tmp/x bs=1M count=8", check=True)
    [fork] = source.fork()
    assert isinstance(fork, corral.Sandbox)
    try:
        assert not fork.exec("dd if=/dev/urandom of=/tmp/y bs=1M count=32").ok
        assert source.exec("dd if=/dev/urandom of=/tmp/z bs=1M count=4").ok, "the source does not notice"
    finally:
        fork.delete()


def test_a_repeated_fork_makes_no_more(box: corral.Sandbox, client: corral.Client) -> None:
    key = uuid.uuid4().hex
    first, second = (box.fork(2, idempotency_key=key) for _ in range(2))
    made = [fork for fork in first if isinstance(fork, corral.Sandbox)]
    try:
        again = [fork.id for fork in second if isinstance(fork, corral.Sandbox)]
        assert [fork.id for fork in made] == again
        refused = box.fork(3, idempotency_key=key)
        kinds = [fork.kind if isinstance(fork, corral.CorralError) else None for fork in refused]
        made += [fork for fork in refused if isinstance(fork, corral.Sandbox)]
        assert kinds[:2] == ["idempotency_mismatch"] * 2
    finally:
        for fork in made:
            fork.delete()


def test_what_cannot_be_is_refused(server: Server, box: corral.Sandbox, make: Make, names: list[str]) -> None:
    http: httpx.Client = server.http()
    forks: list[Any] = [{"count": 0}, {"count": 257}, {"count": "two"}, {"idempotency_key": ""}, {"unknown": 1}, []]
    for body in forks:
        assert http.post(f"/v1/sandboxes/{box.id}/fork", json=body).status_code == 400, body
    snaps: list[Any] = [{"name": ""}, {"name": "sha256:x"}, {"name": "a b"}, {"scrub": []}, {"name": "x", "scrub": "y"}]
    for body in snaps:
        assert http.post(f"/v1/sandboxes/{box.id}/snapshots", json=body).status_code == 400, body
    gone = make()
    gone.delete()
    for call in (lambda: gone.snapshot(names[0]), lambda: gone.fork()):
        with pytest.raises(corral.SandboxEnded):
            call()


def test_by_the_command_line(server: Server, box: corral.Sandbox, names: list[str]) -> None:
    box.exec("echo cli > /tmp/cli; echo s > /tmp/secret", check=True)
    told = server.cli("snapshot", box.id, names[0], "--scrub", "/tmp/secret")
    assert told.returncode == 0, told.stderr
    assert b"1 left out" in told.stdout
    ran = server.cli("run", names[0], "--", "sh", "-c", "cat /tmp/cli; ls /tmp/secret")
    assert ran.stdout == b"cli\n"
    forked = server.cli("fork", box.id, "-n", "3")
    ids = forked.stdout.decode().split()
    assert len(ids) == 3
    assert server.cli("exec", ids[2], "--", "cat", "/tmp/secret").stdout == b"s\n"
    assert server.cli("rm", *ids).returncode == 0
    assert server.cli("fork", box.id, "-n", "0").returncode == 2


def test_limits_of_a_stack(make: Make, names: list[str]) -> None:
    """A chain of snapshots thirty deep, each with a change and a deletion."""
    box = make(limits=SMALL)
    box.exec("echo 0 > /tmp/0", check=True)
    box.snapshot(names[0])
    for depth in range(1, 30):
        child = make(names[0])
        child.exec(f"rm /tmp/{depth - 1}; echo {depth} > /tmp/{depth}", check=True)
        child.snapshot(names[0])
        child.delete()
    last = make(names[0])
    assert last.exec("cd /tmp; ls; cat 29").stdout == "29\n29\n"


def test_back_to_a_checkpoint(server: Server, box: corral.Sandbox) -> None:
    box.exec("echo 1 > /tmp/a; ln /tmp/a /tmp/hard", check=True)
    first = box.checkpoint()
    box.exec("echo 2 > /tmp/a; rm -r /home; echo b > /tmp/b", check=True)
    second = box.checkpoint()
    assert [c.number for c in box.checkpoints()] == [first.number, second.number] == [1, 2]
    sleeper = box.start("sleep 1000", step_key="sleep")
    status = box.rollback(first)
    assert (status.id, status.state) == (box.id, corral.State.RUNNING)
    assert box.exec("cat /tmp/a /tmp/hard; ls /tmp", check=True).stdout == "1\n1\na\nhard\n"
    end = sleeper.refresh().end
    assert end is not None
    assert end.type == corral.OutcomeType.ROLLED_BACK
    assert box.stats().pids <= 1
    # Forth, and back again, also from a pause.
    box.pause()
    box.rollback(2)
    assert box.files.read("/tmp/b") == "b\n"
    box.rollback(1)
    assert not box.files.exists("/tmp/b")
    box.drop_checkpoint(box.checkpoints()[0])
    with pytest.raises(corral.NotFound, match="no checkpoint 1"):
        box.rollback(1)
    assert box.exec("cat /tmp/a").stdout == "1\n", "a refused rollback changes nothing"
    cli = server.cli("checkpoint", box.id)
    assert cli.stdout == b"3\n"
    box.exec("rm /tmp/a", check=True)
    assert server.cli("rollback", box.id, "3").returncode == 0
    assert box.files.read("/tmp/a") == "1\n"
    box.delete()
    left = [path.name for path in (server.data / "writable").iterdir() if box.id in path.name]
    assert not left, left


def test_checkpoints_are_bounded(box: corral.Sandbox) -> None:
    for _ in range(64):
        box.checkpoint()
    with pytest.raises(corral.LimitExceeded, match="remove some"):
        box.checkpoint()
    box.drop_checkpoint(64)
    assert box.checkpoint().number == 64


def test_commands_that_meet_a_rollback_wait_for_it(box: corral.Sandbox) -> None:
    checkpoint = box.checkpoint()
    box.exec("echo gone > /tmp/gone", check=True)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            back = pool.submit(box.rollback, checkpoint)
            seen = [pool.submit(box.exec, "echo here") for _ in range(6)]
            back.result(60)
            # One that was there before ended with it; none is told that the sandbox has ended.
            for result in (one.result(60) for one in seen):
                assert result.stdout == "here\n" or result.outcome.type == corral.OutcomeType.ROLLED_BACK, result
    assert not box.files.exists("/tmp/gone")


def test_what_stood_still_for_a_copy_goes_on_after_a_restart(tmp_path: Path) -> None:
    server = Server(False)
    with with_busybox(server, tmp_path) as client:
        copied, paused = (client.sandboxes.create("bb", limits=SMALL) for _ in range(2))
        writer = copied.start("n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done")
        paused.pause()
        server.kill()
        # As the kill of a daemon leaves a sandbox that is being copied.
        for directory in cgroups(copied.id):
            if (Path(directory) / "cgroup.freeze").exists():
                (Path(directory) / "cgroup.freeze").write_text("1")
        server.start()
        assert copied.refresh().state == corral.State.RUNNING
        size = len(writer.output())
        until(lambda: len(writer.output()) > size + 20, 20, "the command goes on")
        assert paused.refresh().state == corral.State.PAUSED


def test_checkpoints_survive_the_daemon(tmp_path: Path) -> None:
    server = Server(False)
    with with_busybox(server, tmp_path) as client:
        box, other = (client.sandboxes.create("bb", limits=SMALL) for _ in range(2))
        box.exec("echo kept > /tmp/a", check=True)
        box.checkpoint()
        other.checkpoint()
        box.exec("rm /tmp/a", check=True)
        server.kill()
        server.start()
        box.rollback(1)
        assert box.files.read("/tmp/a") == "kept\n"
        assert {path.name for path in (server.data / "writable").iterdir()} >= {f"checkpoint-{other.id}-1"}
