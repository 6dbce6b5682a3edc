"""Images from Dockerfiles: what they hold, what runs again, and what a bad or hostile one comes to."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import corral
from conftest import SMALL, Make
from support import PROGRAM, Server, sandbox_cgroups, tar_of, until


class Builder:
    """Builds under a name of its own, and knows what was told."""

    def __init__(self, client: corral.Client) -> None:
        self.client = client
        self.names: list[str] = []
        self.told: list[corral.BuildProgress] = []

    def __call__(
        self, text: str | None, files: Mapping[str, bytes | tarfile.TarInfo] | None = None, **options: object
    ) -> corral.ImageRecord:
        entries: dict[str, bytes | tarfile.TarInfo] = dict(files or {})
        if text is not None:
            entries["Dockerfile"] = text.encode()
        return self.context(tar_of(entries), **options)

    def context(self, context: bytes | Path, **options: object) -> corral.ImageRecord:
        self.names.append(f"built-{uuid.uuid4().hex[:12]}")
        self.told = []
        options.setdefault("limits", SMALL)
        return self.client.images.build(
            context,
            self.names[-1],
            on_progress=self.told.append,
            **options,  # type: ignore[arg-type]
        )

    @property
    def ran(self) -> list[str]:
        """The steps that did something."""
        return [line.text for line in self.told if line.event == "step" and not line.cached]

    @property
    def output(self) -> str:
        return "".join(line.text for line in self.told if line.event == "output")


@pytest.fixture
def build(client: corral.Client, bb: str) -> Iterator[Builder]:
    builder = Builder(client)
    yield builder
    known = {image.name for image in client.images.list()}
    for name in builder.names:
        if name in known:
            client.images.delete(name)
    assert not [s.id for s in client.sandboxes.list() if s.status.environment.startswith("build:")], (
        "sandboxes were left"
    )


def text_in(make: Make, image: corral.ImageRecord, command: str) -> str:
    return make(image.name, entrypoint=[]).exec(command, check=True, timeout=30).stdout


def test_a_whole_dockerfile(build: Builder, make: Make) -> None:
    image = build(
        r"""# syntax=docker/dockerfile:1
ARG BASE=bb
FROM ${BASE} AS tools
ARG WHO=nobody
WORKDIR /src
COPY one.txt two.txt ./
COPY dir .
RUN echo "hello $WHO" > made && \
    # a comment within
    cat one.txt two.txt >> made && chown -R agent /src && chmod 600 made
RUN ["/bin/sh", "-c", "echo $0 $HOME > exec-form", "name"]

FROM bb AS unused
RUN exit 1

FROM bb
LABEL kind=test "a b"="c d"
ENV GREETING="good day" PLACE=${PLACE:-here}
COPY --from=tools /src/ /opt/tools/
COPY --from=0 --chown=agent:extra --chmod=0640 /src/made /opt/given
COPY --chown=1000:1000 one.txt /new/deep/
COPY <<name.txt <<'raw' /docs/
$GREETING
name.txt
$GREETING
raw
ADD archive.tar.gz /unpacked/
RUN <<EOF
set -e
rm /bin/suid
rm -r /home/agent
mkdir /home/fresh
EOF
RUN cat > /doc <<EOF
from $PLACE
EOF
EXPOSE 80
USER agent
WORKDIR sub
ENTRYPOINT ["sleep"]
CMD ["1000"]
""",
        {
            "one.txt": b"1\n",
            "two.txt": b"2\n",
            "dir/": b"",
            "dir/inner": b"inner\n",
            "archive.tar.gz": gzip.compress(tar_of({"a/b": b"in the archive\n"}, {"link": "a/b"})),
        },
        build_args={"WHO": "you"},
    )
    assert len(build.ran) == 13, build.ran
    assert [line.text for line in build.told if line.event == "note"] == ["line 37: EXPOSE has no effect here"]
    numbers = [line.number for line in build.told if line.event == "step"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(line.total == len(numbers) for line in build.told if line.event == "step")
    config = image.config
    assert (config.entrypoint, config.cmd) == (("sleep",), ("1000",))
    assert (config.user, config.workdir) == ("agent", "/sub")
    assert config.labels == {"kind": "test", "a b": "c d"}
    assert config.env["GREETING"] == "good day"
    assert config.env["PLACE"] == "here"

    box = make(image.name)
    assert box.status.entrypoint_command_id is not None
    look = box.exec("id -un; pwd; echo $GREETING; stat -c '%u:%g %a %n' /sub", check=True).stdout
    assert look == "agent\n/sub\ngood day\n0:0 755 /sub\n"

    def root(command: str) -> str:
        return box.exec(command, user="root", check=True).stdout

    assert root("cat /opt/tools/made") == "hello you\n1\n2\n"
    assert root("cat /opt/tools/exec-form /opt/tools/inner") == "name /root\ninner\n"
    assert (
        root("stat -c '%u:%g %a %n' /opt/tools/made /opt/given /new /new/deep /new/deep/one.txt")
        == "1000:0 600 /opt/tools/made\n1000:2000 640 /opt/given\n"
        "1000:1000 755 /new\n1000:1000 755 /new/deep\n1000:1000 644 /new/deep/one.txt\n"
    )
    assert root("cat /docs/name.txt /docs/raw /doc") == "good day\n$GREETING\nfrom here\n"
    assert root("cat /unpacked/a/b /unpacked/link; readlink /unpacked/link") == (
        "in the archive\nin the archive\na/b\n"
    )
    assert root("ls /home; [ -e /bin/suid ] || echo gone") == "fresh\ngone\n"
    assert len(image.layers) == 2, "consecutive steps make one layer"


def test_a_second_build_runs_nothing_and_a_changed_file_only_what_follows(build: Builder, make: Make) -> None:
    mark = uuid.uuid4().hex
    text = f"""FROM bb AS first
RUN echo {mark} > /first
COPY a /a
RUN cat /a > /copied; head -c 16 /dev/urandom | md5sum > /when
FROM bb
COPY --from=first /copied /when /
COPY b /b
RUN cat /b > /last
ENV X=1
"""
    files: dict[str, bytes | tarfile.TarInfo] = {"a": b"a1", "b": b"b1"}
    first = build(text, files)
    assert len(build.ran) == 6
    when = text_in(make, first, "cat /when")
    second = build(text, files)
    assert build.ran == []
    assert second.digest == first.digest
    # Other times and owners make no difference; content does.
    info = tarfile.TarInfo("a")
    info.size, info.mtime, info.uid, info.mode = 2, 77, 1234, 0o644
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(info, io.BytesIO(b"a1"))
        for name, data in (("b", b"b1"), ("Dockerfile", text.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    build.context(out.getvalue())
    assert build.ran == []
    third = build(text, files | {"b": b"b2"})
    assert build.ran == ["COPY b /b", "RUN cat /b > /last"]
    assert text_in(make, third, "cat /last /when") == "b2" + when
    build(text, files | {"a": b"a2"})
    assert build.ran[0] == "COPY a /a"
    assert len(build.ran) == 5
    build(text.replace("X=1", "X=2"), files)
    assert build.ran == []
    again = build(text, files, no_cache=True)
    assert len(build.ran) == 6
    assert text_in(make, again, "cat /when") != when


def test_deleted_layers_are_built_again(build: Builder, client: corral.Client, make: Make) -> None:
    mark = uuid.uuid4().hex
    text = f"FROM bb\nRUN echo {mark} > /a\n"
    image = build(text)
    client.images.delete(image.name)
    assert image.layers[-1].digest not in {layer.digest for layer in client.layers.list()}
    again = build(text)
    assert len(build.ran) == 1
    assert text_in(make, again, "cat /a") == mark + "\n"


def test_targets_and_scratch(build: Builder, make: Make) -> None:
    text = """FROM bb AS a
RUN echo a > /which
FROM a AS b
RUN echo b >> /which
FROM scratch AS copy
COPY --from=b / /
FROM a
RUN exit 9
"""
    image = build(text, target="b")
    assert text_in(make, image, "cat /which") == "a\nb\n"
    image = build(text, target="copy")
    assert len(image.layers) == 1
    look = "cat /which; stat -c '%u %a' /home/agent /tmp /bin/suid; ls -d /proc/self /etc/passwd"
    assert text_in(make, image, look) == "a\nb\n1000 755\n0 1777\n0 4755\n/etc/passwd\n/proc/self\n"
    image = build(
        """FROM scratch
COPY --from=bb /bin/busybox /bin/echo /bin/
COPY --from=bb /etc/pass* /users/
RUN ["/bin/busybox", "sh", "-c", "echo from nothing > /made"]
"""
    )
    box = make(image.name)
    assert box.exec(["/bin/busybox", "cat", "/made"], check=True).stdout == "from nothing\n"
    found = box.exec(["/bin/busybox", "find", "/bin", "/users", "-type", "f"], check=True).stdout
    assert found.split() == ["/bin/busybox", "/bin/echo", "/users/passwd"], "links to a source are followed"
    with pytest.raises(corral.InvalidRequest, match='no stage "nope"'):
        build(text, target="nope")


def test_destinations(build: Builder, make: Make) -> None:
    image = build(
        """FROM bb
RUN mkdir -p /there /real && ln -s /real /link && echo old > /there/x && chmod 700 /there
COPY f /there
COPY f /as-file
COPY f /as-dir/
COPY f /link/
COPY d /there
COPY d/* /globbed/
COPY top-link /followed
COPY ["with space", "/sp ace/"]
COPY . /all
""",
        {"f": b"f", "d/": b"", "d/x": b"new", "d/sub/": b"", "d/sub/y": b"y", "with space": b"s"}
        | {"top-link": link("d/x"), "d/inner": link("x")},
    )
    found = text_in(
        make, image, "stat -c '%a %F' /there; cat /as-file /as-dir/f /real/f /there/f /there/x /there/sub/y"
    )
    assert found == "700 directory\nffffnewy"
    found = text_in(
        make, image, "readlink /there/inner; cat /globbed/x /globbed/y /followed '/sp ace/with space' /all/d/x"
    )
    assert found == "x\nnewynewsnew"
    assert text_in(make, image, "ls /globbed; ls -A /all") == ("inner\nx\ny\nDockerfile\nd\nf\ntop-link\nwith space\n")


def link(target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def test_dockerignore(build: Builder, make: Make) -> None:
    files: dict[str, bytes | tarfile.TarInfo] = {
        ".dockerignore": b"# not these\n*.log\n!keep.log\nnode_modules\n**/*.pyc\nDockerfile\n.dockerignore\n",
        "a.log": b"",
        "keep.log": b"",
        "node_modules/": b"",
        "node_modules/deep/": b"",
        "node_modules/deep/x": b"",
        "src/": b"",
        "src/m.py": b"",
        "src/m.pyc": b"",
    }
    image = build("FROM bb\nCOPY . /all\n", files)
    assert text_in(make, image, "cd /all; find . | sort") == ".\n./keep.log\n./src\n./src/m.py\n"
    with pytest.raises(corral.InvalidRequest, match=r'Dockerfile line 2, COPY: source "a.log"'):
        build("FROM bb\nCOPY a.log /\n", files)
    files["other.dockerignore"] = b"src\n"
    files["other"] = b"FROM bb\nCOPY . /all\n"
    image = build(None, files, dockerfile="other")
    assert "src" not in text_in(make, image, "ls -A /all")
    with pytest.raises(corral.InvalidRequest, match=r"\.dockerignore line 1"):
        build("FROM bb\n", {".dockerignore": b"[a\n"})


def test_names_that_are_no_text(build: Builder, make: Make, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    context = tmp_path / "context"
    (context / "d").mkdir(parents=True)
    for name in (odd, f"{odd}.log"):
        (context / "d" / name).write_text("latin")
    (context / ".dockerignore").write_text("d/*.log\n")
    text = (
        "FROM bb AS first\nCOPY d /d\nRUN mv /d/caf* /d/$(printf 'x\\351')\n"
        "FROM bb\nCOPY --from=first /d /e\nCOPY d/caf* /f/\n"
    )
    (context / "Dockerfile").write_text(text)
    look = "[ $(ls /e /f | wc -l) = 5 ] && cat /e/$(printf 'x\\351') /f/$(printf 'caf\\351')"
    for packed in (context, tar_of({f"d/{odd}": b"latin", "Dockerfile": text.encode()})):
        assert text_in(make, build.context(packed), look) == "latinlatin"


def test_a_failing_command_tells_step_status_and_output(build: Builder, client: corral.Client) -> None:
    with pytest.raises(corral.BuildFailed) as failed:
        build("FROM bb\nRUN true\n\nRUN echo out; echo wrong >&2; exit 7\nRUN true\n")
    error = failed.value
    assert (error.number, error.exit_code) == (2, 7)
    assert str(error).startswith("build_failed: Dockerfile line 4, RUN: the command exited with 7")
    assert error.output is not None
    assert {"out", "wrong"} == set(error.output.split())
    assert {"out", "wrong"} == set(build.output.split())
    assert build.names[-1] not in {image.name for image in client.images.list()}
    with pytest.raises(corral.BuildFailed, match="not be started"):
        build('FROM bb\nRUN ["/no/such/program"]\n')
    with pytest.raises(corral.BuildFailed, match="Dockerfile line 3, RUN"):
        build("FROM bb\nUSER nosuchuser\nRUN true\n")
    with pytest.raises(corral.BuildFailed, match='no user "nosuchuser"'):
        build("FROM bb\nCOPY --chown=nosuchuser Dockerfile /\n")
    with pytest.raises(corral.CorralError, match="Dockerfile line 2, WORKDIR: /etc/passwd is no directory"):
        build("FROM bb\nWORKDIR /etc/passwd\n")


@pytest.mark.parametrize(
    ("dockerfile", "kind", "message"),
    [
        ("", "invalid_request", "Dockerfile line 1, Dockerfile: expected at least one FROM"),
        ("FROM bb\nNONSENSE\n", "invalid_request", "Dockerfile line 2, NONSENSE: unknown instruction"),
        ("FROM missing\n", "invalid_request", 'Dockerfile line 1, FROM: there is no image "missing": import it first'),
        ("FROM bb\nCOPY --from=gone /a /b\n", "invalid_request", 'line 2, COPY: there is no image "gone"'),
        ("FROM bb\nCOPY ../x /\n", "invalid_request", "line 2, COPY: source .* leads out of the build context"),
        ("FROM bb\nCOPY --nope a b\n", "invalid_request", "line 2, COPY: it has no flag --nope"),
        ("FROM bb\nCOPY --from=later a b\nFROM bb AS later\n", "invalid_request", "no stage .* before"),
        ("FROM bb\nADD http://host/x /\n", "unsupported", "line 2, ADD: .* would be fetched"),
        ("FROM bb\nONBUILD RUN x\n", "unsupported", "line 2, ONBUILD"),
        ("FROM bb\nRUN --mount=type=cache,target=/c x\n", "unsupported", "line 2, RUN: RUN --mount"),
        ("FROM --platform=linux/arm64 bb\n", "unsupported", "line 1, FROM: platform"),
        ('FROM bb\nENV A="${B:?is needed}"\n', "invalid_request", "line 2, ENV: B: is needed"),
    ],
)
def test_bad_dockerfiles_name_the_line(build: Builder, dockerfile: str, kind: str, message: str) -> None:
    with pytest.raises(corral.CorralError, match=message) as refused:
        build(dockerfile)
    assert refused.value.kind == kind
    assert build.told == [], "nothing ran"


def test_hostile_contexts(build: Builder, server: Server, bb: str) -> None:
    def refused(context: bytes, message: str) -> None:
        with pytest.raises(corral.CorralError, match=message) as error:
            build.context(context)
        assert error.value.status is not None
        assert error.value.status < 500

    dockerfile = {"Dockerfile": b"FROM bb\nCOPY . /all\n"}
    device, pipe = tarfile.TarInfo(), tarfile.TarInfo()
    device.type, pipe.type = tarfile.CHRTYPE, tarfile.FIFOTYPE
    for entry in ({"../up": b""}, {"a/../../up": b""}):
        refused(tar_of({**dockerfile, **entry}), "leads out")
    refused(tar_of({**dockerfile, "out": link("/"), "out/etc/passwd": b"x"}), "no directory")
    refused(tar_of({**dockerfile, "dev": device}), "neither file")
    refused(tar_of({**dockerfile, "pipe": pipe}), "neither file")
    refused(b"this is no archive " * 100, "tar archive")
    refused(tar_of(dockerfile)[:520], "breaks off|tar archive")
    refused(gzip.compress(tar_of(dockerfile))[:-20], "decompressed")
    refused(b"BZh91AY&SY" + bytes(100), "bzip2")
    refused(tar_of({}), "no file")
    refused(tar_of({"Dockerfile": b"FROM bb\xff\n"}), "not UTF-8")
    refused(tar_of({"Dockerfile": b"#" * (2 << 20)}), "larger than")
    # Links that lead out are links in the image, and sources that lead out are not there.
    refused(tar_of({"Dockerfile": b"FROM bb\nCOPY out /x\n", "out": link("/etc/shadow")}), "no such file")
    refused(tar_of({"Dockerfile": b"FROM bb\nCOPY out /x\n", "out": link("../../../etc/shadow")}), "no such file")
    refused(tar_of({"Dockerfile": link("/etc/passwd")}), "no file")
    with pytest.raises(corral.CorralError, match="leads out"):
        build("FROM bb\nADD a.tar /x/\n", {"a.tar": tar_of({"../../evil": b"x"})})
    with pytest.raises(corral.CorralError, match=r"leads out of the directory"):
        build("FROM bb\nADD a.tar /x/\n", {"a.tar": tar_of({"l": link("/etc"), "l/passwd": b"x"})})


def test_parameters(build: Builder, server: Server, client: corral.Client, bb: str) -> None:
    context = tar_of({"Dockerfile": b"FROM bb\n"})
    for query, status, part in [
        ("network=true", 501, "network policies"),
        ("nonsense=1", 400, "no parameter"),
        ("build_arg=x", 400, "NAME=VALUE"),
        ("no_cache=maybe", 400, "true or false"),
        ("memory_mib=1", 400, "memory_mib"),
    ]:
        # A refusal that does not wait for the body ends the connection.
        with server.http() as http:
            answer = http.put(f"/v1/images/x/build?{query}", content=context)
        assert answer.status_code == status, answer.text
        assert part in answer.json()["message"], answer.text
    with server.http() as http:
        assert http.put("/v1/images/sha256:x/build", content=context).status_code == 400
    with server.http() as http:
        answer = http.put("/v1/images/plain-http/build?network=false", content=context)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["event"] for line in lines] == ["imported"]
    client.images.delete("plain-http")
    build("FROM bb\nARG A\n", build_args={"A": "1", "B": "2"})
    assert [line.text for line in build.told if line.event == "note"] == ['build argument "B" is not used']


def test_contexts_may_be_compressed(build: Builder, make: Make) -> None:
    plain = tar_of({"Dockerfile": b"FROM bb\nCOPY f /f\n", "f": b"f"})
    zstd = subprocess.run(["zstd", "-c"], input=plain, capture_output=True, check=True).stdout
    for context in (gzip.compress(plain), zstd):
        assert text_in(make, build.context(context), "cat /f") == "f"


def test_limits_hold_in_steps(build: Builder) -> None:
    small = corral.Limits(memory_mib=64, cpus=1.0, pids=32, disk_mib=64)
    with pytest.raises(corral.BuildFailed) as failed:
        build("FROM bb\nRUN tail /dev/zero\n", limits=small)
    assert failed.value.exit_code != 0
    fork = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sleep 60 & sleep 60 & wait) & done; echo n"
    with pytest.raises(corral.BuildFailed):
        build(f"FROM bb\nRUN {fork}; exit 3\n", limits=small)
    with pytest.raises(corral.CorralError, match="Dockerfile line 2, RUN"):
        build("FROM bb\nRUN dd if=/dev/zero of=/big bs=1M count=200\n", limits=small)
    big = tarfile.TarInfo()
    big.size = 100 << 20
    with pytest.raises(corral.DiskFull, match="Dockerfile line 2, COPY"):
        build("FROM bb\nCOPY big /\n", {"big": big}, limits=small)


def test_a_client_that_hangs_up_leaves_nothing(server: Server, client: corral.Client, bb: str) -> None:
    context = tar_of({"Dockerfile": b"FROM bb\nRUN echo begun; sleep 1000\n"})
    before = sandbox_cgroups(server.node_id)
    with (
        server.http() as http,
        http.stream("PUT", "/v1/images/cancelled/build?memory_mib=64", content=context) as answer,
    ):
        # Held on to: the connection is closed with the iterator.
        lines = answer.iter_lines()
        for line in lines:
            if "begun" in json.loads(line).get("text", "") and json.loads(line)["event"] == "output":
                break
        until(lambda: len(sandbox_cgroups(server.node_id) - before) == 1, 10, "the build has one sandbox")
    until(lambda: sandbox_cgroups(server.node_id) <= before, 30, "the build's sandbox is removed")
    assert "cancelled" not in {image.name for image in client.images.list()}


def test_builds_at_once(build: Builder, client: corral.Client, server: Server) -> None:
    results: dict[int, corral.ImageRecord | BaseException] = {}

    def one(number: int) -> None:
        builder = Builder(client)
        try:
            text = f"FROM bb\nRUN echo {number} > /n && sleep 0.2\nCOPY Dockerfile /\nRUN cat /n\n"
            results[number] = builder(text)
            assert f"{number}\n" in builder.output
            build.names.extend(builder.names)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, corral.ImageRecord) for result in results.values()), results
    assert len({result.digest for result in results.values() if isinstance(result, corral.ImageRecord)}) == 4


def test_debian(build: Builder, make: Make, debian: str) -> None:
    image = build(
        """FROM debian AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY app.py .
RUN python3 -m compileall -q app.py && [[ -d __pycache__ ]]
RUN <<EOF
#!/usr/bin/env python3
import pathlib
pathlib.Path("/src/made.txt").write_text("by python")
EOF
FROM debian
COPY --from=build /src /app
RUN useradd -m worker && rm -rf /usr/share/doc
USER worker
ENTRYPOINT ["python3", "/app/app.py"]
""",
        {"app.py": b"print(open('/app/made.txt').read(), flush=True)\nimport time; time.sleep(60)\n"},
        limits=corral.Limits(memory_mib=512, cpus=1.0, pids=64, disk_mib=256),
    )
    box = make(image.name, limits=corral.Limits(memory_mib=256, cpus=1.0, pids=64, disk_mib=128))
    assert box.exec("id -un; ls -d /usr/share/doc 2>&1 | grep -c 'No such'", check=True).stdout == "worker\n1\n"
    assert box.status.entrypoint_command_id is not None
    command = box.command(box.status.entrypoint_command_id)
    until(lambda: b"by python" in command.output(), 20, "the entry point wrote")


def test_the_command_line(server: Server, client: corral.Client, bb: str, tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile").write_text("FROM bb AS one\nARG A\nRUN echo $A > /a\nFROM one\nRUN exit 5\n")
    (tmp_path / ".dockerignore").write_text("docker\n")
    words = ["-t", "cli-built", "-f", str(tmp_path / "docker" / "Dockerfile"), "--build-arg", "A=1"]
    done = server.cli("image", "build", *words, "--target", "one", "--memory-mib", "64", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"cli-built sha256:")
    assert b"[2/2] RUN echo $A > /a" in done.stderr
    done = server.cli("--json", "image", "build", *words, str(tmp_path))
    assert done.returncode != 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["cached"] is True
    assert lines[1]["cached"] is True
    assert (lines[-1]["event"], lines[-1]["exit_code"], lines[-1]["number"]) == ("failed", 5, 3)
    done = server.cli("image", "build", "-t", "cli-built", "-", stdin=tar_of({"Dockerfile": b"FROM bb\nCMD x\n"}))
    assert done.returncode == 0, done.stderr
    assert client.images.get("cli-built").config.cmd == ("/bin/sh", "-c", "x")
    client.images.delete("cli-built")


def test_a_build_that_is_cut_off_is_swept_up(tmp_path: Path) -> None:
    from support import with_busybox

    made = Server()
    with with_busybox(made, tmp_path) as client:
        context = tar_of({"Dockerfile": b"FROM bb\nRUN echo begun; sleep 1000\n"})
        with made.http() as http, http.stream("PUT", "/v1/images/x/build?memory_mib=64", content=context) as answer:
            # Held on to: the connection is closed with the iterator.
            lines = answer.iter_lines()
            for line in lines:
                assert json.loads(line)["event"] != "failed", line
                if json.loads(line)["event"] == "output":
                    break
            until(lambda: len(sandbox_cgroups(made.node_id)) == 1, 10, "the build has one sandbox")
            made.kill()
        made.start()
        until(lambda: not sandbox_cgroups(made.node_id), 30, "the sandbox is removed")
        assert client.images.get("bb")
    assert PROGRAM.exists()
