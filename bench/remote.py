#!/usr/bin/env python3
"""A shared store that is far away: a directory store behind S3's protocol, each request answered late.

Run as a program, so that its work is not in the bench's own process: `remote.py DIR LATENCY_MS TRACES`. Prints its
port; for each line that it is given tells what went through; ends with its standard input. Without TRACES traces are
not shown and not kept, so that a cold run stays cold. No signatures are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from process import Failed, kill_group

BUCKET = "layers"
MOST_HEAD = 64 << 10


class Service:
    """What requests have in common."""

    def __init__(self, root: Path, latency: float, traces: bool) -> None:
        self.root, self.latency, self.traces = root, latency, traces
        self.requests = self.sent_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after the other."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, BrokenPipeError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:] if h)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await asyncio.sleep(self.latency)
                self.requests += 1
                await self._answer(writer, method, target, headers, body)
        writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        url = urlsplit(target)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").strip("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        path = self.root / key
        hidden = not self.traces and "/traces/" in key
        match method:
            case "GET" if not key:
                await _send(writer, 200, self._list(query))
            case "GET" | "HEAD" if hidden or not path.is_file():
                await _send(writer, 404, b"" if method == "HEAD" else _error("NoSuchKey"))
            case "GET" | "HEAD":
                await self._object(writer, path, headers.get("range"), method == "HEAD")
            case "POST" if "uploads" in query:
                await _send(writer, 200, _element("InitiateMultipartUploadResult", _element("UploadId", b"1")))
            case "PUT" if "partNumber" in query:
                await _send(writer, 200, b"", {"etag": '"part"'})
            case "PUT" | "POST" if "if-none-match" in headers and (path.exists() or method == "POST"):
                await _send(writer, 412, _error("PreconditionFailed"))
            case "PUT":
                if not hidden:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(body)
                await _send(writer, 200, b"", {"etag": '"whole"'})
            case "DELETE":
                await _send(writer, 204, b"")
            case _:
                await _send(writer, 501, _error("NotImplemented"))

    async def _object(self, writer: asyncio.StreamWriter, path: Path, asked: str | None, head: bool) -> None:
        size = path.stat().st_size
        begin, end, status, extra = 0, size, 200, {}
        if asked and (found := re.fullmatch(r"bytes=(\d+)-(\d+)", asked)):
            begin, end, status = int(found[1]), min(int(found[2]) + 1, size), 206
            extra = {"content-range": f"bytes {begin}-{end - 1}/{size}"}
        stamp = {"etag": '"whole"', "last-modified": formatdate(path.stat().st_mtime, usegmt=True)}
        writer.write(_head(status, end - begin, {**stamp, **extra}))
        if head or begin == end:
            await writer.drain()
            return
        self.sent_bytes += end - begin
        with open(path, "rb") as file:  # noqa: ASYNC230
            await asyncio.get_running_loop().sendfile(writer.transport, file, begin, end - begin)

    def _list(self, query: dict[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        below = self.root / prefix.rpartition("/")[0]
        entries = b""
        for path in sorted(below.rglob("*")):
            key = str(path.relative_to(self.root))
            if path.is_file() and key.startswith(prefix) and not key.startswith("."):
                told = path.stat()
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(told.st_mtime)).encode()
                size = str(told.st_size).encode()
                parts = {"Key": escape(key).encode(), "LastModified": when, "ETag": b"whole", "Size": size}
                entries += _element("Contents", b"".join(_element(name, text) for name, text in parts.items()))
        return _element("ListBucketResult", _element("IsTruncated", b"false") + entries)


def _element(name: str, inside: bytes) -> bytes:
    return f"<{name}>".encode() + inside + f"</{name}>".encode()


def _error(code: str) -> bytes:
    return _element("Error", _element("Code", code.encode()))


def _head(status: int, length: int, extra: dict[str, str]) -> bytes:
    lines = [
        f"HTTP/1.1 {status} -",
        f"content-length: {length}",
        *(f"{name}: {value}" for name, value in extra.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, extra: dict[str, str] | None = None) -> None:
    writer.write(_head(status, len(body), {"content-type": "application/xml", **(extra or {})}) + body)
    await writer.drain()


async def _main(root: Path, latency_ms: float, traces: bool) -> None:
    service = Service(root, latency_ms / 1000, traces)
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0, limit=MOST_HEAD, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps({"requests": service.requests, "sent_bytes": service.sent_bytes}), flush=True)


class Remote:
    """The program, from outside."""

    def __init__(self, root: Path, latency_ms: int, *, traces: bool = False) -> None:
        words = [sys.executable, __file__, str(root), str(latency_ms), "traces" if traces else ""]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        port = int(self._line())
        self.url = (
            f"s3://{BUCKET}?endpoint=http://127.0.0.1:{port}&path_style=true&allow_http=true&credentials=anonymous"
        )

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], 30)[0]:
            raise Failed("the remote store does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise Failed("the remote store ended")
        return line

    def counts(self) -> dict[str, int]:
        """Requests and bytes so far."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return dict(json.loads(self._line()))

    def settle(self) -> None:
        """Waits until nobody asks any more: a node that starts learns what is published."""
        for _ in range(120):
            before = self.counts()
            time.sleep(1)
            if self.counts() == before:
                return
        raise Failed("requests of the remote store do not end")

    def close(self) -> None:
        """Ends it."""
        kill_group(self.process)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2]), len(sys.argv) > 3 and sys.argv[3] == "traces"))
