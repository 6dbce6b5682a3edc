"""The HTTP API under requests no client of ours would send: a problem document for each, and it lives on."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import corral
from support import Server

JSON = {"content-type": "application/json"}


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as made:
        yield made


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert (document["kind"], document["status"]) == (kind, status)
    assert document["type"] == f"urn:corral:problem:{kind}"
    assert document["message"]
    assert document["request_id"] == response.headers["x-request-id"]
    return document


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"}, {"x-api-key": "corral_" + "0" * 40}]
)
def test_without_a_good_key(server: Server, headers: dict[str, str]) -> None:
    for path in ("/v1/sandboxes", "/v1/nodes", "/v1/no/such/route"):
        problem(httpx.get(server.url + path, headers=headers, trust_env=False), 401, "unauthorized")


def test_open_routes(server: Server) -> None:
    for path in ("/healthz", "/readyz", "/version", "/metrics", "/openapi.json"):
        assert httpx.get(server.url + path, trust_env=False).status_code == 200, path
    assert "paths" in httpx.get(server.url + "/openapi.json", trust_env=False).json()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b"[]", b'"x"', b'{"environment": 1}', b'{"environment": "bb", "colour": "red"}',
     b'{"environment": "bb"}}', b'{"limits": {"memory_mib": -1}}', b'{"limits": {"memory_mib": 1e99}}',
     b'{"environment": "bb", "env": {"A=B": "x"}}', b'{"environment": "bb", "hostname": "-"}',
     b'{"environment": "bb", "spec": {"base": "bb"}}', b"{}", b"\xff\xfe",
     b'{"environment": "' + b"x" * 100_000 + b'"}',
     b'{"environment": "bb", "labels": {"' + b"k" * 200 + b'": ""}}', b"[" * 100_000],
)  # fmt: skip
def test_bodies_that_make_no_sense(http: httpx.Client, bb: str, body: bytes) -> None:
    response = http.post("/v1/sandboxes", content=body, headers=JSON)
    assert response.status_code in {400, 404, 413}, response.text
    problem(response, response.status_code, response.json()["kind"])
    assert http.get("/readyz").status_code == 200


def test_media_types_sizes_methods_and_routes(http: httpx.Client) -> None:
    plain = http.post("/v1/sandboxes", content=b"{}", headers={"content-type": "text/plain"})
    problem(plain, 415, "unsupported_media_type")
    problem(http.post("/v1/sandboxes", content=b"x" * (8 << 20), headers=JSON), 413, "too_large")
    refused = http.request("PATCH", "/v1/sandboxes")
    problem(refused, 405, "method_not_allowed")
    assert "GET" in refused.headers["allow"]
    problem(http.get("/v1/no/such/route"), 404, "not_found")
    problem(http.get("/v1/sandboxes?colour=red"), 400, "invalid_request")
    problem(http.get("/v1/sandboxes?limit=many"), 400, "invalid_request")
    problem(http.get("/v1/events?after=-1"), 400, "invalid_request")
    listed = http.post("/v1/sandboxes", content=b"[]", headers=JSON)
    problem(listed, 400, "invalid_request")
    assert "list" in listed.json()["message"]
    problem(
        http.post("/v1/sandboxes", json={"environment": "bb"}, headers={"idempotency-key": "k" * 300}),
        400,
        "invalid_request",
    )


def test_paths_inside_are_checked(http: httpx.Client, box: corral.Sandbox) -> None:
    for query in ({}, {"path": ""}, {"path": "relative"}, {"path": "/a\0b"}, {"path": "/x" * 5000}):
        response = http.get(f"/v1/sandboxes/{box.id}/files", params=query)
        assert 400 <= response.status_code < 500, (query, response.text)
        problem(response, response.status_code, response.json()["kind"])


def test_exec_bodies_are_checked(http: httpx.Client, box: corral.Sandbox) -> None:
    path = f"/v1/sandboxes/{box.id}/exec"
    bodies: list[dict[str, Any]] = [
        {},
        {"argv": []},
        {"argv": ["true"], "shell": "true"},
        {"argv": ["a\0b"]},
        {"shell": "true", "cwd": "relative"},
        {"shell": "true", "timeout_ms": -1},
        {"shell": "true", "max_output_bytes": 1 << 62},
        {"shell": "true", "env": {"": "x"}},
        {"shell": "true", "unknown": 1},
        {"argv": "true"},
    ]
    for body in bodies:
        response = http.post(path, json=body)
        assert response.status_code in {400, 422}, (body, response.text)
        problem(response, response.status_code, response.json()["kind"])
    assert http.post(path, json={"shell": "echo fine"}).json()["stdout"]["text"] == "fine\n"


def test_a_terminal_needs_a_websocket(http: httpx.Client, box: corral.Sandbox) -> None:
    problem(http.get(f"/v1/sandboxes/{box.id}/pty"), 400, "invalid_request")


def test_streamed_execution(http: httpx.Client, box: corral.Sandbox) -> None:
    with http.stream("POST", f"/v1/sandboxes/{box.id}/exec?stream=true", json={"shell": "echo hi; exit 4"}) as response:
        events = [json.loads(line) for line in response.iter_lines() if line]
    assert events[0]["event"] == "started"
    assert events[-1]["event"] == "ended"
    assert events[-1]["command"]["end"] == {"outcome": "exited", "code": 4}
    assert [e["stream"] for e in events if e["event"] == "output"] == ["stdout"]


def test_octets_that_are_no_http(server: Server, http: httpx.Client) -> None:
    attacks = [
        b"\0" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1 HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
        b"POST /v1/sandboxes HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
    ]
    for attack in attacks:
        with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
            try:
                raw.sendall(attack)
                raw.shutdown(socket.SHUT_WR)
                raw.recv(1000)
            except OSError:
                continue
    assert http.get("/readyz").status_code == 200


def test_a_client_that_leaves_a_foreground_command(server: Server, box: corral.Sandbox) -> None:
    with server.http() as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post(f"/v1/sandboxes/{box.id}/exec", json={"shell": "sleep 2; echo done > /tmp/done"}, timeout=0.3)
    [command] = box.commands()
    end = command.wait(60).end
    assert end is not None
    assert end.code == 0, "it goes on: nobody asked to kill it"


def test_many_requests_on_many_connections(server: Server, box: corral.Sandbox) -> None:
    def one(number: int) -> int:
        return httpx.get(
            f"{server.url}/v1/sandboxes/{box.id}", headers={"x-api-key": server.key}, trust_env=False
        ).status_code

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(one, range(300))) == {200}


def test_keys(client: corral.Client, server: Server) -> None:
    key = client.keys.create(f"test {uuid.uuid4().hex}")
    assert re.fullmatch(r"corral_[0-9a-f]{40}", key.key)
    assert key.id in [k.id for k in client.keys.list()]
    assert key.key not in repr(client.keys.list())
    with corral.Client(server.url, key.key) as other:
        assert other.nodes.list()
        client.keys.delete(key.id)
        with pytest.raises(corral.Unauthorized):
            other.nodes.list()
    assert key.key.encode() not in server.log.read_bytes()
    assert server.key.encode() not in server.log.read_bytes(), "keys are not logged"


def test_nodes(client: corral.Client, box: corral.Sandbox) -> None:
    [node] = client.nodes.list()
    assert node.accepting
    assert node.live >= 1
    assert box.id.startswith(f"s{node.id}")
    assert node.memory_bytes > node.memory_available_bytes > 0
    assert client.version().version == node.version


def test_metrics(server: Server, box: corral.Sandbox) -> None:
    box.exec("true")
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    assert "corral_" in text
    assert box.id not in text, "no name without bound"
