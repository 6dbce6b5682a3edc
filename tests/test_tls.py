"""TLS from end to end: a certificate of a private issuer, the command line, the SDK."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import corral
from support import Server, with_busybox

ONCE = corral.RetryPolicy(attempts=1)


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Issuer:
    """A certificate authority of this test."""

    cert: Path
    key: Path

    @classmethod
    def make(cls, directory: Path, name: str) -> Issuer:
        made = cls(directory / f"{name}.pem", directory / f"{name}.key")
        openssl(*request(f"/CN={name}", made.cert, made.key))
        return made

    def trusted(self) -> ssl.SSLContext:
        """What a client that trusts this issuer verifies with."""
        return ssl.create_default_context(cafile=str(self.cert))

    def issue(self, directory: Path) -> tuple[Path, Path]:
        """A server's certificate and key for 127.0.0.1."""
        cert, key = directory / "server.pem", directory / "server.key"
        extensions = ["subjectAltName=IP:127.0.0.1", "basicConstraints=critical,CA:FALSE"]
        added = [word for extension in extensions for word in ("-addext", extension)]
        by = ["-CA", str(self.cert), "-CAkey", str(self.key)]
        openssl(*request("/CN=corral", cert, key), *by, *added)
        return cert, key


def request(subject: str, cert: Path, key: Path) -> list[str]:
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    return ["req", "-x509", *kind, "-subj", subject, "-out", str(cert), "-keyout", str(key)]


@dataclass(frozen=True)
class Served:
    """A node behind TLS, its issuer, and an issuer it knows nothing of."""

    server: Server
    issuer: Issuer
    stranger: Issuer

    def client(self, issuer: Issuer) -> corral.Client:
        return self.server.client(verify=issuer.trusted(), retry=ONCE)

    def cli(self, issuer: Issuer, *words: str) -> subprocess.CompletedProcess[bytes]:
        return self.server.cli("--ca-cert", str(issuer.cert), *words)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tls")
    issuer, stranger = (Issuer.make(directory, name) for name in ("issuer", "stranger"))
    cert, key = issuer.issue(directory)
    server = Server(True, "--tls-cert", str(cert), "--tls-key", str(key))
    server.url = server.url.replace("http:", "https:")
    with with_busybox(server, directory, verify=issuer.trusted(), retry=ONCE):
        yield Served(server, issuer, stranger)
        assert server.stop() == 0


def test_the_sdk(served: Served) -> None:
    with served.client(served.issuer) as client, client.sandboxes.create("bb", max_ttl=600) as box:
        assert box.exec("echo through").stdout == "through\n"
        box.files.write("/f", "by TLS")
        assert box.files.read("/f") == "by TLS"
        with box.pty(["/bin/sh"]) as terminal:
            terminal.send("echo from-$((40+2)); exit\n")
            assert b"from-42" in b"".join(terminal)


def test_the_command_line(served: Served) -> None:
    done = served.cli(served.issuer, "run", "bb", "echo", "through")
    assert (done.returncode, done.stdout) == (0, b"through\n"), done


def test_plain_http_is_told_so(served: Served) -> None:
    plain = served.server.url.replace("https:", "http:")
    answer = httpx.get(f"{plain}/v1/sandboxes", timeout=30, trust_env=False)
    assert answer.status_code == 400
    assert "TLS" in answer.json()["message"]
    with corral.Client(plain, served.server.key, retry=ONCE) as client, pytest.raises(corral.CorralError, match="TLS"):
        client.sandboxes.get("sabcd0000000000000000000a")
    done = served.server.cli("--api-url", plain, "ls")
    assert done.returncode == 1
    assert b"TLS" in done.stderr
    with served.client(served.issuer) as client:
        assert list(client.nodes.list()), "others are served as before"


def test_an_unknown_issuer_is_told_so(served: Served) -> None:
    patient = served.server.client(verify=served.stranger.trusted(), retry=corral.RetryPolicy(attempts=1000, total=1e6))
    with patient as client, pytest.raises(corral.CorralError, match=r"(?i)certificate") as caught:
        list(client.sandboxes.list())
    assert not caught.value.retryable, "it would not help"
    done = served.cli(served.stranger, "ls")
    assert done.returncode == 1
    assert b"certificate" in done.stderr, done.stderr
