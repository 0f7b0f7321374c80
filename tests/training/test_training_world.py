"""What crosses between processes: real ones, over gloo."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torchrun import torchrun

from agenttrain.training.world import World


def test_a_world_of_one_gives_back_what_it_is_given() -> None:
    world = World()
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert world.gather([1, 2]) == [1, 2]
    assert world.to_main([1, 2]) == [1, 2]
    assert world.broadcast("a") == "a"
    assert (world.sum(2.5), world.max(2.5)) == (2.5, 2.5)
    world.barrier("nobody")


@pytest.fixture(scope="module")
def of_two() -> dict[int, dict]:
    """What the two processes of `world_process.py` found, by rank."""
    return torchrun("world_process.py")


@pytest.mark.slow
def test_values_cross_in_the_order_of_ranks(of_two: dict[int, dict]) -> None:
    for rank in (0, 1):
        assert of_two[rank]["gather"] == ["0a", "1a", "1b"]
        assert of_two[rank]["broadcast"] == {"from": 0}
        assert of_two[rank]["sum"] == pytest.approx(0.1 + 1.1)
        assert of_two[rank]["max"] == 1.0
        assert of_two[rank]["second"] == [0, 1]
    assert [of_two[rank]["to_main"] for rank in (0, 1)] == [[0, 1], []]
    assert [of_two[rank]["is_main"] for rank in (0, 1)] == [True, False]


@pytest.mark.slow
def test_a_failure_of_one_is_raised_by_all(of_two: dict[int, dict]) -> None:
    assert [of_two[rank]["exchange"] for rank in (0, 1)] == [[0, 1], [0, 1]]
    assert of_two[0]["failed"] == "PeerFailed: rank 1: ValueError: no"
    assert of_two[1]["failed"] == "ValueError: no"


def test_a_meeting_that_one_misses_names_it(of_two: dict[int, dict]) -> None:
    assert of_two[0]["missing"] == [1]
    assert of_two[0]["late"] == (
        "rank 0 waited 1 s for the update: rank 1 did not come "
        "(rank 1 was last at the end of the rollouts; distributed.timeout_s)"
    )
    assert of_two[0]["absent"] == [1]  # and no collective began that would wait for it
    assert of_two[0]["phase"].startswith(
        "rank 0 waited 1 s for the update of step 3: rank 1 did not come ("
    )
    assert of_two[0]["looks"] > 0  # which tells the watchdog that it waits for another one


@pytest.mark.parametrize(
    "local_rank, visible, expected",
    [("0", 8, 0), ("5", 8, 5), ("5", 1, 0), ("3", 2, 1)],
    ids=["the first", "one of eight", "its own alone", "two are shown"],
)
def test_a_process_takes_the_gpu_that_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, expected: int
) -> None:
    """A scheduler may show each task its own GPU alone (srun --gpus-per-task=1)."""
    calls: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *names, **settings: calls.append((*names, settings["device_id"])),
    )
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    World.start()
    device = torch.device("cuda", expected)
    assert calls == [("device", device), ("cpu:gloo,cuda:nccl", device)]
    # What the user or torch's launcher has set stays.
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
