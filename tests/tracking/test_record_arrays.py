"""Records of long rollouts have their lists per token in a file of arrays, and read the same."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracking_rollouts import PROMPT, decode, new, say

from agenttrain.tracking.backends.base import ExperimentTracker, TrackedRun
from agenttrain.tracking.following import follow, is_transient
from agenttrain.tracking.notable import notable_rollouts
from agenttrain.tracking.record_arrays import SHORTEST, ArraysMissing
from agenttrain.tracking.rollouts import (
    in_order,
    read_rollout,
    read_step,
    step_path,
    write_step,
)
from agenttrain.tracking.viewer import render
from agenttrain.types import Completion, Finish, Origin, Rollout
from agenttrain.utils.json_lines import dumps, read_rows

SINGLE = 2.0**-149
"""The smallest float32."""
ODD = (0.0, -0.0, -SINGLE, -SINGLE / 2, -0.1, -1e30, -1e300, -math.inf, math.nan)
"""Numbers of which some are no float32, and some are not in JSON."""


def single(value: float) -> float:
    """The nearest float32, as an engine returns it."""
    return float(np.float32(value))


@st.composite
def attempts(draw: st.DrawFn) -> Rollout:
    """Rollouts of 5 to 700 tokens: turns, replies, a branch, scores and advantages per token."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    most_id = draw(st.sampled_from((9, 151_935, 2**31 - 1, 2**40)))
    odd = draw(st.sampled_from(((), ODD[:5], ODD)))
    rollout = new(draw(st.integers(0, 3)), draw(st.sampled_from((None, 0.5))))
    main = rollout.trajectories[0]
    branches = draw(st.booleans())
    for trajectory in (main, rollout.branch(0, 3)) if branches else (main,):
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 90))
            logprobs = [
                rng.choice(odd) if odd and rng.random() < 0.1 else single(-rng.expovariate(1))
                for _ in range(length)
            ]
            first = rng.randint(0, length)
            versions = ((3, first), (4, length - first)) if 0 < first < length else ((3, length),)
            completion = Completion(
                token_ids=tuple(rng.randint(0, most_id) for _ in range(length)),
                logprobs=tuple(logprobs),
                finish=Finish.stop,
                versions=versions,
            )
            trajectory.append_sampled(completion, trajectory.token_ids)
            reply = [rng.randint(0, most_id) for _ in range(draw(st.integers(0, 80)))]
            trajectory.append_context(reply, Origin.tool)
        sampled = trajectory.sampled_length
        if draw(st.booleans()):
            trajectory.trainer_logprobs = array(
                "f", (-rng.expovariate(0.1) for _ in range(sampled))
            )
            trajectory.entropies = array(
                "f", (rng.choice((0.0, 1e-7, 3.3)) for _ in range(sampled))
            )
            trajectory.entropies[0] = math.nan if odd else 0.25
        trajectory.advantages = draw(
            st.sampled_from(
                (
                    None,
                    array("d", [0.1] * sampled),
                    array("d", (rng.random() for _ in range(sampled))),
                )
            )
        )
    return rollout


@settings(max_examples=40, deadline=None)
@given(st.lists(attempts(), min_size=1, max_size=3), st.sampled_from((0, 60, 200, 10_000)))
def test_records_are_the_same_with_arrays_and_without(
    rollouts: list[Rollout], arrays_above: int
) -> None:
    with TemporaryDirectory() as folder:
        lines, arrays = Path(folder, "lines"), Path(folder, "arrays")
        write_step(lines, 4, rollouts)
        write_step(arrays, 4, rollouts, arrays_above=arrays_above)
        expected, records = [list(read_step(run, 4)) for run in (lines, arrays)]
        raw = list(read_rows(step_path(arrays, 4)))
        # As text: -0.0 is not 0.0, and 0 is not 0.0.
        assert [*map(dumps, records)] == [*map(dumps, expected)]
        assert [*map(list, records)] == [*map(list, expected)]
        for rollout, record, written in zip(in_order(rollouts), records, raw, strict=True):
            again = read_rollout(record, rollout.task)
            assert [*map(list, (t.token_ids for t in again.trajectories))] == [
                *map(list, (t.token_ids for t in rollout.trajectories))
            ]
            tokens = sum(len(trajectory.own_ids) for trajectory in rollout.trajectories)
            longest = max(len(trajectory.own_ids) for trajectory in rollout.trajectories)
            assert ("arrays" in written) == (tokens > arrays_above and longest >= SHORTEST)


def long_rollout(tokens: int = 300, sample: int = 0, reward: float = 1.0) -> Rollout:
    """A rollout of one turn of so many tokens, with scores of the trainer."""
    rng = random.Random(sample)
    rollout = new(sample, reward)
    say(rollout, tuple(rng.choice((5, 6, 8, 10)) for _ in range(tokens - len(PROMPT))))
    trajectory = rollout.trajectories[0]
    trajectory.trainer_logprobs = array("f", (rng.uniform(-2, 0) for _ in range(tokens - 4)))
    trajectory.entropies = array("f", (rng.uniform(0, 2) for _ in range(tokens - 4)))
    return rollout


def arrays_file(run: Path) -> Path:
    """The only file of arrays in a run folder."""
    (path,) = (run / "rollouts").glob("*.npz")
    return path


def test_numpy_reads_the_file_and_a_short_rollout_stays_in_its_line(tmp_path: Path) -> None:
    rollouts = [new(0, 1.0), long_rollout(300, sample=1), long_rollout(300, sample=2)]
    write_step(tmp_path, 1, rollouts, arrays_above=299)
    short, first, second = read_rows(step_path(tmp_path, 1))
    assert short["trajectories"][0]["token_ids"] == PROMPT and "arrays" not in short
    assert first["arrays"] == second["arrays"] == arrays_file(tmp_path).name
    (trajectory,) = second["trajectories"]
    assert trajectory["token_ids"] == {"array": "2/0/token_ids"}
    with np.load(arrays_file(tmp_path)) as arrays:
        own = rollouts[2].trajectories[0]
        assert arrays["2/0/token_ids"].tolist() == list(own.own_ids)
        assert arrays["2/0/token_ids"].dtype == np.int32
        # -0.5 and 0.0 are float32; trainer_logprobs have 6 decimals, which float32 gives again.
        assert arrays["2/0/logprobs"].tolist() == own.rollout_logprobs
        kinds = {name: array.dtype for name, array in arrays.items() if name.startswith("2/0")}
    assert set(kinds.values()) == {np.dtype(np.int32), np.dtype(np.float32)}
    assert [name.rpartition("/")[2] for name in kinds] == [
        *("token_ids", "logprobs", "trainer_logprobs", "entropies")
    ]


def test_a_number_that_is_no_float32_is_kept_as_float64(tmp_path: Path) -> None:
    rollout = new(0, 1.0)
    values = [-0.1] * 64  # float32 would be -0.10000000149011612
    rollout.trajectories[0].append_sampled(
        Completion(token_ids=(5,) * 64, logprobs=values, finish=Finish.stop, versions=((0, 64),)),
        rollout.trajectories[0].token_ids,
    )
    write_step(tmp_path, 1, [rollout], arrays_above=0)
    with np.load(arrays_file(tmp_path)) as arrays:
        assert arrays["0/0/logprobs"].dtype == np.float64
    (record,) = read_step(tmp_path, 1)
    assert record["trajectories"][0]["logprobs"] == [0.0] * 4 + values


def test_a_step_that_is_written_again_leaves_only_its_own_arrays(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [long_rollout(300)], arrays_above=100)
    first = arrays_file(tmp_path)
    write_step(tmp_path, 1, [long_rollout(300)], arrays_above=100)
    assert arrays_file(tmp_path) == first
    write_step(tmp_path, 12, [long_rollout(300)], arrays_above=100)
    write_step(tmp_path, 1, [long_rollout(200)], arrays_above=100)
    files = sorted(
        path.name.partition("-0000")[2][:2] for path in (tmp_path / "rollouts").glob("*.npz")
    )
    assert files == ["01", "12"] and not first.exists()
    write_step(tmp_path, 1, [long_rollout(200)])
    assert arrays_file(tmp_path).name.startswith("step-000012-")


WRITER = """
import sys
from pathlib import Path
from agenttrain.tracking.rollouts import write_step
from agenttrain.types import Completion, Finish, Rollout, Task

number = 0
while True:
    number += 1
    tokens = 400 + number % 7
    rollouts = []
    for name in "abc":
        task = Task(task_id="t", messages=(), columns={"tokens": tokens})
        rollout = Rollout(task=task, rollout_id=name, group_id="g", sample=0)
        completion = Completion(
            token_ids=range(tokens), logprobs=(-1 / number,) * tokens, finish=Finish.stop,
            versions=((0, tokens),),
        )
        rollout.trajectories[0].append_sampled(completion, ())
        rollouts.append(rollout)
    write_step(Path(sys.argv[1]), 1, rollouts, arrays_above=100)
    if number == 1:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_no_line_without_its_arrays(tmp_path: Path) -> None:
    """Killed while it writes one step over and over, each time with other lengths."""
    rng = random.Random(5)
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(rng.random() / 20)
            writer.kill()
        records = list(read_step(tmp_path, 1))
        assert [record["rollout_id"] for record in records] == ["a", "b", "c"]
        for record in records:
            (trajectory,) = record["trajectories"]
            assert trajectory["token_ids"] == list(range(record["columns"]["tokens"]))
            assert len(trajectory["logprobs"]) == len(trajectory["token_ids"])
    write_step(tmp_path, 1, [long_rollout(300)], arrays_above=100)
    assert len(list(read_step(tmp_path, 1))) == 1
    assert arrays_file(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "changed", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write_step(tmp_path, 1, [long_rollout(3000)], arrays_above=100)
    path = arrays_file(tmp_path)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        np.savez(path, other=np.zeros(3))
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:-20], "empty": b"", "changed": changed}[damage])
    with pytest.raises(ArraysMissing, match=f"{path.name}: is .*copy it from the run") as raised:
        list(read_step(tmp_path, 1))
    # A tracker skips the step's table instead of trying again for as long as the run lasts.
    assert not is_transient(raised.value)


def test_a_name_leads_to_no_other_folder(tmp_path: Path) -> None:
    """A record of somebody else names a file, and gets no file from elsewhere."""
    write_step(tmp_path, 1, [long_rollout()], arrays_above=100)
    arrays_file(tmp_path).rename(tmp_path / "elsewhere.npz")
    (record,) = read_rows(step_path(tmp_path, 1))
    record["arrays"] = "../elsewhere.npz"
    step_path(tmp_path, 1).write_text(dumps(record) + "\n")
    with pytest.raises(ArraysMissing, match=r"rollouts/elsewhere\.npz: is missing"):
        list(read_step(tmp_path, 1))


def test_pages_are_the_same(tmp_path: Path) -> None:
    """The page of a step, and the rollouts that are worth a look with their mean probability."""
    rollouts = [long_rollout(300, sample, reward=sample) for sample in range(4)]
    runs = tmp_path / "lines", tmp_path / "arrays"
    write_step(runs[0], 1, rollouts)
    write_step(runs[1], 1, rollouts, arrays_above=0)
    pages = [render(read_step(run, 1), decode) for run in runs]
    assert pages[0] == pages[1]
    first, second = (notable_rollouts(run, "view") for run in runs)
    assert first == second


class Collected(ExperimentTracker):
    """Keeps the rollouts that it gets."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self.records += records


def test_a_tracker_gets_whole_records(tmp_path: Path) -> None:
    """Without the arrays, the table of the step is skipped, and what follows is sent."""
    rollouts = [long_rollout(300, sample) for sample in range(6)]
    write_step(tmp_path / "lines", 1, rollouts)
    folder = tmp_path / "run"
    write_step(folder, 1, rollouts, arrays_above=100)
    (folder / "metrics.jsonl").write_text('{"step":1,"reward":0.5}\n')
    run = TrackedRun(id="1", project="sums", name="run", folder=folder, shared=tmp_path)
    ended, tracker = Event(), Collected()
    ended.set()
    follow(run, "mine", tracker, {}, ended)
    assert tracker.records == list(read_step(tmp_path / "lines", 1))[:4]
    arrays_file(folder).unlink()
    with pytest.raises(ArraysMissing):
        follow(run, "yours", tracker, {}, ended)
    follow(run, "yours", tracker, {}, ended)


def test_a_rollout_of_32k_tokens_takes_a_third_of_the_room(tmp_path: Path) -> None:
    """Ids of a large vocabulary and float32 scores; half of the tokens are replies of tools."""
    rng = np.random.default_rng(0)
    rollout = new(0, 1.0)
    (trajectory,) = rollout.trajectories
    for _ in range(16):
        ids = np.minimum(rng.pareto(0.6, 2048) * 20, 151_935).astype(int).tolist()
        logprobs = -rng.exponential(0.4, 1024).astype(np.float32)
        completion = Completion(
            token_ids=tuple(ids[:1024]),
            logprobs=tuple(logprobs.tolist()),
            finish=Finish.stop,
            versions=((0, 1024),),
        )
        trajectory.append_sampled(completion, trajectory.token_ids)
        trajectory.append_context(ids[1024:], Origin.tool)
    scores = -rng.exponential(0.4, 16_384).astype(np.float32)
    trajectory.trainer_logprobs, trajectory.entropies = array("f", scores), array("f", -scores)
    lines, arrays = tmp_path / "lines", tmp_path / "arrays"
    write_step(lines, 1, [rollout])
    write_step(arrays, 1, [rollout], arrays_above=4096)
    size = step_path(lines, 1).stat().st_size
    smaller = step_path(arrays, 1).stat().st_size + arrays_file(arrays).stat().st_size
    assert smaller <= size / 3
