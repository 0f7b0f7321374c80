"""A process that keeps containers busy until it is killed: ``container_process.py <count>``."""

from __future__ import annotations

import asyncio
import sys

from container_kit import machines, task


async def work(count: int) -> None:
    pool = machines(max_running=count, memory_mb=32)

    async def rollout(number: int) -> None:
        turn = 0
        while True:
            name, turn = f"r-{number}-{turn}", turn + 1
            machine = await pool.start(name, task())
            print("started", flush=True)
            for _ in range(20):
                # One that would outlive its shell, if the kernel did not end it with the container.
                await machine.exec(["sh", "-c", "sleep 100 & sleep 0.2"], timeout_s=30.0)
            await pool.release(name)

    await asyncio.gather(*(rollout(number) for number in range(count)))


if __name__ == "__main__":
    asyncio.run(work(int(sys.argv[1])))
