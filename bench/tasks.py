"""The images of the burst: what is in each, and the small real task that a sandbox runs in it.

An image is a Debian base that all share, its stack's layer that four share, and a layer of its own, as images have that
are built from Dockerfiles. A task ends with 0 only when what it made is right.
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
    return _write("test_task.py", text) + "python3 -m pytest -q -p no:cacheprovider test_task.py"


def _go(*, name: str, text: str, command: str) -> str:
    settings = "export GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE=/tmp/task/cache GOFLAGS=-p=2\n"
    return settings + _write(name, text) + command


def _java(text: str, jars: str, run: str = "Task") -> str:
    there = f'for jar in $(echo {jars} | tr : " "); do test -e $jar; done\n'
    return (
        QUICK_JAVA
        + _write("Task.java", text)
        + there
        + f"javac -cp {jars} Task.java\njava -cp .:{jars} {run} | tee out\n"
    )


def _cpp(text: str, compiler: str = "g++", flags: str = "") -> str:
    return _write("task.cpp", text) + f"{compiler} -o task task.cpp {flags}\n./task"


JARS = "/usr/share/java"
# What is set for programs that end soon.
QUICK_JAVA = "export JAVA_TOOL_OPTIONS='-XX:TieredStopAtLevel=1 -XX:+UseSerialGC'\n"

IMAGES = [
    Image(
        "python-scipy",
        ("python3-matplotlib", "python3-scipy"),
        _python("""
import numpy as np
from scipy import linalg, optimize

def test_solve():
    a = np.random.default_rng(1).random((60, 60)) + 60 * np.eye(60)
    assert np.allclose(a @ linalg.solve(a, np.ones(60)), 1)

def test_root():
    assert abs(optimize.brentq(lambda x: x**3 - 2, 0, 2) - 2 ** (1 / 3)) < 1e-9
"""),
    ),
    Image(
        "python-pandas",
        ("python3-openpyxl", "python3-pandas"),
        _python("""
import pandas as pd

def test_groups(tmp_path):
    frame = pd.DataFrame({"k": [n % 7 for n in range(1000)], "v": range(1000)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    sums = pd.read_csv(tmp_path / "t.csv").groupby("k").v.sum()
    assert sums.sum() == 499500 and len(sums) == 7
"""),
    ),
    Image(
        "python-sklearn",
        ("python3-seaborn", "python3-sklearn"),
        _python("""
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

def test_fit():
    data = load_iris()
    assert LogisticRegression(max_iter=300).fit(data.data, data.target).score(data.data, data.target) > 0.95
"""),
    ),
    Image(
        "python-web",
        ("python3-django", "python3-flask", "python3-requests", "python3-sqlalchemy", "python3-sympy"),
        _python("""
import flask
import sqlalchemy as sa

def test_route():
    app = flask.Flask("t")
    app.route("/x")(lambda: {"answer": 42})
    assert app.test_client().get("/x").json == {"answer": 42}

def test_query():
    with sa.create_engine("sqlite://").connect() as c:
        assert c.execute(sa.text("select 6 * 7")).scalar() == 42
"""),
    ),
    Image(
        "node-typescript",
        ("node-typescript",),
        _write("task.ts", "const xs: number[] = [1, 2, 3];\nif (xs.map(x => x * 2)[2] !== 6) throw new Error('wrong');")
        + "tsc --lib es2015 task.ts\nnode task.js",
    ),
    Image(
        "node-webpack",
        ("rollup", "webpack"),
        _write("part.js", "module.exports = n => n * 7;")
        + _write("task.js", "if (require('./part')(6) !== 42) throw new Error('wrong');")
        + "webpack --mode production --entry ./task.js --output-path /tmp/task/dist\nnode dist/main.js",
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
        _write(
            "test.js",
            """
const express = require('express'), http = require('http'), _ = require('lodash'), assert = require('assert');
it('answers', done => {
  const app = express();
  app.get('/', (q, r) => r.json(_.chunk([1, 2, 3, 4], 2)));
  const server = http.createServer(app).listen(0, '127.0.0.1', () =>
    http.get({host: '127.0.0.1', port: server.address().port}, r => r.on('data', d => {
      assert.equal(String(d), '[[1,2],[3,4]]');
      server.close(done);
    })));
});
""",
        )
        + "NODE_PATH=/usr/share/nodejs mocha --exit test.js",
    ),
    Image(
        "go-cobra",
        ("golang-github-spf13-cobra-dev", "golang-github-spf13-viper-dev"),
        _go(
            name="main.go",
            text="""
package main

import "github.com/spf13/pflag"

func main() {
	n := pflag.Int("n", 1, "a number")
	pflag.Parse()
	if *n != 42 {
		panic("wrong")
	}
}
""",
            command="go build -o task main.go\n./task --n 42",
        ),
    ),
    Image(
        "go-testify",
        ("golang-github-google-go-cmp-dev", "golang-github-stretchr-testify-dev", "golang-google-protobuf-dev"),
        _go(
            name="task_test.go",
            text="""
package task

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDiff(t *testing.T) {
	if cmp.Diff([]int{1, 2}, []int{1, 3}) == "" || !cmp.Equal(map[string]int{"a": 1}, map[string]int{"a": 1}) {
		t.Fatal("wrong")
	}
}
""",
            command="go test task_test.go",
        ),
    ),
    Image(
        "go-net",
        ("golang-golang-x-crypto-dev", "golang-golang-x-net-dev", "golang-golang-x-tools-dev"),
        _go(
            name="main.go",
            text="""
package main

import (
	"strings"

	"golang.org/x/net/html"
)

func main() {
	node, err := html.Parse(strings.NewReader("<p>x</p>"))
	if err != nil || node.FirstChild.Data != "html" {
		panic("wrong")
	}
}
""",
            command="go vet main.go",
        ),
    ),
    Image(
        "go-yaml",
        ("golang-github-gorilla-mux-dev", "golang-github-prometheus-client-golang-dev", "golang-gopkg-yaml.v3-dev"),
        _go(
            name="main.go",
            text="""
package main

import "gopkg.in/yaml.v3"

func main() {
	got := map[string][]int{}
	if err := yaml.Unmarshal([]byte("a: [1, 2, 3]"), &got); err != nil || len(got["a"]) != 3 {
		panic("wrong")
	}
}
""",
            command="go build -o task main.go\n./task",
        ),
    ),
    Image(
        "java-maven",
        ("libcommons-lang3-java", "maven"),
        _java(
            """
import org.apache.commons.lang3.StringUtils;

public class Task {
    public static void main(String[] arguments) {
        System.out.println(StringUtils.reverse("24"));
    }
}
""",
            f"{JARS}/commons-lang3.jar",
        )
        + "grep -qx 42 out",
    ),
    Image(
        "java-junit",
        ("junit4", "libassertj-core-java", "libmockito-java"),
        _java(
            """
import static org.junit.Assert.assertEquals;

public class Task {
    @org.junit.Test
    public void sum() {
        assertEquals(42, java.util.stream.IntStream.of(20, 22).sum());
    }
}
""",
            f"{JARS}/junit4.jar:{JARS}/hamcrest-core.jar",
            "org.junit.runner.JUnitCore Task",
        )
        + "grep -q 'OK (1 test)' out",
    ),
    Image(
        "java-ant",
        ("ant", "ivy", "groovy"),
        QUICK_JAVA
        + _write(
            "build.xml",
            """
<project default="compile">
  <target name="compile"><javac srcdir="." includeantruntime="false"/></target>
</project>
""",
        )
        + _write("Task.java", "class Task { public static void main(String[] a) { System.out.println(6 * 7); } }")
        + "ant -q\njava -cp . Task | grep -qx 42",
    ),
    Image(
        "java-jackson",
        ("libguava-java", "libhibernate-validator-java", "libjackson2-databind-java", "libspring-core-java"),
        _java(
            """
import com.fasterxml.jackson.databind.ObjectMapper;

public class Task {
    public static void main(String[] arguments) throws Exception {
        System.out.println(new ObjectMapper().readTree("{\\"a\\": [40, 2]}").get("a").get(0).asInt() + 2);
    }
}
""",
            f"{JARS}/jackson-core.jar:{JARS}/jackson-databind.jar:{JARS}/jackson-annotations.jar",
        )
        + "grep -qx 42 out",
    ),
    Image(
        "cpp-boost",
        ("libboost-all-dev",),
        _cpp("""
#include <boost/algorithm/string.hpp>
#include <boost/lexical_cast.hpp>
#include <vector>

int main() {
    std::vector<std::string> parts;
    boost::split(parts, "40,2", boost::is_any_of(","));
    return boost::lexical_cast<int>(parts[0]) + boost::lexical_cast<int>(parts[1]) == 42 ? 0 : 1;
}
"""),
    ),
    Image(
        "cpp-eigen",
        ("libeigen3-dev", "libfftw3-dev", "libgsl-dev", "libopenblas-dev"),
        _cpp(
            """
#include <Eigen/Core>

int main() {
    Eigen::Matrix3d m = Eigen::Matrix3d::Identity() * 14;
    return m.trace() == 42 ? 0 : 1;
}
""",
            flags="-I/usr/include/eigen3",
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
#include <QString>
#include <QStringList>

int main() {
    return QString("40,2").split(",").first().toInt() + 2 == 42 ? 0 : 1;
}
""",
            flags="-fPIC $(pkg-config --cflags --libs Qt5Core)",
        ),
    ),
]
