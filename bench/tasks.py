"""The images of the burst: what is in each, and the small real task that a sandbox runs in it.

An image is a Debian base that all share, its stack's layer that four share, and a layer of its own, as images have that
are built from Dockerfiles. A task imports, compiles or runs something of it, as short as such work is, and ends with 0
only when that went well: what is compiled for Go and Java is not run.
"""

from __future__ import annotations

from dataclasses import dataclass

SUITE = "bookworm"
BASE = ("ca-certificates", "curl", "git", "procps")
STACKS = {
    "python": (
        "build-essential",
        "python3",
        "python3-dev",
        "python3-numpy",
        "python3-pip",
        "python3-pytest",
        "python3-venv",
    ),
    "node": ("g++", "make", "nodejs", "npm"),
    "go": ("gcc", "golang-go", "libc6-dev", "make", "pkg-config"),
    "java": ("openjdk-17-jdk-headless",),
    "cpp": ("cmake", "g++", "gdb", "make", "ninja-build", "pkg-config"),
}


@dataclass(frozen=True)
class Image:
    """One image and its task."""

    name: str
    packages: tuple[str, ...]
    script: str

    @property
    def stack(self) -> str:
        """Whose layer it stands on."""
        return self.name.partition("-")[0]

    @property
    def task(self) -> list[str]:
        """The command that runs the task."""
        return ["sh", "-euc", f"mkdir /tmp/task; cd /tmp/task; export HOME=/tmp/task\n{self.script}"]


def _write(name: str, text: str) -> str:
    return f"cat > {name} <<'END'\n{text.strip()}\nEND\n"


def _python(text: str) -> str:
    return _write("task.py", text) + "python3 task.py"


def _node(text: str) -> str:
    return _write("task.js", text) + "NODE_PATH=/usr/share/nodejs node task.js"


def _go(package: str) -> str:
    """Compiles a package and what it imports."""
    settings = "export GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE=/tmp/task/cache GOFLAGS=-p=2\n"
    return f"{settings}go build -o task.a {package}\ntest -s task.a"


def _java(text: str, jars: str) -> str:
    """Compiles a class against libraries that must be there."""
    there = f'for jar in $(echo {jars} | tr : " "); do test -e $jar; done\n'
    return _write("Task.java", text) + there + f"{JAVAC} -cp {jars} Task.java\ntest -s Task.class"


def _cpp(text: str, compiler: str = "g++", flags: str = "") -> str:
    return _write("task.cpp", text) + f"{compiler} -o task task.cpp {flags}\n./task"


JARS = "/usr/share/java"
# Set as is usual for programs that end soon.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
JAVAC = "javac -proc:none " + " ".join(f"-J{option}" for option in QUICK.split())

IMAGES = [
    Image(
        "python-scipy",
        ("python3-matplotlib", "python3-scipy"),
        _python("""
import numpy as np
from scipy import linalg

a = np.random.default_rng(1).random((60, 60)) + 60 * np.eye(60)
assert np.allclose(a @ linalg.solve(a, np.ones(60)), 1)
"""),
    ),
    Image(
        "python-pandas",
        ("python3-openpyxl", "python3-pandas"),
        _python("""
import pandas as pd

frame = pd.DataFrame({"k": [n % 7 for n in range(1000)], "v": range(1000)})
sums = frame.groupby("k").v.sum()
assert sums.sum() == 499500 and len(sums) == 7
"""),
    ),
    Image(
        "python-sklearn",
        ("python3-seaborn", "python3-sklearn"),
        _python("""
from sklearn.linear_model import LinearRegression

assert abs(LinearRegression().fit([[1], [2], [3]], [2, 4, 6]).predict([[21]])[0] - 42) < 1e-9
"""),
    ),
    Image(
        "python-web",
        ("python3-django", "python3-flask", "python3-requests", "python3-sqlalchemy", "python3-sympy"),
        _write(
            "test_task.py",
            """
import flask

def test_route():
    app = flask.Flask("t")
    app.route("/x")(lambda: {"answer": 42})
    assert app.test_client().get("/x").json == {"answer": 42}
""",
        )
        + "python3 -m pytest -q -p no:cacheprovider test_task.py",
    ),
    Image(
        "node-typescript",
        ("node-typescript",),
        _node("""
const ts = require('typescript');
const made = ts.transpileModule('const xs: number[] = [1, 2, 3]; xs.map(x => x * 2)[2];', {});
if (eval(made.outputText) !== 6) throw new Error('wrong');
"""),
    ),
    Image(
        "node-webpack",
        ("rollup", "webpack"),
        _write("part.mjs", "export default n => n * 7;")
        + _write("task.mjs", "import times from './part.mjs';\nif (times(6) !== 42) throw new Error('wrong');")
        + "rollup --silent --format=cjs --file=made.js task.mjs\nnode made.js",
    ),
    Image(
        "node-eslint",
        ("eslint", "node-jsdom"),
        _write("task.js", "var unused = 1;\nfoo();")
        + "! eslint --no-eslintrc --rule '{\"no-undef\": 2}' task.js > out\ngrep -q no-undef out",
    ),
    Image(
        "node-express",
        ("mocha", "node-express", "node-lodash"),
        _node("""
const express = require('express'), http = require('http'), _ = require('lodash'), assert = require('assert');
const app = express();
app.get('/', (q, r) => r.json(_.chunk([1, 2, 3, 4], 2)));
const server = http.createServer(app).listen(0, '127.0.0.1', () =>
  http.get({host: '127.0.0.1', port: server.address().port}, r => r.on('data', d => {
    assert.equal(String(d), '[[1,2],[3,4]]');
    server.close();
  })));
"""),
    ),
    Image(
        "go-cobra",
        ("golang-github-spf13-cobra-dev", "golang-github-spf13-viper-dev"),
        _go("golang.org/x/text/transform"),
    ),
    Image(
        "go-testify",
        ("golang-github-google-go-cmp-dev", "golang-github-stretchr-testify-dev", "golang-google-protobuf-dev"),
        _go("github.com/pmezard/go-difflib/difflib"),
    ),
    Image(
        "go-net",
        ("golang-golang-x-crypto-dev", "golang-golang-x-net-dev", "golang-golang-x-tools-dev"),
        _go("golang.org/x/crypto/blake2s"),
    ),
    Image(
        "go-yaml",
        ("golang-github-gorilla-mux-dev", "golang-github-prometheus-client-golang-dev", "golang-gopkg-yaml.v3-dev"),
        _go("github.com/cespare/xxhash"),
    ),
    Image(
        "java-maven",
        ("libcommons-lang3-java", "maven"),
        _java(
            """
class Task {
    String answer() {
        return org.apache.commons.lang3.StringUtils.reverse("24");
    }
}
""",
            f"{JARS}/commons-lang3.jar",
        ),
    ),
    Image(
        "java-junit",
        ("junit4", "libassertj-core-java", "libmockito-java"),
        _java(
            """
public class Task {
    @org.junit.Test
    public void sum() {
        org.junit.Assert.assertEquals(42, 20 + 22);
    }
}
""",
            f"{JARS}/junit4.jar:{JARS}/hamcrest-core.jar",
        ),
    ),
    Image(
        "java-ant",
        ("ant", "ivy", "groovy"),
        f"export ANT_OPTS='{QUICK}'\n"
        + _write(
            "build.xml",
            """
<project default="test">
  <target name="test">
    <echo file="made" message="42"/>
    <condition property="made"><available file="made"/></condition>
    <fail unless="made"/>
  </target>
</project>
""",
        )
        + "ant -q\ngrep -qx 42 made",
    ),
    Image(
        "java-jackson",
        ("libguava-java", "libhibernate-validator-java", "libjackson2-databind-java", "libspring-core-java"),
        _java(
            """
class Task {
    Object answer() throws Exception {
        return new com.fasterxml.jackson.databind.ObjectMapper().readTree("[42]");
    }
}
""",
            f"{JARS}/jackson-core.jar:{JARS}/jackson-databind.jar:{JARS}/jackson-annotations.jar",
        ),
    ),
    Image(
        "cpp-boost",
        ("libboost-all-dev",),
        _cpp("""
#include <boost/array.hpp>

int main() {
    boost::array<int, 2> parts = {{40, 2}};
    return parts[0] + parts[1] == 42 ? 0 : 1;
}
"""),
    ),
    Image(
        "cpp-eigen",
        ("libeigen3-dev", "libfftw3-dev", "libgsl-dev", "libopenblas-dev"),
        _cpp(
            """
#include <fftw3.h>
#include <gsl/gsl_math.h>

int main() {
    fftw_cleanup();
    return gsl_pow_2(6) == 36 ? 0 : 1;
}
""",
            flags="-lfftw3 -lgsl -lgslcblas -lm",
        ),
    ),
    Image(
        "cpp-clang",
        ("clang", "clang-tidy", "lld"),
        _cpp(
            """
#include <algorithm>
#include <vector>

int main() {
    std::vector<int> v{42, 3, 1};
    std::sort(v.begin(), v.end());
    return v.back() == 42 ? 0 : 1;
}
""",
            "clang++",
            "-fuse-ld=lld",
        ),
    ),
    Image(
        "cpp-qt",
        ("libgtest-dev", "libqt5svg5-dev", "qtbase5-dev"),
        _cpp(
            """
#include <QPoint>

int main() {
    return (QPoint(40, 1) + QPoint(2, 1)).x() == 42 ? 0 : 1;
}
""",
            flags="-fPIC $(pkg-config --cflags --libs Qt5Core)",
        ),
    ),
]
