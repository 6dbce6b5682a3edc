"""The entry point of an environment: a sandbox's first command."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest

import corral
from conftest import SMALL, Make
from corral import OutcomeType
from support import Server, busybox_rootfs, docker_archive, until

SERVICE = "echo begun $0 $*; id -u; pwd; echo $FROM; echo noise >&2; touch /tmp/ready; sleep 1000"
CONFIG: dict[str, object] = {
    "Env": ["PATH=/bin", "FROM=image"],
    "WorkingDir": "/home/agent",
    "User": "agent",
    "Entrypoint": ["sh", "-c", SERVICE],
    "Cmd": ["service", "--flag"],
}


def imported(client: corral.Client, scratch: Path, name: str, config: dict[str, object]) -> str:
    file = scratch / "image.tar"
    file.write_bytes(docker_archive([busybox_rootfs()], config, "x:1"))
    client.images.import_file(file, name)
    return name


@pytest.fixture(scope="module")
def image(client: corral.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small image with an entry point."""
    name = imported(client, tmp_path_factory.mktemp("service"), "service", CONFIG)
    yield name
    client.images.delete(name)


def started(sandbox: corral.Sandbox) -> corral.Command:
    """The command a sandbox began with."""
    name = sandbox.status.entrypoint_command_id
    assert name is not None
    return sandbox.command(name)


def lines(command: corral.Command, count: int) -> list[str]:
    return until(lambda: (said := command.output().decode().splitlines())[count - 1 :] and said, 30, "it speaks")


def test_it_runs_as_the_image_says(client: corral.Client, make: Make, image: str) -> None:
    sandbox = make(image, env={"FROM": "sandbox"})
    command = started(sandbox)
    assert [c.id for c in sandbox.commands()] == [command.id]
    assert command.status.argv == ("sh", "-c", SERVICE, "service", "--flag")
    assert lines(command, 4) == ["begun service --flag", "1000", "/home/agent", "sandbox"]
    assert command.output("stderr") == b"noise\n"
    assert command.refresh().running
    assert sandbox.refresh().entrypoint_command_id == command.id
    kinds = [e.type for e in client.events.page(sandbox_id=sandbox.id).events if e.command_id in {None, command.id}]
    assert kinds == ["state", "state", "state", "command_started"], "it begins when the sandbox runs"
    command.kill()
    assert command.wait(30).end == corral.Outcome(OutcomeType.SIGNALED, signal=9, name="SIGKILL")
    assert sandbox.exec("test -e /tmp/ready").ok, "its end is not the sandbox's"


def test_it_is_replaced(client: corral.Client, make: Make, image: str) -> None:
    say = ("sh", "-c", 'echo "$0:$*"')
    cases: list[tuple[dict[str, tuple[str, ...]], str]] = [
        ({"entrypoint": say}, "sh:"),
        ({"entrypoint": say, "cmd": ("one", "two")}, "one:two"),
        ({"cmd": ("one", "two")}, "begun one two"),
    ]
    for settings, said in cases:
        assert lines(started(make(spec=corral.EnvironmentSpec(base=image, **settings))), 1)[0] == said  # type: ignore[arg-type]
        assert lines(started(make(image, **settings)), 1)[0] == said
    spec = corral.EnvironmentSpec(base=image, entrypoint=say, cmd=("environment",))
    assert client.environments.put("test-replaced", spec).spec == spec
    try:
        assert lines(started(make("test-replaced")), 1)[0] == "environment:"
        assert lines(started(make("test-replaced", cmd=["sandbox"])), 1)[0] == "sandbox:"
    finally:
        client.environments.delete("test-replaced")


def test_it_is_switched_off(client: corral.Client, make: Make, bb: str, image: str, tmp_path: Path) -> None:
    plain = imported(client, tmp_path, "test/only-cmd:1", {"Cmd": ["sh"]})
    try:
        without = [
            make(image, entrypoint=[]),
            make(image, entrypoint=[], cmd=["sh"]),
            make(spec=corral.EnvironmentSpec(base=image, entrypoint=())),
            make(plain),
            make(bb),
            make(bb, cmd=["sh"]),
        ]
        for sandbox in without:
            assert sandbox.status.entrypoint_command_id is None
            assert sandbox.commands() == []
    finally:
        without[3].delete()
        client.images.delete(plain)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"entrypoint": ("no-such-program",)}, "No such file"),
        ({"entrypoint": ("sh",), "user": "nobody-here"}, "nobody-here"),
        ({"entrypoint": ("sh",), "workdir": "/no/such/place"}, "No such file"),
    ],
    ids=["program", "user", "directory"],
)
def test_one_that_cannot_start_says_why(
    server: Server, client: corral.Client, make: Make, bb: str, settings: dict[str, object], why: str
) -> None:
    sandbox = make(spec=corral.EnvironmentSpec(base=bb, **settings))  # type: ignore[arg-type]
    assert sandbox.state == "running"
    command = started(sandbox)
    end = command.status.end
    assert end is not None
    assert (end.type, end.code) == (OutcomeType.NOT_STARTED, None)
    assert why in str(end.message)
    assert not command.status.running
    assert command.result().exit_code == 125
    assert command.output() == b""
    assert [c.id for c in sandbox.commands()] == [command.id]
    assert "not started" in server.cli("ps", sandbox.id).stdout.decode()
    last = client.events.page(sandbox_id=sandbox.id).events[-1]
    assert (last.type, last.command_id, last.outcome) == ("command_ended", command.id, end)
    assert sandbox.exec("true", user="root", cwd="/").ok
    sandbox.delete()
    assert sandbox.command(command.id).status.end == end, "it stays readable"


@pytest.mark.parametrize("words", [[""], ["sh", "a\0b"]], ids=["no program", "NUL"])
def test_what_no_process_can_be_given_is_refused(client: corral.Client, bb: str, words: list[str]) -> None:
    with pytest.raises(corral.InvalidRequest, match="entrypoint"):
        client.sandboxes.create(bb, entrypoint=words)
    with pytest.raises(corral.InvalidRequest, match="entrypoint"):
        client.environments.put("test-refused", corral.EnvironmentSpec(base=bb, entrypoint=tuple(words)))


def test_a_repeated_create_has_one(client: corral.Client, make: Make, image: str) -> None:
    key = uuid.uuid4().hex
    first, second = (make(image, idempotency_key=key) for _ in range(2))
    assert first.id == second.id
    assert first.status.entrypoint_command_id == second.status.entrypoint_command_id
    assert len(first.commands()) == 1


def test_it_survives_the_daemon(tmp_path: Path) -> None:
    server = Server()
    try:
        server.start()
        with server.client() as client:
            image = imported(client, tmp_path, "service", CONFIG)
            sandbox = client.sandboxes.create(image, limits=SMALL)
            command = started(sandbox)
            lines(command, 4)
            server.kill()
            server.start()
            until(server.answers, 60)
            again = client.sandboxes.get(sandbox.id)
            assert again.status.entrypoint_command_id == command.id
            assert [c.id for c in again.commands()] == [command.id]
            assert command.refresh().running
            assert len(lines(command, 4)) == 4, "it was not started again"
    finally:
        server.end()
        left = server.remains()
    assert not any(left.values()), left


def test_it_starts_once_when_the_daemon_dies_among_creates(tmp_path: Path) -> None:
    count = 40
    server = Server()
    try:
        server.start()
        with server.client(retry=corral.RetryPolicy(attempts=60, total=120, base=0.1, cap=1)) as client:
            image = imported(client, tmp_path, "service", CONFIG)
            create = partial(client.sandboxes.create, image, limits=SMALL)
            with ThreadPoolExecutor(count) as pool:
                results = [pool.submit(create, idempotency_key=f"create-{n}") for n in range(count)]
                until(lambda: any(r.done() for r in results), 60, "the first is made")
                server.kill()
                server.start()
                wait(results, timeout=120)
            boxes = [box for box in client.sandboxes.list() if box.state == "running"]
            assert boxes
            for box in boxes:
                command = started(box)
                assert [c.id for c in box.commands()] == [command.id]
                end = command.status.end
                if end is None:
                    assert lines(command, 4)[0] == "begun service --flag"
                    assert command.output().count(b"begun") == 1
                else:
                    assert end.type == OutcomeType.OUTCOME_UNKNOWN, "cut off between its intent and its start"
    finally:
        server.end()
        left = server.remains()
    assert not any(left.values()), left


def test_from_the_command_line(server: Server, image: str) -> None:
    def ask(*words: str) -> dict[str, object]:
        done = server.cli("--json", *words)
        assert done.returncode == 0, done
        return dict(json.loads(done.stdout))

    made: list[dict[str, object]] = []
    ask("env", "create", "test-cli", "--base", image, "--entrypoint", "echo", "--cmd", "-e", "--cmd", "x")
    try:
        assert ask("env", "inspect", "test-cli")["spec"] == {
            "base": image, "workspaces": [], "toolkits": [], "env": {}, "entrypoint": ["echo"], "cmd": ["-e", "x"]
        }  # fmt: skip
        made += [ask("create", "test-cli"), ask("create", "--no-entrypoint", "test-cli")]
        assert ["entrypoint_command_id" in sandbox for sandbox in made] == [True, False]
        sandbox, command = str(made[0]["id"]), str(made[0]["entrypoint_command_id"])
        assert server.cli("logs", "-f", sandbox, command).stdout == b"x\n"
        assert command in server.cli("ps", sandbox).stdout.decode()
        assert server.cli("run", "--no-entrypoint", image, "cat", "/tmp/ready").returncode == 1
    finally:
        server.cli("rm", *(str(sandbox["id"]) for sandbox in made))
        server.cli("env", "rm", "test-cli")
