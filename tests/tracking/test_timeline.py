"""Times of a run: what is recorded, and the page that is made of it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fleet_kit import running
from parts import script
from test_tracking_viewer import dump

from agenttrain.cli import main
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.monitoring import InFlight
from agenttrain.tools.toolbox import RunningCall
from agenttrain.tracking.names import depends_on_clock
from agenttrain.tracking.timeline import Timeline
from agenttrain.tracking.timeline_page import (
    NoTimes,
    Page,
    busy,
    overlap_s,
    read_processes,
    render_timeline,
    rows_of,
    sessions,
    windows_of,
)

SAMPLING = Sampling(max_tokens=1, seed=0)
TRAINER = [
    {"time": 100.0, "process": "trainer-0", "host": "a", "pid": 1},
    {"time": 102.0, "seconds": 4.0, "phase": "rollout", "step": 1},
    {"time": 106.0, "seconds": 2.0, "phase": "train", "step": 1},
    {"time": 108.0, "seconds": 1.0, "phase": "sync", "step": 1},
    {"time": 109.0, "seconds": 1.0, "phase": "checkpoint", "step": 1},
    {"time": 110.0, "seconds": 2.0, "phase": "rollout", "step": 2},
    # killed; resumed from the checkpoint of step 1 after a minute
    {"time": 172.0, "process": "trainer-0", "host": "b", "pid": 2},
    {"time": 173.0, "seconds": 3.0, "phase": "rollout", "step": 2},
    {"time": 176.0, "seconds": 2.0, "phase": "train", "step": 2},
]
ROLLOUTS = [
    {"time": 100.5, "process": "rollouts", "host": "a", "pid": 3},
    {
        **{"time": 102.0, "seconds": 4.0, "rollout": "train-1-0-0"},
        **{"turns": [[0.0, 1.0, 0], [2.0, 2.0, 1]], "calls": [["search", 1.0, 1.0]]},
    },
    {
        **{"time": 102.5, "seconds": 1.0, "rollout": "train-1-0-1"},
        **{"turns": [[0.0, 1.0, 0]], "calls": []},
    },
    # begins while step 1 is trained, as with asynchronous training
    {
        **{"time": 107.0, "seconds": 4.0, "rollout": "train-2-0-0"},
        **{"turns": [[0.0, 4.0, 1]], "calls": []},
    },
]


def write(folder: Path, **processes: Sequence[dict]) -> Path:
    """Write the times of processes; `trainer_0` stands for `trainer-0`."""
    (folder / "timeline").mkdir(parents=True)
    for name, rows in processes.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "timeline" / f"{name.replace('_', '-')}.jsonl").write_text(lines)
    return folder


def recorded(folder: Path, process: str) -> list[dict]:
    text = (folder / "timeline" / f"{process}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_time_between_a_stop_and_a_resume_is_left_out(tmp_path):
    processes = read_processes(write(tmp_path, trainer_0=TRAINER, rollouts=ROLLOUTS))
    assert [process.name for process in processes] == ["trainer-0", "rollouts"]
    assert sessions(processes) == [(100.0, 112.0), (172.0, 178.0)]
    data = Page(processes, sessions(processes)).data()
    assert data["total"] == 18.0  # 12 and 6 seconds
    assert data["breaks"] == [[12.0, 60.0]]  # where on the page, and how long
    assert data["steps"] == [[1, 2.0], [2, 10.0], [2, 13.0]]
    # start, seconds, phase, step, label, lost. The trainer waits, as another process samples.
    assert data["phases"]["trainer-0"] == [
        [0.0, 2.0, "load", None, "", False],
        [12.0, 1.0, "load", None, "", False],
        [2.0, 4.0, "wait", 1, "", False],
        [6.0, 2.0, "train", 1, "", False],
        [8.0, 1.0, "sync", 1, "", False],
        [9.0, 1.0, "checkpoint", 1, "", False],
        [10.0, 2.0, "wait", 2, "", True],
        [13.0, 3.0, "wait", 2, "", False],
        [16.0, 2.0, "train", 2, "", False],
    ]
    # start, seconds, row, id, turns, calls: the second rollout overlaps the first
    assert [bar[:4] for bar in data["rollouts"]["rollouts"]] == [
        [2.0, 4.0, 0, "train-1-0-0"],
        [2.5, 1.0, 1, "train-1-0-1"],
        [7.0, 4.0, 0, "train-2-0-0"],
    ]


def test_the_summary_says_who_was_busy(tmp_path):
    write(tmp_path, trainer_0=TRAINER, rollouts=ROLLOUTS)
    page = render_timeline(tmp_path, title="shop/run")
    assert re.findall("<li>([^<]*)", page) == [
        # of 18 s: 2+1, 4+2+3, 2+2, 1, 1, nothing
        "trainer-0: load 17%, wait 50%, train 22%, sync 6%, checkpoint 6%",
        # server 0: 102-103 and 102.5-103.5, which is 2 s of requests in 1.5
        "server 0: busy 8%, then 1.3 requests at a time",
        # server 1: 104-106 and 107-111
        "server 1: busy 33%, then 1.0 requests at a time",
        "tools: busy 6%, then 1.0 calls at a time",
        "sampling while training: 6%",  # 107 to 108
    ]


def test_the_table_has_the_seconds_of_each_step(tmp_path):
    write(tmp_path, trainer_0=TRAINER, rollouts=ROLLOUTS)
    page = render_timeline(tmp_path, title="shop/run")
    table = re.search("<table>.*</table>", page)[0]
    assert re.findall("<th>([^<]*)", table) == [
        *("step", "seconds", "wait", "train", "sync", "checkpoint", "other"),
    ]
    rows = [re.findall("<td>([^<]*)", row) for row in table.split("<tr>")[2:]]
    assert rows == [
        ["1", "8.00", "4.00", "2.00", "1.00", "1.00", "0.00"],
        ["2 (lost, done again)", "2.00", "2.00", "0.00", "0.00", "0.00", "0.00"],
        ["2", "5.00", "3.00", "2.00", "0.00", "0.00", "0.00"],
    ]


def test_steps_may_be_chosen(tmp_path):
    processes = read_processes(write(tmp_path, trainer_0=TRAINER, rollouts=ROLLOUTS))
    windows = windows_of(processes, 2, 2)
    assert windows == [(110.0, 112.0), (173.0, 178.0)]
    data = Page(processes, windows).data()
    assert data["total"] == 7.0 and data["rollouts"] == {}
    with pytest.raises(
        NoTimes, match="steps=3-9: the times of the run are those of the steps 1 to"
    ):
        windows_of(processes, 3, 9)


def test_the_evaluation_before_the_first_step(tmp_path):
    evaluation = {"time": 102.0, "seconds": 3.0, "phase": "evaluation", "step": 0}
    processes = read_processes(write(tmp_path, trainer_0=[TRAINER[0], evaluation]))
    page = Page(processes, windows_of(processes, 0, 0))
    assert page.total == 3.0 and page.steps() == []
    assert page.data()["phases"] == {
        "trainer-0": [[0.0, 3.0, "evaluation", 0, "", False]],
    }


def test_a_run_whose_first_phase_goes_on(tmp_path):
    write(tmp_path, trainer_0=TRAINER[:1], rollouts=ROLLOUTS[:1])
    with pytest.raises(NoTimes, match="Runs do so as each phase ends, unless"):
        read_processes(tmp_path)


def test_a_run_in_progress_and_a_torn_line(tmp_path):
    write(tmp_path, trainer_0=TRAINER[:2], rollouts=ROLLOUTS[:2])
    with (tmp_path / "timeline" / "trainer-0.jsonl").open("a") as file:
        file.write('{"time":106.0,"sec')
    processes = read_processes(tmp_path)
    assert sessions(processes) == [(100.0, 106.0)]
    with Timeline(tmp_path, "trainer-0") as timeline, timeline.phase("train", 1):
        pass
    assert [row.get("phase") for row in recorded(tmp_path, "trainer-0")] == [
        *(None, "rollout", None, "train"),  # the torn line has gone
    ]


def test_intervals():
    assert busy([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlap_s([(0, 3), (5, 6)], [(2, 5.5)]) == 1.5
    assert rows_of([(0, 4), (1, 2), (3, 5), (3.5, 6)]) == [0, 1, 1, 2]


def test_ranks_are_in_order(tmp_path):
    ranks = {f"trainer_{rank}": TRAINER[:3] for rank in (10, 2, 0)}
    names = [process.name for process in read_processes(write(tmp_path, **ranks))]
    assert names == ["trainer-0", "trainer-2", "trainer-10"]


def test_the_page_needs_no_other_file_and_text_stays_text(tmp_path):
    bad = {**ROLLOUTS[1], "calls": [["</script><script>alert(1)", 1.0, 1.0]]}
    page = render_timeline(
        write(tmp_path, trainer_0=TRAINER, rollouts=[ROLLOUTS[0], bad]), title="<b> __DATA__"
    )
    assert "<script>alert" not in page and "&lt;b&gt; __DATA__" in page
    assert re.findall(r"(?:src|href)\s*=|https?://|@import|url\(", page) == []


def test_a_browser_draws_it(tmp_path):
    write(tmp_path, trainer_0=TRAINER, rollouts=ROLLOUTS)
    page = tmp_path / "page.html"
    page.write_text(render_timeline(tmp_path, title="shop/run"), encoding="utf-8")
    dom = dump(page, "", tmp_path / "profile")
    # from the end of the first load, at 2 s, with a hundredth of 18 s before it
    assert "16.18 s of 18.00 s: 3 rollouts, 4 turns, 1 calls of tools" in dom
    assert re.search(r'<canvas[^>]* data-phases="9"', dom)
    # step 1 takes 8 s; 3 % of it are shown on both sides
    dom = dump(page, "step=1", tmp_path / "profile")
    assert "8.48 s of 18.00 s: 3 rollouts, 4 turns, 1 calls of tools" in dom
    dom = dump(page, "step=2", tmp_path / "profile")
    assert "of 18.00 s: 0 rollouts, 0 turns, 0 calls of tools" in dom


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("times") / "run"
    words = ["debug=tiny", "tracker=none", "tracker.rollouts=all", "eval.questions=2"]
    assert main([*words, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.slow
def test_a_run_records_its_phases_and_rollouts(tiny):
    rows = recorded(tiny, "trainer-0")
    assert list(rows[0]) == ["time", "process", "host", "pid"]
    phases = [(row["phase"], row["step"]) for row in rows if "phase" in row]
    named = [one for one in phases if one[0] not in ("reward", "checkpoint")]
    steps = [(name, step) for step in (1, 2) for name in ("rollout", "train", "sync")]
    assert named == [("evaluation", 0), *steps, ("evaluation", 2)]
    assert [row["label"] for row in rows if row.get("phase") == "reward" and "label" in row] == [
        *("eval-sampled", "eval-greedy", "train-1", "train-2", "eval-sampled", "eval-greedy"),
    ]
    written = (tiny / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    by_id = {row["rollout"]: row for row in rows if "rollout" in row}
    for record in map(json.loads, written):
        row = by_id[record["rollout_id"]]
        turns = {span["turn"] for span in record["trajectories"][0]["spans"]}
        assert len(row["turns"]) == len(turns)
        ran = (None, "exception", "timeout")  # others were refused before a tool ran
        tools = [call["name"] for call in record["tool_calls"] if call["error"] in ran]
        assert [name for name, _, _ in row["calls"]] == tools
        ends = [start + length for start, length in row["turns"]]
        ends += [start + length for _, start, length in row["calls"]]
        assert max(ends) <= row["seconds"] + 1e-3
    rolled = next(row for row in rows if row.get("phase") == "rollout")
    first = by_id["train-1-0-0"]
    assert rolled["time"] <= first["time"] + 1e-3
    assert first["time"] + first["seconds"] <= rolled["time"] + rolled["seconds"] + 1e-3


def test_times_change_nothing_else(tiny, tmp_path):
    words = ["debug=tiny", "tracker=none", "tracker.rollouts=all", "eval.questions=2"]
    other = tmp_path / "run"
    assert main([*words, "tracker.timeline=false", f"hydra.run.dir={other}"]) == 0
    assert not (other / "timeline").exists()

    def learnt(folder: Path) -> list[dict]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]

    assert learnt(other) == learnt(tiny)
    weights = [folder / "checkpoints/latest/model.safetensors" for folder in (tiny, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_verb_writes_the_page(tiny, tmp_path, capsys):
    for _ in range(2):  # the page of a run that goes on is made anew
        assert main(["timeline", str(tiny)]) == 0
        assert capsys.readouterr().out.strip() == str(tiny / "timeline.html")
    page = tmp_path / "page.html"
    assert main(["timeline", str(tiny), "steps=1", f"to={page}"]) == 0
    assert '"rollout":' not in page.read_text() and "train-1-0-0" in page.read_text()
    assert "train-2-0-0" not in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{0}", "--steps", "3-2"], "--steps 3-2: the first is after the last"),
        (["{0}", "steps=7"], "steps=7-7: the times of the run are those of the steps 0 to 2"),
        (["{0}", "to={0}/config.yaml"], "config.yaml: is there already; name another file"),
        (["{0}/rollouts"], "rollouts: holds no run (there is no config.yaml)"),
    ],
)
def test_bad_words_are_refused(tiny, capsys, words, message):
    assert main(["timeline", *(word.format(tiny) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_times(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["timeline", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"timeline {tmp_path}: it has recorded no times (timeline/*.jsonl)" in error
    assert "metrics.jsonl has the seconds of their steps" in error


def test_a_folder_that_may_not_be_written_stops_no_run(tmp_path, capsys):
    (tmp_path / "timeline").write_text("a file, where the folder would be")
    with Timeline(tmp_path, "trainer-0") as timeline:
        for step in (1, 2):
            with timeline.phase("train", step):
                pass
    assert capsys.readouterr().err.count("no times are recorded") == 1


def test_turns_and_calls_of_a_rollout_are_recorded(tmp_path):
    async def main() -> None:
        with Timeline(tmp_path, "rollouts") as timeline:
            in_flight = InFlight(timeline=timeline)
            engine = ScriptedEngine(script("7", "8"), max_context=64)
            now = time.monotonic()
            calls = [
                RunningCall(rollout_id="train-1-0-0", tool=tool, call_id="call_0_0", since=now)
                for tool in ("add", "search")
            ]
            with in_flight.tracked("train-1-0-0", engine) as tracked:
                for session in ("train-1-0-0", "train-1-0-0/1"):  # a sub-agent has its own
                    await tracked.generate([1], SAMPLING, session=session)
                for call in calls:
                    in_flight.answered(call)
            in_flight.answered(calls[0])  # it outlived its rollout

    asyncio.run(main())
    (_, row) = recorded(tmp_path, "rollouts")
    assert [len(turn) for turn in row["turns"]] == [2, 2]  # no server
    assert [name for name, _, _ in row["calls"]] == ["add", "search"]


@pytest.mark.slow
def test_turns_name_their_server(tmp_path):
    async def main() -> None:
        async with running(tmp_path) as engine:
            with Timeline(tmp_path, "rollouts") as timeline:
                in_flight = InFlight(timeline=timeline)

                async def one(rollout_id: str) -> None:
                    with in_flight.tracked(rollout_id, engine) as tracked:
                        await tracked.generate([7, 8], SAMPLING, session=rollout_id)
                        await tracked.release(rollout_id)

                await asyncio.gather(*(one(f"train-1-{number}-0") for number in range(12)))
            assert engine.server_of("train-1-0-0") is None  # forgotten with the session

    asyncio.run(main())
    servers = [row["turns"][0][2] for row in recorded(tmp_path, "rollouts")[1:]]
    # rendezvous hashing spreads twelve sessions over both
    assert len(servers) == 12 and set(servers) == {0, 1}
