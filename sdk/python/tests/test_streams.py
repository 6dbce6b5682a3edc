"""Output, events and files that arrive in pieces, over connections that break."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from corral import RetryPolicy, _tar
from corral._async import _backend
from corral._lines import EventParser, LineSplitter

from .fake import SANDBOX, Answer, Call, command, gateway, result, stream

FAST = RetryPolicy(attempts=4, total=20, base=0.001, cap=0.01)
DATA = bytes(range(256)) * 400


def output_server(breaks: int) -> tuple[list[int], object]:
    """Serves DATA as standard output and breaks each of the first answers off after a while."""
    offsets: list[int] = []

    def handler(call: Call) -> Answer:
        if not call.path.endswith("/output"):
            return Answer(200, command(stdout=stream(len(DATA)), stderr=stream(3)))
        at = int(call.query["offset"][0])
        if call.query["stream"] == ["stderr"]:
            return Answer(200, b"err"[at:], {"corral-offset": str(at)})
        offsets.append(at)
        cut = len(offsets) <= breaks
        rest = DATA[at : at + 10_000] if cut else DATA[at:]
        return Answer(200, rest, {"corral-offset": str(at)}, cut=cut)

    return offsets, handler


def test_a_stream_goes_on_where_it_broke() -> None:
    offsets, handler = output_server(breaks=7)
    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:  # type: ignore[arg-type]
        handle = c.sandbox("s1").command("c1")
        chunks = list(handle.stream("stdout"))
    assert b"".join(chunk.data for chunk in chunks) == DATA
    assert offsets == [n * 10_000 for n in range(8)]
    at = 0
    for chunk in chunks:
        assert chunk.offset == at
        at += len(chunk.data)


async def test_both_streams_of_the_asyncio_client() -> None:
    _, handler = output_server(breaks=2)
    got = {"stdout": b"", "stderr": b""}
    with gateway(handler=handler) as server:  # type: ignore[arg-type]
        async with corral.AsyncClient(server.url, "k", retry=FAST) as c:
            handle = await c.sandbox("s1").command("c1")
            async for chunk in handle.stream():
                got[chunk.stream] += chunk.data
    assert got == {"stdout": DATA, "stderr": b"err"}


def test_a_stream_that_never_goes_on_fails() -> None:
    def handler(call: Call) -> Answer:
        return Answer(cut=True) if call.path.endswith("/output") else Answer(200, command())

    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        handle = c.sandbox("s1").command("c1")
        with pytest.raises(corral.ConnectionFailed):
            list(handle.stream("stdout"))
        # Leaving the merged form early raises nothing either.
        with pytest.raises(corral.ConnectionFailed):
            list(handle.stream())


def test_a_result_longer_than_its_answer_is_completed() -> None:
    long = result(b"")
    long["command"]["stdout"] = stream(len(DATA))
    long["stdout"] = {"text": DATA[:10].decode("latin-1"), "complete": False}

    def handler(call: Call) -> Answer:
        if call.path.endswith("/output"):
            at = int(call.query["offset"][0])
            return Answer(200, DATA[at:], {"corral-offset": str(at)})
        return Answer(200, long)

    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        found = c.sandbox("s1").exec("cat big")
    assert found.stdout_bytes == DATA
    assert not found.truncated


def test_output_with_a_gap() -> None:
    behind = len(DATA) - 100
    gap = stream(len(DATA), (100, behind))
    long = result(b"")
    long["command"]["stdout"] = gap
    long["stdout"] = {"text": "", "complete": False}

    def handler(call: Call) -> Answer:
        if not call.path.endswith("/output"):
            return Answer(200, long if call.path.endswith("/exec") else long["command"])
        at = int(call.query["offset"][0])
        if at < 100:
            return Answer(200, DATA[at:100], {"corral-offset": str(at)})
        at = max(at, behind)
        return Answer(200, DATA[at:], {"corral-offset": str(at)})

    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        found = c.sandbox("s1").exec("yes")
        offsets = [chunk.offset for chunk in c.sandbox("s1").command("c1").stream("stdout")]
    assert found.stdout_bytes == DATA[:100] + DATA[-100:]
    assert found.truncated
    assert offsets == [0, behind]


def test_input_that_is_no_text_is_streamed() -> None:
    raw = b"\xff" * 300_000

    def handler(call: Call) -> Answer:
        if call.path.endswith("/exec"):
            return Answer(202, command(running=True, end=None))
        if call.path.endswith("/stdin"):
            return Answer(204)
        return Answer(200, result(b"ok") if call.path.endswith("/result") else command())

    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        assert c.sandbox("s1").exec("wc -c", stdin=raw).stdout == "ok"
    posted = next(call for call in server.calls if call.path.endswith("/stdin"))
    assert posted.body == raw
    assert posted.query == {"close": ["true"]}
    assert server.calls[0].json == {"shell": "wc -c", "open_stdin": True, "background": True}


def test_waiting_for_a_command_has_an_end() -> None:
    with gateway(Answer(200, command(running=True, end=None))) as server, corral.Client(server.url, "k") as c:
        handle = c.sandbox("s1").command("c1")
        with pytest.raises(TimeoutError):
            handle.wait(0.05)


def test_events_go_on_behind_the_last_one_seen() -> None:
    def sent(seqs: range) -> Iterator[bytes]:
        for n in seqs:
            event = {"seq": n, "at": "2026-11-29T10:00:00Z", "sandbox_id": "s1", "type": "state", "state": "running"}
            text = f": comment\nid: {n}\ndata: {json.dumps(event)}\n\n".encode()
            yield text[:20]
            yield text[20:]

    def handler(call: Call) -> Answer:
        after = int(call.headers.get("last-event-id", "0"))
        # One event is told twice: a reader must not see it again.
        pieces = lambda: sent(range(max(1, after), after + 4))  # noqa: E731
        return Answer(200, headers={"content-type": "text/event-stream"}, pieces=pieces, cut=True)

    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        events = c.events.follow(after=0)
        seen = [next(events).seq for _ in range(10)]
        events.close()
    assert seen == list(range(1, 11))


def test_an_import_reports_progress_and_failure() -> None:
    lines = [{"event": "planned", "layers": 1, "bytes": 0}, {"event": "novelty"}]
    image = {"event": "imported", "image": {"name": "x", "digest": "sha256:0", "layers": []}}
    broken = {"event": "failed", "problem": {"kind": "invalid_image", "message": "no", "status": 422}}
    seen: list[str] = []
    for last in (image, broken):
        body = b"".join(json.dumps(line).encode() + b"\n" for line in [*lines, last])
        with gateway(Answer(200, body)) as server, corral.Client(server.url, "k", retry=FAST) as c:
            if last is image:
                record = c.images.import_registry("r/x:1", on_progress=lambda p: seen.append(p.event))
                assert record.name == "x"
                assert seen == ["planned", "novelty", "imported"]
            else:
                with pytest.raises(corral.InvalidImage, match="no"):
                    c.images.import_registry("r/x:1")
    with gateway(Answer(200, b'{"event": "planned"}\n')) as server, corral.Client(server.url, "k", retry=FAST) as c:
        with pytest.raises(corral.ConnectionFailed):
            c.images.import_registry("r/x:1")


def test_files_round_trip(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}

    def handler(call: Call) -> Answer:
        name = call.query["path"][0]
        if call.method == "PUT":
            files[name] = call.body
            return Answer(200, {"path": name, "file_type": "file", "size_bytes": len(call.body)})
        if "range" in call.headers:
            first, _, last = call.headers["range"].removeprefix("bytes=").partition("-")
            return Answer(206, files[name][int(first) : int(last) + 1 if last else None])
        return Answer(200, files[name])

    source = tmp_path / "in"
    source.write_bytes(DATA)
    source.chmod(0o640)
    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        box = c.sandbox("s1").files
        assert box.write("/t", "grüß").size_bytes == 6
        assert box.read("/t") == "grüß"
        box.upload(source, "/b", parents=True)
        assert server.calls[-1].query["mode"] == [str(0o640)]
        assert box.read_bytes("/b", offset=5, length=7) == DATA[5:12]
        assert box.read_bytes("/b", offset=len(DATA) - 3) == DATA[-3:]
        assert b"".join(box.open_read("/b")) == DATA
        assert box.download("/b", tmp_path / "out").read_bytes() == DATA
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_directories_round_trip(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "a.txt").write_bytes(DATA)
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("deep/er/a.txt")
    os.link(tree / "run.sh", tree / "twin")
    os.mkfifo(tree / "pipe")
    long = "n" * 200
    (tree / long).write_text(long)
    stored = b""

    def handler(call: Call) -> Answer:
        nonlocal stored
        if call.path.endswith("/mkdir"):
            return Answer(200, {"path": call.json["path"], "file_type": "directory"})
        if call.method == "PUT":
            stored = call.body
            return Answer(204)
        return Answer(200, stored)

    target = tmp_path / "copy"
    with gateway(handler=handler) as server, corral.Client(server.url, "k", retry=FAST) as c:
        box = c.sandbox("s1").files
        box.upload_dir(tree, "/work")
        skipped = box.download_dir("/work", target)
    assert skipped == ["pipe"]
    assert (target / "deep" / "er" / "a.txt").read_bytes() == DATA
    assert (target / "link").read_bytes() == DATA
    assert (target / long).read_text() == long
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "twin").samefile(target / "run.sh")


def test_files_of_ones_own_that_cannot_be_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / os.fsdecode(b"caf\xe9")).write_text("latin")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tree / "a.sock"))
    packed = b"".join(_tar.pack(tree))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert [os.fsencode(name) for name in archive.getnames()] == [b".", b"caf\xe9"]
    assert [r.getMessage() for r in caplog.records] == [
        f"1 left out, which are sockets, the first of them {tree}/a.sock"
    ]

    big = tree / "big"
    for size, said in [(1 << 20, "it became shorter"), (3 << 20, "it changed")]:
        big.write_bytes(bytes(2 << 20))
        stream = _tar.pack(tree)
        assert len([next(stream) for _ in range(4)]) == 4
        os.truncate(big, size)
        with pytest.raises(OSError, match=said) as failed:
            list(stream)
        assert failed.value.filename == str(big)

    # What fails is told as it is, not as a failure of the connection.
    with gateway(Answer(204)) as server, corral.Client(server.url, "k", retry=FAST) as c:
        for send in (
            lambda: c.images.import_file(tmp_path / "missing", "x"),
            lambda: c.layers.build("/proc/self/mem", kind="toolkit", at="/x"),
            lambda: c.sandbox("s1").files.upload("/proc/self/mem", "/x"),
        ):
            with pytest.raises(OSError, match=r"No such file|Input/output error") as failed:
                send()
            assert failed.value.filename in {str(tmp_path / "missing"), "/proc/self/mem"}


def test_a_hostile_archive_stays_below_its_target(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"evil") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o6777
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(data))

        add("../up")
        add("/abs")
        add("here", tarfile.SYMTYPE, ".")
        add("chain", tarfile.SYMTYPE, "here/..")
        add("out", tarfile.SYMTYPE, "..")
        add("out/file")
        add("root", tarfile.SYMTYPE, "/etc")
        add("root/passwd")
        add("dir/in", tarfile.SYMTYPE, "../good")
        add("dir/in/file")
        add("hard", tarfile.LNKTYPE, "../outside")
        add("hard2", tarfile.LNKTYPE, "/etc/passwd")
        add("device", tarfile.CHRTYPE)
        add("good", data=b"good")
        add("good", data=b"better")
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    target = tmp_path / "a" / "target"
    target.mkdir(parents=True)
    (target / "mine").symlink_to(tmp_path)

    with tarfile.open(fileobj=(again := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("mine/written")
        archive.addfile(info, io.BytesIO())
    for data in (packed.getvalue(), again.getvalue()):
        with gateway(Answer(200, data)) as server, corral.Client(server.url, "k", retry=FAST) as c:
            skipped = c.sandbox("s1").files.download_dir("/w", target)
    assert skipped == ["mine/written"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "outside"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["target"]
    assert outside.read_text() == "untouched"
    assert (target / "good").read_text() == "better"
    assert (target / "good").stat().st_mode & 0o7000 == 0
    for path in target.rglob("*"):
        if path.name != "mine":
            assert path.resolve().is_relative_to(target)


async def test_merging_passes_errors_on_and_can_be_left() -> None:
    async def numbers(count: int, error: Exception | None = None):  # type: ignore[no-untyped-def]
        for n in range(count):
            yield n
        if error is not None:
            raise error

    assert sorted([n async for n in _backend.merge([numbers(3), numbers(4)])]) == [0, 0, 1, 1, 2, 2, 3]
    with pytest.raises(KeyError):
        [n async for n in _backend.merge([numbers(3), numbers(1, KeyError())])]
    merged = _backend.merge([numbers(100), numbers(100)])
    assert await anext(merged) == 0
    await merged.aclose()  # type: ignore[attr-defined]


def test_lines_and_events_in_any_pieces() -> None:
    text = b"event: a\r\ndata: 1\r\ndata: 2\r\nid: 7\r\n\r\n: x\n\ndata:{}\n\n"
    for size in range(1, len(text)):
        parser = EventParser()
        events = [e for n in range(0, len(text), size) for e in parser.feed(text[n : n + size])]
        assert [(e.event, e.data, e.id) for e in events] == [("a", "1\n2", "7"), ("message", "{}", "7")]
        lines = LineSplitter()
        got = [line for n in range(0, len(text), size) for line in lines.feed(text[n : n + size])]
        assert [*got, lines.rest()] == text.replace(b"\r", b"").split(b"\n")


def test_the_sandbox_goes_with_its_context() -> None:
    with gateway(Answer(200, SANDBOX | {"state": "ended"})) as server, corral.Client(server.url, "k") as c:
        with pytest.raises(ZeroDivisionError), c.sandboxes.create("x"):
            raise ZeroDivisionError
    assert [call.method for call in server.calls] == ["POST", "DELETE"]
