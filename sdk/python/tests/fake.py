"""A gateway that only exists in tests: real HTTP over loopback, answers scripted by each test."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Call:
    """A request as the server saw it."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """What the server does with a request."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Callable[[], Iterator[bytes]] | None = None
    """Chunks instead of a body."""
    cut: bool = False
    """Break the connection off instead of ending it properly; with no body, before any answer."""


Handler = Callable[[Call], Answer]


def problem(kind: str, status: int, **more: Any) -> Answer:
    body = {"type": f"urn:corral:problem:{kind}", "title": kind, "kind": kind, "status": status, "message": kind}
    body |= {"retryable": status in {429, 503}, "infra_failed": status >= 500} | more
    return Answer(status, body)


class Gateway:
    """Runs in a thread; ``handler`` may be exchanged at any time."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: list[Call] = []
        gateway = self

        class Http(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _body(self) -> bytes:
                if self.headers.get("transfer-encoding") == "chunked":
                    parts = []
                    while size := int(self.rfile.readline(), 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("content-length", 0)))

            def _break_off(self) -> None:
                # A reset, not an end: linger 0.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            def _serve(self) -> None:
                url = urlsplit(self.path)
                headers = {k.lower(): v for k, v in self.headers.items()}
                call = Call(self.command, unquote(url.path), parse_qs(url.query), headers, self._body())
                gateway.calls.append(call)
                answer = gateway.handler(call)
                if answer.cut and answer.body is None and answer.pieces is None:
                    self._break_off()
                    return
                body = answer.body
                raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(answer.status)
                self.send_header("x-request-id", f"r{len(gateway.calls)}")
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.pieces is None and not answer.cut:
                    self.send_header("content-length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)
                    return
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                try:
                    for piece in answer.pieces() if answer.pieces else [raw]:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                        self.wfile.flush()
                    if answer.cut:
                        self.wfile.flush()
                        self.connection.shutdown(socket.SHUT_WR)
                        self.close_connection = True
                    else:
                        self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = _serve

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def server_bind(self) -> None:
                # Not HTTPServer's, which asks the resolver for this machine's name.
                TCPServer.server_bind(self)

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Http)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def gateway(*answers: Answer, handler: Handler | None = None) -> Iterator[Gateway]:
    """A gateway that gives these answers in turn, the last one again and again."""
    left = list(answers)

    def scripted(_: Call) -> Answer:
        return left.pop(0) if len(left) > 1 else left[0]

    made = Gateway(handler or scripted)
    try:
        yield made
    finally:
        made.close()


SANDBOX = {
    "id": "sabcd0123456789abcdefghij",
    "project_id": "default",
    "state": "running",
    "environment": "python",
    "labels": {},
    "limits": {"memory_mib": 512, "cpus": 1, "cpu_weight": 100, "pids": 512, "open_files": 4096, "disk_mib": 1024},
    "created_at": "2026-11-29T10:00:00.123456789Z",
    "idle_ttl_ms": 0,
    "max_ttl_ms": 0,
    "auto_resume": True,
}


def command(**more: Any) -> dict[str, Any]:
    none = {"total_bytes": 0, "truncated": False, "dropped_from": 0, "dropped_to": 0}
    base = {"id": "c0123456789abcdef", "argv": ["true"], "running": False, "started_at": "2026-11-29T10:00:00Z"}
    return base | {"stdout": none, "stderr": none, "end": {"outcome": "exited", "code": 0}} | more


def stream(total: int, gap: tuple[int, int] | None = None) -> dict[str, Any]:
    start, end = gap or (0, 0)
    return {"total_bytes": total, "truncated": gap is not None, "dropped_from": start, "dropped_to": end}


def result(stdout: bytes = b"", code: int = 0, **more: Any) -> dict[str, Any]:
    status = command(stdout=stream(len(stdout)), end={"outcome": "exited", "code": code}) | more
    out = {"text": stdout.decode(), "complete": True}
    return {"command": status, "exit_code": code, "stdout": out, "stderr": {"text": "", "complete": True}}
