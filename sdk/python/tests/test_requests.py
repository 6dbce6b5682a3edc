"""Retries, idempotency and errors, of both clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import corral
from corral import RetryPolicy

from .fake import SANDBOX, Answer, Call, Gateway, gateway, problem, result

FAST = RetryPolicy(attempts=4, total=20, base=0.001, cap=0.01)


def client(server: Gateway, retry: RetryPolicy = FAST) -> corral.Client:
    return corral.Client(server.url, "corral_k", retry=retry)


def test_create_is_retried_under_one_key_until_it_succeeds() -> None:
    lost = Answer(cut=True)
    full = problem("overloaded", 429, retry_after_ms=30)
    with gateway(lost, full, Answer(201, SANDBOX)) as server, client(server) as c:
        began = time.monotonic()
        sandbox = c.sandboxes.create("python", labels={"a": "b"}, idle_ttl=1.5)
        assert time.monotonic() - began >= 0.03
    assert sandbox.id == SANDBOX["id"]
    assert sandbox.state == corral.State.RUNNING
    keys = {call.headers["idempotency-key"] for call in server.calls}
    assert len(server.calls) == 3
    assert len(keys) == 1
    assert server.calls[0].json == {"environment": "python", "labels": {"a": "b"}, "idle_ttl_ms": 1500}
    assert server.calls[0].headers["authorization"] == "Bearer corral_k"


def test_a_wait_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="corral")
    full = problem("insufficient_storage", 507, retry_after_ms=1, retryable=True)
    with gateway(full, Answer(201, SANDBOX)) as server, client(server) as c:
        c.sandboxes.create("python")
    texts = [record.getMessage() for record in caplog.records if record.name == "corral"]
    assert len(texts) == 1
    assert texts[0].startswith("POST /v1/sandboxes: ")
    assert "attempt 2 of 4 in 0.0 s" in texts[0]


def test_a_sandbox_that_never_ran_is_made_anew() -> None:
    end = {"reason": "start_failed", "cause": "platform", "infra_failed": True}
    dead = Answer(200, SANDBOX | {"state": "ended", "end": end})
    with gateway(dead, Answer(201, SANDBOX)) as server, client(server) as c:
        assert c.sandboxes.create("python").state == corral.State.RUNNING
    first, second = (call.headers["idempotency-key"] for call in server.calls)
    assert first != second
    with gateway(dead) as server, client(server) as c, pytest.raises(corral.SandboxEnded) as caught:
        c.sandboxes.create("python", idempotency_key="mine")
    assert (caught.value.kind, caught.value.infra_failed, len(server.calls)) == ("start_failed", True, 1)


def test_two_creates_have_two_keys() -> None:
    with gateway(Answer(201, SANDBOX)) as server, client(server) as c:
        for _ in range(2):
            c.sandboxes.create("python")
        c.sandboxes.create("python", idempotency_key="mine")
    assert len({call.headers["idempotency-key"] for call in server.calls}) == 3
    assert server.calls[2].headers["idempotency-key"] == "mine"


def test_exec_is_not_repeated_when_its_answer_is_lost() -> None:
    with gateway(Answer(cut=True)) as server, client(server) as c:
        with pytest.raises(corral.ConnectionFailed):
            c.sandbox(str(SANDBOX["id"])).exec("true")
        assert len(server.calls) == 1
        with pytest.raises(corral.ConnectionFailed):
            c.sandbox(str(SANDBOX["id"])).exec("true", step_key="k")
        assert len(server.calls) == 1 + FAST.attempts


def test_exec_is_repeated_when_it_was_refused() -> None:
    busy, down = problem("overloaded", 429), problem("unavailable", 503)
    with gateway(busy, down, Answer(200, result(b"x"))) as server, client(server) as c:
        assert c.sandbox(str(SANDBOX["id"])).exec(["true"]).stdout == "x"
        assert [call.json for call in server.calls] == [{"argv": ["true"]}] * 3


def test_a_fault_that_may_pass_is_retried_only_where_that_is_safe() -> None:
    fault = problem("upstream_failed", 502, retryable=True)
    with gateway(fault) as server, client(server) as c:
        with pytest.raises(corral.PlatformError) as caught:
            c.sandbox(str(SANDBOX["id"])).exec("true")
        assert len(server.calls) == 1
        assert caught.value.infra_failed
        with pytest.raises(corral.PlatformError):
            c.sandboxes.get(str(SANDBOX["id"]))
        assert len(server.calls) == 1 + FAST.attempts


def test_a_removal_whose_answer_was_lost_may_find_nothing() -> None:
    with gateway(Answer(cut=True), problem("not_found", 404)) as server, client(server) as c:
        c.images.delete("a/b:c")
        assert server.calls[0].path == "/v1/images/a/b:c"
        with pytest.raises(corral.NotFound):
            c.images.delete("a/b:c")


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with corral.Client(f"http://127.0.0.1:{free.getsockname()[1]}", "k", retry=FAST) as c:
            with pytest.raises(corral.ConnectionFailed) as caught:
                c.version()
    assert caught.value.retryable


def test_waiting_longer_than_the_bound_is_refused_at_once() -> None:
    with gateway(problem("overloaded", 429, retry_after_ms=3_600_000)) as server, client(server) as c:
        with pytest.raises(corral.Overloaded) as caught:
            c.sandboxes.create("python")
    assert len(server.calls) == 1
    assert caught.value.retry_after == 3600


@pytest.mark.parametrize(
    ("kind", "status", "cls"),
    [
        ("not_found", 404, corral.NotFound),
        ("conflict", 409, corral.Conflict),
        ("idempotency_mismatch", 409, corral.IdempotencyMismatch),
        ("sandbox_ended", 410, corral.SandboxEnded),
        ("disk_full", 507, corral.DiskFull),
        ("permission_denied", 403, corral.PermissionDenied),
        ("forbidden", 403, corral.Forbidden),
        ("unauthorized", 401, corral.Unauthorized),
        ("command_not_started", 422, corral.CommandNotStarted),
        ("limit_exceeded", 409, corral.LimitExceeded),
        ("wrong_file_type", 409, corral.WrongFileType),
        ("unknown_user", 400, corral.InvalidRequest),
        ("internal", 500, corral.PlatformError),
        ("of_a_later_version", 418, corral.CorralError),
    ],
)
def test_kinds_become_classes(kind: str, status: int, cls: type[corral.CorralError]) -> None:
    answer = problem(kind, status, sandbox_id="s1", request_id="q1")
    with gateway(answer) as server, client(server) as c, pytest.raises(corral.CorralError) as caught:
        c.sandboxes.get("s1")
    error = caught.value
    assert type(error) is cls
    assert (error.kind, error.status, error.sandbox_id, error.request_id) == (kind, status, "s1", "q1")


def test_an_answer_that_is_no_problem_document() -> None:
    page = Answer(500, b"<html>oops", {"content-type": "text/html"})
    with gateway(page) as server, client(server) as c, pytest.raises(corral.CorralError, match="oops") as caught:
        c.version()
    assert (caught.value.kind, caught.value.request_id) == ("unknown", "r1")


def test_unknown_fields_and_values_do_no_harm() -> None:
    odd: dict[str, Any] = SANDBOX | {
        "state": "teleported",
        "novelty": {"a": 1},
        "end": {"reason": "melted", "cause": "sun", "infra_failed": True, "more": 1},
    }
    with gateway(Answer(200, odd)) as server, client(server) as c:
        status = c.sandboxes.get("s1").status
    assert status.state == "teleported"
    assert status.end is not None
    assert (status.end.reason, status.end.infra_failed) == ("melted", True)
    assert status.created_at is not None
    assert status.created_at.microsecond == 123456


def test_an_answer_without_what_is_needed_is_said_so() -> None:
    for body in ({"id": "s"}, [1], b"nope"):
        with gateway(Answer(200, body)) as server, client(server) as c, pytest.raises(corral.ProtocolError):
            c.sandboxes.get("s1")


def test_lists_go_on_to_the_last_page() -> None:
    def handler(call: Call) -> Answer:
        at = int(call.query.get("cursor", ["0"])[0])
        page = {"sandboxes": [SANDBOX | {"id": f"s{at}"}, SANDBOX | {"id": f"s{at + 1}"}]}
        return Answer(200, page | ({"next_cursor": str(at + 2)} if at < 4 else {}))

    with gateway(handler=handler) as server, client(server) as c:
        found = [s.id for s in c.sandboxes.list(labels={"a": "1", "b": "x=y"}, state="running", page_size=2)]
    assert found == [f"s{n}" for n in range(6)]
    assert server.calls[0].query == {"label": ["a=1", "b=x=y"], "state": ["running"], "limit": ["2"]}


def test_a_batch_is_sent_again_for_what_may_pass() -> None:
    full = {"problem": problem("overloaded", 429, retry_after_ms=1).body}
    bad = {"problem": problem("not_found", 404).body}
    made = [{"sandbox": SANDBOX | {"id": f"s{n}"}} for n in range(3)]
    answers = [Answer(200, {"items": [made[0], full, bad]}), Answer(200, {"items": [made[0], made[1], bad]})]
    with gateway(*answers) as server, client(server) as c:
        first, second, third = c.sandboxes.create_many([corral.SandboxSpec(environment="e")] * 3)
    assert isinstance(first, corral.Sandbox)
    assert isinstance(second, corral.Sandbox)
    assert isinstance(third, corral.NotFound)
    assert server.calls[0].headers["idempotency-key"] == server.calls[1].headers["idempotency-key"]


def test_all_or_nothing_removes_what_was_made() -> None:
    def handler(call: Call) -> Answer:
        if call.method == "DELETE":
            return Answer(200, SANDBOX | {"state": "ended"})
        return Answer(200, {"items": [{"sandbox": SANDBOX}, {"problem": problem("not_found", 404).body}]})

    with gateway(handler=handler) as server, client(server) as c, pytest.raises(corral.NotFound):
        c.sandboxes.create_many([corral.SandboxSpec(environment="e")] * 2, all_or_nothing=True)
    assert server.calls[-1].method == "DELETE"


def test_check_raises_with_the_result() -> None:
    failed = result(b"out", 3)
    late = result(b"", 124, end={"outcome": "timed_out", "timeout_ms": 50})
    with gateway(Answer(200, failed), Answer(200, late)) as server, client(server) as c:
        sandbox = c.sandbox("s1")
        with pytest.raises(corral.CommandFailed) as caught:
            sandbox.exec("false", check=True)
        assert (caught.value.result.exit_code, caught.value.result.stdout) == (3, "out")
        with pytest.raises(corral.CommandTimeout):
            sandbox.exec("sleep 9", timeout=0.05, check=True)
        assert server.calls[1].json["timeout_ms"] == 50


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CORRAL_API_URL", "CORRAL_API_KEY", "CORRAL_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(corral.NotConfigured, match="corral up"):
        corral.Client()
    file = tmp_path / "corral" / "credentials.json"
    file.parent.mkdir()
    file.write_text('{"url": "http://127.0.0.1:1/", "key": "a"}')
    assert corral.Client().url == "http://127.0.0.1:1"
    monkeypatch.setenv("CORRAL_API_URL", "http://127.0.0.1:2")
    assert corral.Client().url == "http://127.0.0.1:2"
    file.write_text("[]")
    with pytest.raises(corral.NotConfigured, match=r"credentials\.json"):
        corral.Client()
    with pytest.raises(corral.NotConfigured):
        corral.Client("ftp://x", "k")


def test_exactly_one_environment() -> None:
    for bad in (corral.SandboxSpec(), corral.SandboxSpec(environment="a", image="b")):
        with pytest.raises(ValueError, match="exactly one"):
            bad.to_wire()
    assert corral.SandboxSpec(image="b").to_wire()["spec"]["base"] == "b"


async def test_a_thousand_at_a_time_share_one_client() -> None:
    """The server answers nobody before all have asked, so that fewer than a thousand at a time would wait for ever."""
    everybody = asyncio.Event()
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length
        body = json.loads(await reader.readexactly(int(length[1])))
        asked += 1
        if asked == 1000:
            everybody.set()
        await everybody.wait()
        raw = json.dumps(result(body["argv"][1].encode())).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with corral.AsyncClient(url, "k") as c:
            results = await asyncio.gather(*(c.sandbox("s1").exec(["echo", str(n)]) for n in range(1000)))
    assert [r.stdout for r in results] == [str(n) for n in range(1000)]


async def test_the_asyncio_client_retries_too() -> None:
    answers = [Answer(cut=True), problem("unavailable", 503, retry_after_ms=1), Answer(201, SANDBOX)]
    with gateway(*answers) as server:
        async with corral.AsyncClient(server.url, "k", retry=FAST) as c:
            sandbox = await c.sandboxes.create("python")
            assert sandbox.id == SANDBOX["id"]
    assert len(server.calls) == 3
