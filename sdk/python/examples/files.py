"""Files and directories, in and out. Usage: files.py [ENVIRONMENT]."""

import sys
import tempfile
from pathlib import Path

import corral


def main(environment: str) -> None:
    with (
        tempfile.TemporaryDirectory() as local,
        corral.Client() as client,
        client.sandboxes.create(environment, max_ttl=600) as sandbox,
    ):
        project = Path(local, "project")
        (project / "src").mkdir(parents=True)
        (project / "src" / "main.sh").write_text("#!/bin/sh\necho built > ../result\n")
        (project / "src" / "main.sh").chmod(0o755)

        files = sandbox.files
        files.upload_dir(project, "/tmp/work")
        sandbox.exec("./main.sh", cwd="/tmp/work/src", check=True)
        print("result:", files.read("/tmp/work/result").strip())
        for entry in files.list("/tmp/work", depth=3):
            print(f"{entry.mode:04o} {entry.size_bytes:6} {entry.path}")
        left_out = files.download_dir("/tmp/work", Path(local, "copy"))
        print("copied", sorted(p.name for p in Path(local, "copy").rglob("*")), "left out", left_out)
        print("first bytes:", files.read_bytes("/tmp/work/src/main.sh", length=9))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "python")
