"""Output as it comes, and input to a running command. Usage: streaming.py [ENVIRONMENT]."""

import sys

import corral


def main(environment: str) -> None:
    with corral.Client() as client, client.sandboxes.create(environment, max_ttl=600) as sandbox:
        counter = sandbox.start("for n in 1 2 3; do echo line $n; echo note $n >&2; sleep 0.3; done; exit 7")
        for chunk in counter.stream():
            print(f"{chunk.stream} at {chunk.offset}: {chunk.text!r}")
        print("exit code", counter.result().exit_code)

        cat = sandbox.start(["cat"], open_stdin=True, timeout=30)
        cat.write_stdin("to and ")
        cat.write_stdin("fro", close=True)
        print(cat.result(check=True).stdout)

        with sandbox.pty(["/bin/sh"], cols=100, rows=30) as terminal:
            terminal.send("stty size; exit\n")
            print(b"".join(terminal).decode().replace("\r\n", " | "))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "python")
