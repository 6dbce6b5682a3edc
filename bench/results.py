"""What the bench found: `bench/results.jsonl` and the table in the README that is made from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


@dataclass(frozen=True)
class Figure:
    """A figure that is promised: what it is, and what it must be."""

    id: str
    what: str
    unit: str
    better: str
    target: float

    def holds(self, value: float) -> bool:
        """Whether a value keeps the promise."""
        return value >= self.target if self.better == "higher" else value <= self.target


FIGURES = [
    Figure(
        "create_rate_vs_barelaunch", "creates at 32 in flight, of what the bare kernel does", "ratio", "higher", 0.40
    ),
    Figure("create_rate_vs_docker", "creates, against Docker at its best", "ratio", "higher", 40),
    Figure("create_p50_ms", "create, one at a time", "ms", "lower", 10),
    Figure("first_command_p50_ms", "create and first command, one at a time", "ms", "lower", 15),
    Figure("exec_true_p50_ms", "`exec true`, one at a time", "ms", "lower", 3),
    Figure("exec_vs_docker", "`exec true`, against `docker exec`", "ratio", "higher", 15),
    Figure("execs_per_s", "commands over 200 sandboxes at 32 in flight", "1/s", "higher", 600),
    Figure("live_3200_kib_each", "host memory of each of 3,200 live sandboxes", "KiB", "lower", 700),
    Figure("live_3200_create_s", "creating 3,200", "s", "lower", 25),
    Figure("live_3200_remove_s", "removing 3,200", "s", "lower", 15),
    Figure("live_max", "sandboxes live at once, of 8,000 tried", "sandboxes", "higher", 3200),
    Figure("pack_diff_ms", "snapshot of 2,000 files of 55 MB, without upload", "ms", "lower", 250),
    Figure("fork_first_command_p50_ms", "fork of that sandbox and first command in it", "ms", "lower", 30),
    Figure("rollback_p50_ms", "rollback of that sandbox to a checkpoint", "ms", "lower", 30),
    Figure("warm_seq_vs_erofs", "layer read front to back, against a plain EROFS mount", "ratio", "higher", 0.95),
    Figure("warm_random_vs_erofs", "the same, 16 KiB anywhere", "ratio", "higher", 0.95),
    Figure(
        "lazy_warm_vs_erofs", "front to back through the server of lazy reads, fetched before", "ratio", "higher", 0.5
    ),
    Figure(
        "dedupe_second_image_ratio",
        "what a second image on a base stores of files that were there",
        "ratio",
        "lower",
        0.35,
    ),
    Figure("lazy_vs_pull_time", "burst of 60 over 20 images, lazily against pulled whole", "ratio", "higher", 1.5),
    Figure("lazy_vs_docker_time", "the same, against `docker load` and `docker run`", "ratio", "higher", 3),
    Figure("lazy_vs_docker_writes", "bytes written to the disk, against these", "ratio", "higher", 10),
    # DSec's tasks read 4.2 to 13.3 % of their images.
    Figure("fraction_read_python", "of the bytes of Python images, fetched", "ratio", "lower", 0.2),
    Figure("fraction_read_node", "of Node's", "ratio", "lower", 0.2),
    Figure("fraction_read_go", "of Go's", "ratio", "lower", 0.2),
    Figure("fraction_read_java", "of Java's", "ratio", "lower", 0.2),
    Figure("fraction_read_cpp", "of those of C++", "ratio", "lower", 0.2),
]


@dataclass
class Found:
    """One measured figure."""

    value: float
    samples: list[float]
    baseline_samples: list[float] = field(default_factory=list)
    note: str = ""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The lines by id; none where there is no file."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["id"]: row for row in rows}


def write(path: Path, found: dict[str, Found], commit: str, machine: str) -> dict[str, dict[str, Any]]:
    """Puts new figures in the place of their old lines; the other lines stay."""
    rows = read(path)
    for figure in FIGURES:
        if figure.id not in found:
            continue
        it = found[figure.id]
        row: dict[str, Any] = {
            "id": figure.id,
            "value": _round(it.value),
            "unit": figure.unit,
            "target": figure.target,
            "better": figure.better,
            "commit": commit,
            "machine": machine,
            "samples": [_round(s) for s in it.samples],
        }
        if it.baseline_samples:
            row["baseline_samples"] = [_round(s) for s in it.baseline_samples]
        if it.note:
            row["note"] = it.note
        rows[figure.id] = row
    order = {figure.id: at for at, figure in enumerate(FIGURES)}
    lines = [json.dumps(rows[key]) for key in sorted(rows, key=lambda k: (order.get(k, len(order)), k))]
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(path)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = ["| figure | measured | promised | |", "|---|---|---|---|"]
    for figure in FIGURES:
        row = rows.get(figure.id)
        sign = "≥" if figure.better == "higher" else "≤"
        promised = f"{sign} {_number(figure.target)}"
        measured, mark = ("not measured yet", "") if row is None else _measured(figure, row)
        lines.append(f"| {figure.what} (`{figure.id}`) | {measured} | {promised} | {mark} |")
    return "\n".join(lines) + "\n"


def _measured(figure: Figure, row: dict[str, Any]) -> tuple[str, str]:
    unit = {"ratio": "×", "sandboxes": ""}.get(figure.unit, f" {figure.unit}")
    return f"{_number(row['value'])}{unit}", "holds" if figure.holds(row["value"]) else "**missed**"


def update_readme(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Puts the table between its markers."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{path} has no {BEGIN} … {END}")
    machines = sorted({f"{row['machine']}, commit {row['commit']}" for row in rows.values()})
    where = f"\nMeasured on {'; '.join(machines)}.\n" if machines else ""
    path.write_text(f"{before}{BEGIN}\n{table(rows)}{where}{END}{after}")


def _round(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1000 else round(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
