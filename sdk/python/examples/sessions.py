"""A shell that remembers, and steps that never run twice. Usage: sessions.py [ENVIRONMENT]."""

import sys

import corral


def main(environment: str) -> None:
    with corral.Client() as client, client.sandboxes.create(environment, max_ttl=600) as sandbox:
        with sandbox.session() as shell:
            shell.run("cd /tmp; export GREETING=hello; greet() { echo $GREETING from $PWD; }")
            print(shell.run("greet", check=True).stdout, end="")
            print("exit code", shell.run("false").exit_code)
        for _ in range(3):
            step = sandbox.exec("echo ran >> /tmp/log; wc -l < /tmp/log", step_key="step-1")
            print("lines in the log:", step.stdout.strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "python")
