"""Many sandboxes at once from one asyncio process. Usage: burst.py [ENVIRONMENT [COUNT]]."""

import asyncio
import sys
import time

import corral


async def one(client: corral.AsyncClient, environment: str, number: int) -> str:
    limits = corral.Limits(memory_mib=64, pids=32, disk_mib=64)
    async with await client.sandboxes.create(environment, limits=limits, max_ttl=600) as sandbox:
        result = await sandbox.exec(["echo", f"number {number}"], timeout=60, check=True)
        return result.stdout.strip()


async def main(environment: str, count: int) -> None:
    async with corral.AsyncClient() as client:
        began = time.perf_counter()
        results = await asyncio.gather(*(one(client, environment, n) for n in range(count)), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    print(f"{count - len(failed)} of {count} sandboxes in {time.perf_counter() - began:.1f} s")
    for error in failed[:5]:
        print("failed:", error)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "python", int(sys.argv[2]) if len(sys.argv) > 2 else 100))
