"""Run by torchrun in each of two processes: what `World` does between them.

Each process tells what it found.
"""

from __future__ import annotations

from torchrun import tell

from agenttrain.launch.worker import leave
from agenttrain.training.world import PeerFailed, World, WorldTimeout
from agenttrain.utils.exit_codes import DONE


def main() -> None:
    """Every method once, then a meeting to which rank 1 does not come."""
    world = World.start(timeout_s=60)
    found = {
        "gather": world.gather([f"{world.rank}a", f"{world.rank}b"][: world.rank + 1]),
        "to_main": world.to_main([world.rank]),
        "broadcast": world.broadcast({"from": world.rank}),
        "sum": world.sum(0.1 + world.rank),
        "max": world.max(float(world.rank)),
        "is_main": world.is_main,
    }
    second = World(timeout_s=60)
    found["second"] = second.gather([world.rank])
    found["exchange"] = world.exchange([world.rank], "the end of the rollouts", patient=True)
    failure = ValueError("no") if world.rank else None
    try:
        with world.together("the checkpoint", ValueError, patient=True):
            if failure:
                raise failure
    except (ValueError, PeerFailed) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    world.barrier("the end of the rollouts")
    if world.is_main:
        try:
            world.barrier("the update", timeout_s=1)
        except WorldTimeout as error:
            found["late"], found["missing"] = str(error), list(error.missing)
        world.timeout_s = 1
        try:
            with world.collective("the update of step 3"):
                pass
        except WorldTimeout as error:
            found["phase"], found["absent"] = str(error), list(error.missing)
    found["looks"] = world.progress
    tell(world.rank, found)
    # Rank 1 leaves the other meeting only now, so that the store outlives it.
    second.barrier("the last word")


if __name__ == "__main__":
    main()
    leave(DONE)
