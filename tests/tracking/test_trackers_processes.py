"""Trackers in processes of their own, which die, hang and cannot be reached: the run goes on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import own_trackers
import psutil
import pytest
from own_trackers import lines
from rich.console import Console
from tracking_rollouts import three

from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.followers import tracker_processes
from agenttrain.tracking.following import Cursor, cursor_path, run_end
from agenttrain.tracking.run_folder import update_summary
from agenttrain.tracking.tracker import Tracker
from agenttrain.utils.json_lines import read_rows
from agenttrain.utils.signals import Preempted


def tracked(folder: Path, out: io.StringIO, kind: type | None, **settings) -> Tracker:
    """A run with one tracker of `own_trackers`, `mine`, beside those of `others`."""
    section = {"_target_": f"own_trackers.{kind.__name__}", "system": False} if kind else {}
    arguments = {name: settings.pop(name) for name in ("knows", "finish_s") if name in settings}
    own = {"mine": {**section, **arguments}} if kind else {}
    own |= settings.pop("others", {})
    return Tracker(
        folder,
        TrackerConfig(console=False, own=own),
        project="shop",
        name=folder.name,
        total_steps=99,
        console=Console(file=out, width=500),
        **settings,
    )


def cursor(folder: Path) -> Cursor:
    return Cursor.read(cursor_path(folder, "own-mine")) or Cursor(id="")


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("did not happen in 30 s")


def children() -> set[int]:
    """Return the processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def steps(shared: Path) -> list[int]:
    """Steps of the metrics that have arrived, evaluations left out."""
    rows = [row for row in lines(shared / "recorded.jsonl") if row[0] == "log"]
    return [row[1] for row in rows if not any(name.startswith("eval/") for name in row[2])]


def test_steps_evaluations_and_rollouts_arrive_in_their_order(tmp_path):
    folder, out = tmp_path / "run", io.StringIO()
    web = {"url": "http://me:secret@host/mcp", "env": {"KEY": "secret", "HOME": "${HOME}"}}
    headers = {"Authorization": "Bearer $TOKEN", "X-Key": "pa$$word"}
    config = {"steps": 11, "tools": {"web": {**web, "headers": headers}}}
    with tracked(folder, out, own_trackers.Recorded, run_config=config) as tracker:
        tracker.evaluation("before/sampled", 0, {"reward": 0.25, "reward_low": 0.125})
        for step in range(1, 12):
            tracker.step(step, {"reward": step / 100, "kl": float("nan")}, three())
        tracker.evaluation("after/sampled", 11, {"reward": 0.75})
    rows = lines(tmp_path / "recorded.jsonl")
    web = {"url": "http://***@host/mcp", "env": {"KEY": "***", "HOME": "${HOME}"}}
    headers = {"Authorization": "Bearer $TOKEN", "X-Key": "***"}
    hidden = {"steps": 11, "tools": {"web": {**web, "headers": headers}}}
    assert rows[0] == ["start", cursor(folder).id, False, hidden]
    assert rows[-1] == ["finish", "finished"]
    assert steps(tmp_path) == list(range(1, 12))
    assert ["log", 3, {"reward": 0.03}] in rows
    evaluated = [row for row in rows if row[0] == "log" and "eval/sampled/reward" in row[2]]
    assert evaluated == [
        ["log", 0, {"eval/sampled/reward": 0.25, "eval/sampled/reward_low": 0.125}],
        ["log", 11, {"eval/sampled/reward": 0.75}],
    ]
    tables = [row for row in rows if row[0] == "rollouts"]
    assert tables == [["rollouts", step, ["g0-0", "g0-1", "g0-2"]] for step in (1, 11)]
    assert [row["label"] for row in read_rows(folder / "evaluations.jsonl")] == [
        *("before/sampled", "after/sampled")
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError(), "failed"),
        (Preempted("SIGTERM"), "preempted"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_a_tracker_learns_how_the_run_ended(error, status, tmp_path):
    with (
        pytest.raises(type(error)),
        tracked(tmp_path / "run", io.StringIO(), own_trackers.Recorded) as tracker,
    ):
        tracker.step(1, {"reward": 0.5}, [])
        raise error
    assert lines(tmp_path / "recorded.jsonl")[-1] == ["finish", status]


def test_a_run_that_says_nothing_has_stalled_or_was_killed(tmp_path):
    assert [run_end(tmp_path, word) for word in ("", "end", "end failed\n", "end finished\n")] == [
        *("killed", "killed", "failed", "finished")
    ]
    update_summary(tmp_path, status="stalled", stalled_phase="rollout")
    assert [run_end(tmp_path, word) for word in ("", "end preempted\n")] == ["stalled", "preempted"]


def test_trackers_outlive_the_other_processes_of_a_run(tmp_path):
    other = subprocess.Popen(["sleep", "60"])
    with tracked(tmp_path / "run", io.StringIO(), own_trackers.Recorded) as tracker:
        each = psutil.Process().children(recursive=True)
        assert tracker._followers._process.pid in tracker_processes(each)
        assert other.pid not in tracker_processes(each)
        assert other.pid in {process.pid for process in each}
    other.kill()
    other.wait()


def test_a_killed_process_is_started_again_where_it_was(tmp_path):
    folder, out, others = tmp_path / "run", io.StringIO(), children()
    with tracked(folder, out, own_trackers.Recorded) as tracker:
        for step in (1, 2, 3):
            tracker.step(step, {"reward": 0.5}, [])
        wait_for(lambda: cursor(folder).step == 3)
        (pid,) = children() - others
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        for step in (4, 5):
            tracker.step(step, {"reward": 0.5}, [])
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    starts = [row[2] for row in lines(tmp_path / "recorded.jsonl") if row[0] == "start"]
    assert starts == [False, True]
    messages = [line for line in out.getvalue().splitlines() if "tracker" in line]
    assert messages == [
        "tracker.own.mine: its process was ended by SIGKILL; the run goes on without waiting, and "
        "the tracker is started again after step 3"
    ]


def test_a_step_that_arrived_without_an_acknowledgement_is_not_sent_again(tmp_path):
    out = io.StringIO()
    kind = own_trackers.KilledBeforeAcknowledgement
    with tracked(tmp_path / "run", out, kind, knows=True) as tracker:
        for step in (1, 2, 3):
            tracker.step(step, {"reward": 0.5}, three())
        wait_for(lambda: check(tracker) or "SIGKILL" in out.getvalue())
        for step in (4, 5, 6):
            tracker.step(step, {"reward": 0.5}, three())
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    rows = lines(tmp_path / "recorded.jsonl")
    assert [row[1] for row in rows if row[0] == "rollouts"] == [1]


def check(tracker: Tracker) -> None:
    """Let the run see its trackers, as it does at every step."""
    tracker._followers.check()


def test_a_resumed_run_sends_what_it_repeats_once(tmp_path):
    """The checkpoint is of step 2, and steps up to 4 were sent: 3 and 4 are done again."""
    folder, out = tmp_path / "run", io.StringIO()
    with tracked(folder, out, own_trackers.Recorded) as tracker:
        for step in range(1, 5):
            tracker.step(step, {"reward": 0.5}, three())
        tracker.evaluation("step-2/sampled", 2, {"reward": 0.5})
        tracker.evaluation("step-4/sampled", 4, {"reward": 0.5})
    first = cursor(folder).id
    with tracked(folder, out, own_trackers.Recorded, resume_step=2) as tracker:
        for step in range(3, 7):
            tracker.step(step, {"reward": 0.5}, three())
        tracker.evaluation("step-4/sampled", 4, {"reward": 0.5})
        tracker.evaluation("step-6/sampled", 6, {"reward": 0.5})
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    rows = lines(tmp_path / "recorded.jsonl")
    assert [row[1] for row in rows if row[0] == "log" and "eval/sampled/reward" in row[2]] == [
        2, 4, 6,
    ]  # fmt: skip
    assert [row[1] for row in rows if row[0] == "rollouts"] == [1]
    assert [row[1:3] for row in rows if row[0] == "start"] == [[first, False], [first, True]]
    assert [row["step"] for row in read_rows(folder / "evaluations.jsonl")] == [2, 4, 6]


def test_a_new_run_in_the_folder_of_an_old_one_is_another(tmp_path):
    folder = tmp_path / "run"
    for _ in range(2):
        with tracked(folder, io.StringIO(), own_trackers.Recorded) as tracker:
            tracker.step(1, {"reward": 0.5}, [])
        (folder / "metrics.jsonl").unlink()
    starts = [row for row in lines(tmp_path / "recorded.jsonl") if row[0] == "start"]
    assert starts[0][1] != starts[1][1] and [row[2] for row in starts] == [False, False]
    assert steps(tmp_path) == [1, 1]


def test_a_tracker_that_hangs_does_not_delay_the_end(tmp_path):
    out = io.StringIO()
    tracker = tracked(tmp_path / "run", out, own_trackers.Hangs, finish_s=4.0)
    with tracker:
        for step in (1, 2, 3):
            tracker.step(step, {"reward": 0.5}, [])
            if step == 1:
                wait_for(lambda: cursor(tmp_path / "run").step == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 6
    assert out.getvalue().endswith(
        "tracker.own.mine: steps up to 1 of 3 have arrived (it did not end within 4 s); resume= "
        "sends what is missing\n"
    )
    assert tracker.views == []


def test_a_tracker_that_hangs_for_ever_holds_no_other(tmp_path):
    folder, out = tmp_path / "run", io.StringIO()
    hangs = {"_target_": "own_trackers.Hangs", "system": False, "file": "h.jsonl", "finish_s": 3.0}
    with tracked(folder, out, own_trackers.Recorded, others={"late": hangs}) as tracker:
        for step in range(1, 21):
            tracker.step(step, {"reward": step / 100}, [])
            if step == 10:  # it hangs at step 2 since long ago
                wait_for(lambda: cursor(folder).step == 10)
        started = time.monotonic()
    assert time.monotonic() - started < 6
    assert steps(tmp_path) == list(range(1, 21))
    assert lines(tmp_path / "recorded.jsonl")[-1] == ["finish", "finished"]
    (message,) = [line for line in out.getvalue().splitlines() if "tracker" in line]
    assert message.startswith("tracker.own.late: ") and "within 3 s" in message


def test_a_tracker_that_fails_is_tried_again_without_the_others(tmp_path):
    out = io.StringIO()
    refused = {"_target_": "own_trackers.Unreachable", "system": False, "file": "u.jsonl"}
    with tracked(tmp_path / "run", out, own_trackers.Recorded, others={"far": refused}) as tracker:
        for step in (1, 2):
            tracker.step(step, {"reward": 0.5}, [])
        wait_for(lambda: check(tracker) or "no route to host" in out.getvalue())
        (tmp_path / "network").touch()
    for file in ("recorded.jsonl", "u.jsonl"):
        assert [row[0] for row in lines(tmp_path / file)] == ["start", "log", "log", "finish"]


def test_a_tracker_that_cannot_be_reached_is_tried_again(tmp_path):
    out = io.StringIO()
    with tracked(tmp_path / "run", out, own_trackers.Unreachable) as tracker:
        tracker.step(1, {"reward": 0.5}, [])
        wait_for(lambda: check(tracker) or "no route to host" in out.getvalue())
        tracker.step(2, {"reward": 0.5}, [])
        (tmp_path / "network").touch()
    assert steps(tmp_path) == [1, 2]
    assert out.getvalue().count("ConnectionError: no route to host") == 1


def test_a_table_is_sent_again_after_a_short_failure_of_the_network(tmp_path):
    out = io.StringIO()
    with tracked(tmp_path / "run", out, own_trackers.LosesItsNetwork) as tracker:
        tracker.step(1, {"reward": 0.5}, three())
    assert "TimeoutError: no answer" in out.getvalue()
    rows = lines(tmp_path / "recorded.jsonl")
    assert [row[1] for row in rows if row[0] == "rollouts"] == [1]


def test_a_tracker_without_a_network_is_said_at_the_end(tmp_path):
    out = io.StringIO()
    with tracked(tmp_path / "run", out, own_trackers.Unreachable, finish_s=3.0) as tracker:
        tracker.step(1, {"reward": 0.5}, [])
        wait_for(lambda: check(tracker) or "no route to host" in out.getvalue())
    assert "tracker.own.mine: steps up to 0 of 1 have arrived (Conn" in out.getvalue()
    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == 1


def test_a_missing_library_turns_the_tracker_off(tmp_path):
    out = io.StringIO()
    with tracked(tmp_path / "run", out, own_trackers.WithoutItsLibrary) as tracker:
        tracker.step(1, {"reward": 0.5}, [])
        wait_for(lambda: check(tracker) or "is off" in out.getvalue())
        tracker.step(2, {"reward": 0.5}, [])
    assert out.getvalue().count("tracker.own.mine") == 1
    assert "is off for this run (ImportError: No module named 'tracklib')" in out.getvalue()


def test_signals_to_the_process_group_reach_no_tracker(tmp_path):
    """The run handles them, and records steps until it stops."""
    folder, out, others = tmp_path / "run", io.StringIO(), children()
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
    with tracked(folder, out, own_trackers.Recorded) as tracker:
        (keeper,) = children() - others
        for number in signals:  # before the process has begun
            os.kill(keeper, number)
        pid = tracker._followers._process.pid
        assert os.getpgid(pid) == pid
        tracker.step(1, {"reward": 0.25}, [])
        wait_for(lambda: cursor(folder).step == 1)
        for number in signals:
            os.kill(keeper, number)
            os.kill(pid, number)
        tracker.step(2, {"reward": 0.5}, [])
    assert steps(tmp_path) == [1, 2]
    assert "tracker" not in out.getvalue()


def killed_run(folder: Path, kind: type, steps: int, before: str = "") -> None:
    """Run so many steps in another process, which ends by SIGKILL after the lines of `before`."""
    script = f"""
import os, signal, time
from pathlib import Path
from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.tracker import Tracker
own = {{"mine": {{"_target_": "own_trackers.{kind.__name__}", "system": False}}}}
config = TrackerConfig(console=False, own=own)
folder = Path({str(folder)!r})
tracker = Tracker(folder, config, project="shop", name="run", total_steps=20)
for step in range(1, {steps} + 1):
    tracker.step(step, {{"reward": 0.5}}, [])
{before}
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "kit"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -9, done.stderr


def test_a_killed_run_leaves_nothing_behind_that_it_wrote(tmp_path):
    """The process of the tracker sees the end of its input and finishes."""
    (tmp_path / "run").mkdir()
    update_summary(tmp_path / "run", status="finished")  # of an earlier start
    killed_run(tmp_path / "run", own_trackers.Recorded, 20)
    wait_for(lambda: lines(tmp_path / "recorded.jsonl")[-1:] == [["finish", "killed"]])
    assert steps(tmp_path) == list(range(1, 21))


def test_a_run_resumed_while_the_tracker_of_the_killed_one_is_at_work(tmp_path):
    """The new process waits until the old one has sent its steps; each is sent once."""
    folder, sent = tmp_path / "run", tmp_path / "recorded.jsonl"
    first_sent = f"""
while not os.path.exists({str(sent)!r}) or '"log"' not in open({str(sent)!r}).read():
    time.sleep(0.05)
"""
    killed_run(folder, own_trackers.Slow, 5, first_sent)
    with tracked(folder, io.StringIO(), own_trackers.Slow, resume_step=5) as tracker:
        tracker.step(6, {"reward": 0.5}, [])
        assert cursor(folder).step < 5
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_torn_line_is_read_when_it_is_complete(tmp_path):
    from agenttrain.tracking.following import Lines

    path = tmp_path / "metrics.jsonl"
    rows = Lines(path)
    assert list(rows.added()) == []
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "re')
    assert [row["step"] for row in rows.added()] == [1]
    with path.open("a") as file:
        file.write('ward": 0.5}\n')
    assert list(rows.added()) == [{"step": 2, "reward": 0.5}]
