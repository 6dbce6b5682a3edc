"""A sandbox, a command, a file. Usage: quickstart.py [ENVIRONMENT]."""

import sys

import corral


def main(environment: str) -> None:
    with corral.Client() as client, client.sandboxes.create(environment, max_ttl=600) as sandbox:
        print("sandbox", sandbox.id)
        result = sandbox.exec("uname -n; id -u; nproc", timeout=10)
        print(result.stdout, end="")
        sandbox.files.write("/tmp/greeting", "hello from outside\n")
        print(sandbox.exec(["cat", "/tmp/greeting"], check=True).stdout, end="")
        late = sandbox.exec("sleep 60", timeout=0.5)
        print("exit code", late.exit_code, "timed out:", late.timed_out)
        stats = sandbox.stats()
        print(f"{stats.memory_peak_bytes >> 10} KiB of memory at most, {stats.cpu_ms} ms of CPU")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "python")
