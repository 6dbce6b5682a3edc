"""Commands: what they are given, what they leave, how they end."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import corral
from conftest import Make
from corral import OutcomeType
from support import Server, python_in, until


def test_text_is_a_shells_and_a_list_is_a_programs(box: corral.Sandbox) -> None:
    assert box.exec("echo $((6 * 7)) | cat").stdout == "42\n"
    assert box.exec(["echo", "$((6 * 7)) | cat", "'"]).stdout == "$((6 * 7)) | cat '\n"
    assert box.exec(["/bin/echo", ""]).stdout == "\n"


def test_both_streams_and_the_exit_code(box: corral.Sandbox) -> None:
    result = box.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert (result.outcome.type, result.outcome.code) == (OutcomeType.EXITED, 7)
    merged = box.exec("echo out; echo err >&2", merge_stderr=True)
    assert (merged.stdout, merged.stderr) == ("out\nerr\n", "")


def test_death_by_a_signal(box: corral.Sandbox) -> None:
    result = box.exec("kill -TERM $$")
    assert result.outcome.type == OutcomeType.SIGNALED
    assert (result.outcome.signal, result.outcome.name, result.exit_code) == (15, "SIGTERM", 143)


def test_input(box: corral.Sandbox) -> None:
    assert box.exec(["cat"], stdin="grüße\n").stdout == "grüße\n"
    assert box.exec(["cat"]).stdout == "", "without input there is none, and no waiting"
    raw = bytes(range(256)) * 8192
    result = box.exec(["sha256sum"], stdin=raw, timeout=60)
    assert result.stdout.split()[0] == hashlib.sha256(raw).hexdigest()
    assert box.exec(["true"], stdin=raw, timeout=60).exit_code == 0, "input nobody reads is no error"


def test_input_piece_by_piece(box: corral.Sandbox) -> None:
    command = box.start(["cat"], open_stdin=True, timeout=60)
    command.write_stdin("one ")
    until(lambda: command.output() == b"one ", 30)
    command.write_stdin("two")
    command.close_stdin()
    assert command.result().stdout == "one two"
    with pytest.raises(corral.Conflict):
        command.write_stdin("late")


def test_surroundings(make: Make) -> None:
    sandbox = make(env={"A": "sandbox", "B": "sandbox"}, hostname="here")
    result = sandbox.exec("echo $A $B; pwd; hostname; id -u", env={"B": "command"}, cwd="/tmp", user="agent")
    assert result.stdout.splitlines() == ["sandbox command", "/tmp", "here", "1000"]
    assert sandbox.exec("id -u; id -g", user="1000:2000").stdout.split() == ["1000", "2000"]
    assert sandbox.exec("id -Gn", user="agent").stdout.split() == ["agent", "extra"]
    assert sandbox.exec("echo $HOME", user="agent").stdout.strip() == "/home/agent"
    with pytest.raises(corral.InvalidRequest) as caught:
        sandbox.exec("true", user="nobody-here")
    assert caught.value.kind == "unknown_user"


@pytest.mark.parametrize(
    ("command", "options"),
    [(["no-such-program"], {}), (["/etc/passwd"], {}), (["/tmp"], {}), ("true", {"cwd": "/no/such/place"})],
)
def test_what_cannot_be_started(box: corral.Sandbox, command: str | list[str], options: dict[str, str]) -> None:
    with pytest.raises(corral.CommandNotStarted) as caught:
        box.exec(command, **options)  # type: ignore[arg-type]
    assert not caught.value.infra_failed
    named = options.get("cwd") or (command if isinstance(command, str) else command[0])
    assert named in str(caught.value), "it is named"
    assert box.exec("true").ok


def test_a_timeout_kills_everything_it_started(box: corral.Sandbox) -> None:
    stubborn = "(setsid sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1; done' &)"
    tree = f"setsid sleep 1000 & {stubborn}; echo begun; sleep 1000"
    result = box.exec(tree, timeout=1)
    assert result.outcome == corral.Outcome(OutcomeType.TIMED_OUT, timeout_ms=1000)
    assert result.exit_code == 124
    assert result.stdout == "begun\n", "what was written before stays"
    left = box.exec("ps -o args").stdout
    assert "1000" not in left
    assert "while" not in left
    assert box.stats().pids <= 1


def test_it_ends_with_its_first_process(box: corral.Sandbox) -> None:
    result = box.exec("sleep 1000 & echo done", timeout=60)
    assert (result.stdout, result.exit_code) == ("done\n", 0), "a child that holds the pipe keeps nobody waiting"
    result = box.exec("setsid sh -c 'sleep 1; echo late > /tmp/late' & exit 5", timeout=60)
    assert result.exit_code == 5
    late = lambda: box.exec("cat /tmp/late 2>/dev/null").stdout == "late\n"  # noqa: E731
    until(late, 30, "children survive the command")
    assert "sleep 1000" in box.exec("ps -o args").stdout


def test_long_output_keeps_head_and_tail(box: corral.Sandbox) -> None:
    result = box.exec("yes 0123456 | head -c 8000000", max_output_bytes=65536, timeout=120)
    assert result.truncated
    out = result.command.stdout
    assert (out.total_bytes, out.truncated) == (8_000_000, True)
    assert len(result.stdout_bytes) == out.kept_bytes <= 65536
    assert result.stdout_bytes.startswith(b"0123456\n" * 100)
    tail = (b"0123456\n" * 1_000_000)[out.dropped_to :]
    assert result.stdout_bytes[out.dropped_from :] == tail
    assert box.exec("echo not | head -c 3").truncated is False


def test_output_that_has_no_end_is_bounded(box: corral.Sandbox) -> None:
    result = box.exec("yes", timeout=2, max_output_bytes=1 << 20)
    assert result.timed_out
    assert result.command.stdout.total_bytes > 1 << 20
    assert len(result.stdout_bytes) <= 1 << 20


def test_output_longer_than_an_answer_is_whole(box: corral.Sandbox) -> None:
    result = box.exec("yes 0123456 | head -c 12000000", timeout=120)
    assert not result.truncated
    assert result.stdout_bytes == b"0123456\n" * 1_500_000


def test_bytes_that_are_no_text(box: corral.Sandbox) -> None:
    assert box.exec("printf '\\377\\000\\376'").stdout_bytes == b"\xff\x00\xfe"


def test_output_from_any_offset_during_and_after(box: corral.Sandbox) -> None:
    command = box.start(
        "for n in 0 1 2 3 4 5 6 7 8 9; do printf $n; done; while [ ! -e /tmp/go ]; do sleep 0.05; done; printf end"
    )
    until(lambda: command.output() == b"0123456789", 30)
    stream = command.stream("stdout", offset=7)
    first = next(stream)
    assert (first.offset, first.data) == (7, b"789")
    box.exec("touch /tmp/go")
    assert b"".join(chunk.data for chunk in stream) == b"end"
    assert command.wait(30).end == corral.Outcome(OutcomeType.EXITED, code=0)
    assert b"".join(chunk.data for chunk in command.stream("stdout", offset=4)) == b"456789end"


def test_both_streams_followed(box: corral.Sandbox) -> None:
    command = box.start("for n in 1 2 3; do echo out $n; echo err $n >&2; done")
    got = {"stdout": "", "stderr": ""}
    for chunk in command.stream():
        got[chunk.stream] += chunk.text
    assert got == {"stdout": "out 1\nout 2\nout 3\n", "stderr": "err 1\nerr 2\nerr 3\n"}


def test_a_step_runs_once(box: corral.Sandbox) -> None:
    key = uuid.uuid4().hex
    step = "echo ran >> /tmp/log; wc -l < /tmp/log"
    first = box.exec(step, step_key=key)
    for _ in range(3):
        again = box.exec(step, step_key=key)
        assert (again.command.id, again.stdout) == (first.command.id, "1\n")
    with pytest.raises(corral.IdempotencyMismatch):
        box.exec("something else", step_key=key)
    assert box.exec("wc -l < /tmp/log").stdout == "1\n"


def test_a_step_is_found_however_it_is_waited_for(box: corral.Sandbox) -> None:
    step = "echo ran >> /tmp/log; wc -l < /tmp/log"
    first = box.exec(step, step_key="waited for")
    again = box.start(step, step_key="waited for")
    assert (again.id, again.status.running) == (first.command.id, False)
    begun = box.start("sleep 1; echo late", step_key="begun")
    result = box.exec("sleep 1; echo late", step_key="begun")
    assert (result.command.id, result.stdout) == (begun.id, "late\n")
    assert box.exec("wc -l < /tmp/log").stdout == "1\n"


def test_a_step_sent_twice_at_once_runs_once(box: corral.Sandbox) -> None:
    step = "echo ran >> /tmp/log; sleep 1; wc -l < /tmp/log"
    running = [box.start(step, step_key="k") for _ in range(4)]
    assert len({c.id for c in running}) == 1
    assert {c.result().stdout for c in running} == {"1\n"}


def test_the_background(box: corral.Sandbox) -> None:
    command = box.start(["sleep", "1000"])
    assert command.status.running
    with pytest.raises(TimeoutError):
        command.wait(0.2)
    assert command.id in [c.id for c in box.commands()]
    with pytest.raises(corral.Conflict):
        box._transport.json(corral._requests.Request("GET", command._path("result")))
    command.signal("SIGINT")
    end = command.wait(30).end
    assert end is not None
    assert (end.type, end.name) == (OutcomeType.SIGNALED, "SIGINT")
    command.kill()
    with pytest.raises(corral.InvalidRequest):
        command.signal("SIGNONSENSE")


def test_signals_to_a_tree(box: corral.Sandbox) -> None:
    command = box.start(
        "trap 'echo parent; exit' TERM; sh -c 'trap \"echo child; exit\" TERM; echo ready; while :; do sleep 0.1; done'"
    )
    until(lambda: b"ready" in command.output(), 30)
    command.signal("TERM", tree=True)
    assert sorted(command.result().stdout.split()) == ["child", "parent", "ready"]


def test_usage(debian_box: corral.Sandbox) -> None:
    result = python_in(debian_box, "x = bytearray(50 << 20)\nfor _ in range(3000000): pass")
    assert result.ok
    assert 20 <= result.usage.cpu_ms <= 60_000
    assert 50 << 20 <= result.usage.peak_memory_bytes <= 200 << 20
    assert result.usage.wall_ms >= result.usage.cpu_ms // 2


def test_a_thousand_arguments_and_too_many(box: corral.Sandbox) -> None:
    assert box.exec(["echo", *(["x"] * 1000)]).stdout.count("x") == 1000
    with pytest.raises(corral.CorralError) as caught:
        box.exec(["echo", "x" * (1 << 20)])
    assert not caught.value.infra_failed
    assert box.exec("true").ok


def test_a_session_remembers(box: corral.Sandbox) -> None:
    with box.session(env={"GIVEN": "yes"}) as shell:
        assert shell.run("cd /tmp; export A=1; B=2; f() { echo f $A $B $GIVEN $PWD; }").ok
        assert shell.run("f").stdout == "f 1 2 yes /tmp\n"
        assert shell.run("false").exit_code == 1
        assert shell.run("echo out; echo err >&2; (exit 9)").exit_code == 9
        result = shell.run('echo "it\'s"; echo err >&2')
        assert (result.stdout, result.stderr) == ("it's\n", "err\n")
        assert shell.run("if true; then").exit_code != 0, "a mistake is the command's, not the session's end"
        assert shell.run("echo alive").stdout == "alive\n"
        assert shell.run("cat").stdout == "", "input is empty"
        assert shell.run("", timeout=30).exit_code == 0


@pytest.mark.parametrize("broken", ['echo "it is', "echo 'it is", "echo $((", "if", "cat <<END", "printf() { :; }"])
def test_a_session_goes_on_after_what_cannot_be_read(debian_box: corral.Sandbox, broken: str) -> None:
    session = debian_box.session(shell="/bin/bash")
    assert session.run("X=kept").ok
    session.run(broken)
    after = session.run("command printf '%s\\n' $X")
    assert (after.exit_code, after.stdout, after.stderr) == (0, "kept\n", "")
    assert session.run("false").exit_code == 1


def test_a_sessions_output_is_read_while_it_runs(box: corral.Sandbox) -> None:
    with box.session() as shell, ThreadPoolExecutor(1) as pool:
        shell.run("echo before")
        running = pool.submit(shell.run, "echo first; until [ -e /tmp/go ]; do sleep 0.1; done; echo second")
        command = until(lambda: next((c for c in box.commands() if "first" in c.status.argv[0]), None))
        until(lambda: command.output() == b"first\n", 30)
        assert command.refresh().running
        followed = pieces(command)
        assert next(followed) == b"first\n"
        box.files.write("/tmp/go", "")
        assert b"".join(followed) == b"second\n"
        assert running.result(60).stdout == "first\nsecond\n"
        assert command.output() == b"first\nsecond\n"


def pieces(command: corral.Command) -> Iterator[bytes]:
    return (chunk.data for chunk in command.stream() if chunk.stream == "stdout")


def test_a_sessions_timeout_leaves_the_session(box: corral.Sandbox) -> None:
    with box.session() as shell:
        shell.run("cd /tmp; V=kept")
        result = shell.run("sleep 1000", timeout=1)
        assert result.timed_out
        assert shell.run("echo $V $PWD", timeout=30).stdout == "kept /tmp\n"
        assert "1000" not in box.exec("ps -o args").stdout


def test_a_sessions_step_runs_once(box: corral.Sandbox) -> None:
    with box.session() as shell:
        for _ in range(2):
            assert shell.run("n=$((n+1)); echo $n", step_key="s").stdout == "1\n"
        assert shell.run("echo $n").stdout == "1\n"


def test_output_cannot_forge_a_sessions_status(box: corral.Sandbox) -> None:
    with box.session() as shell:
        forge = "for fd in 3 4 5 6 7 8 9; do eval \"printf '0\\\\n' >&$fd\" 2>/dev/null; done"
        result = shell.run(f"{forge}; end() {{ return 4; }}; end")
        assert result.exit_code == 4


def test_what_a_shells_own_code_writes_on_its_reports_counts_for_nothing(debian_box: corral.Sandbox) -> None:
    """A shell keeps its control pipe under another number while a command runs; code in the shell can write there."""
    with debian_box.session(shell="/bin/bash") as session:
        forge = 'for fd in 9 10 11 12 13 14; do eval "echo 0 >&$fd" 2>/dev/null; done'
        forged = session.run(f"{forge}; sleep 0.5; echo late; (exit 7)")
        assert (forged.exit_code, forged.stdout.splitlines()[-1]) == (7, "late")
        for code in (5, 6):
            following = session.run(f"echo after {code}; (exit {code})")
            assert (following.exit_code, following.stdout) == (code, f"after {code}\n")


def test_a_shell_that_exits_closes_its_session(box: corral.Sandbox) -> None:
    with box.session() as shell:
        assert shell.run("exit 3").exit_code == 3
        with pytest.raises(corral.Conflict):
            shell.run("true")


def test_a_terminal(box: corral.Sandbox) -> None:
    with box.pty(["/bin/sh"], cols=101, rows=33, cwd="/tmp") as terminal:
        terminal.send("stty size; pwd; tty\n")
        seen = terminal.read_until("/dev/pts/").decode()
        assert "33 101" in seen
        assert "/tmp" in seen
        terminal.resize(77, 22)
        terminal.send("stty size; echo en''d\n")
        assert b"22 77" in terminal.read_until("end")
        terminal.send('sh -c \'trap "echo got-""int; exit" INT; echo rea""dy; while :; do sleep 0.1; done\'\n')
        terminal.read_until("ready")
        terminal.send("\x03")
        terminal.read_until("got-int")
        terminal.send("exit 6\n")
        for _ in terminal:
            pass
        assert terminal.exit_code == 6


def test_a_terminal_is_come_back_to(box: corral.Sandbox) -> None:
    with box.pty(["/bin/sh"]) as terminal:
        terminal.send("echo fir''st\n")
        terminal.read_until("first")
        command, offset = terminal.command_id, terminal.offset
    with box.pty(command_id=command, offset=offset) as again:
        again.send("echo sec''ond; exit\n")
        rest = b"".join(again)
    assert b"second" in rest
    assert b"first" not in rest


async def test_asyncio_commands(server: Server, box: corral.Sandbox) -> None:
    async with corral.AsyncClient(server.url, server.key) as client:
        sandbox = await client.sandboxes.get(box.id)
        command = await sandbox.start("echo a; echo b >&2; exit 2")
        seen = [(chunk.stream, chunk.text) async for chunk in command.stream()]
        assert sorted(seen) == [("stderr", "b\n"), ("stdout", "a\n")]
        assert (await command.result()).exit_code == 2
        async with await sandbox.session() as shell:
            assert (await shell.run("echo $0")).ok
        async with await sandbox.pty(["/bin/cat"]) as terminal:
            await terminal.send("echo\n\x04")
            assert b"echo" in await terminal.read_until("echo")


def test_standard_streams_by_their_names(box: corral.Sandbox) -> None:
    for user in ("root", "agent"):
        script = "echo out > /dev/stdout; echo err > /dev/stderr; echo tee | tee /dev/stderr; cat /dev/stdin"
        result = box.exec(script, user=user, stdin="in\n")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\ntee\nin\n", "err\ntee\n", 0), user


def test_input_that_is_closed_early_is_no_failure(box: corral.Sandbox) -> None:
    for _ in range(10):
        result = box.exec("head -c 70000 | wc -c; exec <&-; sleep 0.05; echo on", stdin=b"x" * (2 << 20))
        assert (result.stdout.split(), result.exit_code) == (["70000", "on"], 0)


def test_a_beginning_is_told_before_its_end(client: corral.Client, box: corral.Sandbox) -> None:
    for _ in range(60):
        box.exec(["true"])
    order: dict[str, list[str]] = {}
    for event in client.events.page(sandbox_id=box.id, limit=1000).events:
        if event.command_id is not None:
            order.setdefault(event.command_id, []).append(event.type)
    assert len(order) == 60
    assert all(told == ["command_started", "command_ended"] for told in order.values()), order


TRACED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.ptrace(0, 0, 0, 0) == 0
os.kill(os.getpid(), 18)
print("went on", flush=True)
os.execv("/bin/sh", ["sh", "-c", "echo executed; exit 7"])
"""


def test_a_command_that_asks_to_be_traced_goes_on(debian_box: corral.Sandbox) -> None:
    result = python_in(debian_box, TRACED, timeout=30)
    assert (result.stdout, result.exit_code) == ("went on\nexecuted\n", 7)


def test_a_limit_covers_the_start(debian_box: corral.Sandbox) -> None:
    """A program file under a lease is opened by nobody until the lease is given up."""
    debian_box.files.write("/tmp/slow", "#!/bin/sh\necho ran\n", mode=0o755)
    lease = "import fcntl,signal,time; signal.signal(29, signal.SIG_IGN); f=open('/tmp/slow','r+');"
    lease += "fcntl.fcntl(f, 1024, 1); print('held', flush=True); time.sleep(100)"
    holder = debian_box.start(["python3", "-c", lease], timeout=120)
    until(lambda: holder.output() == b"held\n", 30)
    result = debian_box.exec(["/tmp/slow"], timeout=2)
    assert result.outcome.type == OutcomeType.TIMED_OUT
    holder.kill()


def test_survivors_are_bounded(server: Server, make: Make) -> None:
    """A program that keeps the streams of many ended commands open takes no descriptors from others."""
    box = make(limits=corral.Limits(memory_mib=128, pids=300, disk_mib=64))
    for _ in range(100):
        box.exec("sleep 1000 & exit 0")
    [keeper] = {pid for pid in server.keepers() if len(os.listdir(f"/proc/{pid}/fd")) > 100}
    assert len(os.listdir(f"/proc/{keeper}/fd")) < 400
    assert box.exec("echo on").stdout == "on\n"
