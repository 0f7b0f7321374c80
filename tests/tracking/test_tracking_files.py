"""metrics.jsonl and rollout files."""

from __future__ import annotations

import json
import math
import stat
import subprocess
import sys
from array import array
from dataclasses import replace
from datetime import date

import httpx
import pytest
from tracking_rollouts import new, say, three

from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.following import is_transient
from agenttrain.tracking.rollouts import (
    read_rollout,
    read_step,
    rollout_record,
    step_path,
    write_step,
)
from agenttrain.tracking.run_folder import FolderInUse, lock_folder, read_summary, update_summary
from agenttrain.tracking.tracker import Tracker, cut
from agenttrain.types import Completion, Finish
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import dumps, open_to_append, read_rows


def test_what_the_trainer_computed_is_in_the_file_and_may_be_missing(tmp_path):
    rollout = new(0, 1.0)
    say(rollout, (5, 2))
    old = rollout_record(rollout)
    assert "entropies" not in old["trajectories"][0]
    again = read_rollout(old, rollout.task)
    assert (
        again.trajectories[0].trainer_logprobs is None and again.trajectories[0].entropies is None
    )
    rollout.trajectories[0].trainer_logprobs = array("f", [-0.1, -12.3456789])
    rollout.trajectories[0].entropies = array("f", [0.0, math.nan])
    write_step(tmp_path, 1, [rollout])
    (record,) = read_step(tmp_path, 1)
    (trajectory,) = record["trajectories"]
    assert trajectory["trainer_logprobs"] == [-0.1, -12.345679]
    assert trajectory["entropies"] == [0.0, None]
    again = read_rollout(record, rollout.task)
    assert list(again.trajectories[0].trainer_logprobs) == pytest.approx([-0.1, -12.345679])
    assert again.trajectories[0].entropies[0] == 0.0 and math.isnan(
        again.trajectories[0].entropies[1]
    )


def test_appended_rows_are_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open_to_append(path) as metrics:
        metrics.write('{"step":1}\n')
        assert path.read_text() == '{"step":1}\n'
        metrics.write('{"step":2}\n')
    with open_to_append(path) as metrics:
        metrics.write('{"step":3}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_numbers_that_json_does_not_have_become_null():
    row = {"kl": math.nan, "loss": math.inf, "reward": 0.1 + 0.2}
    assert dumps(row) == '{"kl":null,"loss":null,"reward":0.30000000000000004}'


def test_cut_keeps_the_bytes_of_earlier_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step},  "reward":0.{step}}}\n' for step in (1, 2, 3, 4)]
    path.write_text("".join(lines))
    cut(path, 2)
    assert path.read_text() == "".join(lines[:2])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    cut(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("garbage", [b"\xff\x00\n", b"nonsense\n", b"[3]\n", b'{"rew'])
def test_cut_takes_anything_away_that_follows(tmp_path, garbage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n' + garbage + b'\n{"step":3}\n')
    cut(path, 2)
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_cut_tells_of_garbage_before_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step":1}\n\xff\n{"step":2}\n'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*Mend or remove that line"):
        cut(path, 2)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "summary.json", "text")
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_private_file_can_be_read_by_its_user_alone(tmp_path):
    write_atomically(tmp_path / "key.json", "secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key.json").stat().st_mode) == 0o600
    assert (tmp_path / "key.json").read_text() == "secret"


@pytest.mark.parametrize("content", ["{torn", "[]", "\xff"])
def test_a_broken_summary_is_told_and_replaced(tmp_path, capsys, content):
    path = tmp_path / "summary.json"
    path.write_text(content, encoding="latin-1")
    update_summary(tmp_path, status="failed")
    assert f"warning: {path}: not readable, it will be replaced" in capsys.readouterr().err
    assert read_summary(tmp_path) == {"status": "failed"}


def test_a_folder_is_held_by_one_process(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from agenttrain.tracking.run_folder import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    refused = pytest.raises(FolderInUse, match=r"run: another process .*hydra\.run\.dir")
    with refused, lock_folder(tmp_path / "run"):
        pass
    other.kill()
    other.communicate()
    with lock_folder(tmp_path / "run"):
        pass


def test_cut_leaves_a_missing_file_missing(tmp_path):
    cut(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2,"rew')
    assert list(read_rows(path)) == [{"step": 1}]
    with open_to_append(path) as metrics:
        metrics.write('{"step":2}\n')
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_a_broken_line_is_told_with_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not JSON"):
        list(read_rows(path))


def test_rollout_file_round_trip(tmp_path):
    rollouts = three()
    write_step(tmp_path, 1, rollouts)
    assert step_path(tmp_path, 1) == tmp_path / "rollouts" / "step-000001.jsonl"
    records = list(read_step(tmp_path, 1))
    for whole, rollout in zip(records, rollouts, strict=True):
        (record,) = whole["trajectories"]
        assert record["token_ids"] == list(rollout.trajectories[0].token_ids)
        assert record["logprobs"] == rollout.trajectories[0].rollout_logprobs
        mask = [
            int(span["origin"] == "sampled")
            for span in record["spans"]
            for _ in range(span["start"], span["end"])
        ]
        assert mask == rollout.trajectories[0].loss_mask
    #             <user> What… </turn> <assistant> | add(x=3) </turn> | <tool> | no… | </turn> <as…
    (second,) = records[1]["trajectories"]
    assert second["token_ids"] == [1, 3, 2, 4, 6, 2, 7, 9, 2, 4, 10]
    names = ("origin", "start", "end", "turn", "policy_version", "advantage")
    assert second["spans"][:3] == [
        dict(zip(names, ("prompt", 0, 4, 0, None, None), strict=True)),
        {**dict(zip(names, ("sampled", 4, 6, 0, 7, 0.5), strict=True)), "finish": "stop"},
        dict(zip(names, ("template", 6, 7, 0, None, None), strict=True)),
    ]
    assert (second["role"], second["parent"]) == ("main", None)
    assert records[1]["tool_calls"] == [
        {
            "id": "call_0_0",
            "name": "add",
            "arguments": {"a": 3},
            "error": "invalid_arguments",
            "seconds": 0.0,
        }
    ]
    assert records[1]["stop_reason"] == "max_tokens"


def test_rollout_record_has_exactly_the_documented_keys():
    assert " ".join(rollout_record(three()[0])) == (
        "task_id group_id rollout_id stop_reason tool_calls rewards reward columns trajectories"
    )
    (trajectory,) = rollout_record(three()[0])["trajectories"]
    assert " ".join(trajectory) == "role parent messages token_ids spans logprobs"


def test_columns_are_in_the_file_and_what_json_does_not_have_is_text():
    columns = {"answer": "Oslo", "day": date(2026, 1, 31), "scores": (1, 0.5), 7: {"seven": None}}
    rollout = new(0, 1.0)
    rollout.task = replace(rollout.task, columns=columns)
    assert json.loads(dumps(rollout_record(rollout)))["columns"] == {
        "answer": "Oslo",
        "day": "2026-01-31",
        "scores": [1, 0.5],
        "7": {"seven": None},
    }


def test_spans_of_a_completion_across_a_weight_update_cover_its_tokens():
    rollout = new(0, 1.0)
    completion = Completion(
        token_ids=(5, 10, 2), logprobs=(-1.0, -2.0, -3.0), finish=Finish.stop,
        versions=((7, 1), (8, 2)),
    )  # fmt: skip
    rollout.trajectories[0].append_sampled(completion, rollout.trajectories[0].token_ids)
    spans = rollout_record(rollout)["trajectories"][0]["spans"]
    assert [(s["start"], s["end"], s["policy_version"]) for s in spans] == [
        (0, 4, None),
        (4, 5, 7),
        (5, 7, 8),
    ]


def test_rollouts_are_written_by_group_and_sample_up_to_the_limit(tmp_path):
    arrived = [(1, "g1"), (0, "g0"), (0, "g1"), (1, "g0")]
    rollouts = [new(sample, 0.0, group) for sample, group in arrived]
    write_step(tmp_path, 1, rollouts)
    write_step(tmp_path, 2, rollouts, 3)
    write_step(tmp_path, 3, rollouts, 0)
    names = ["g1-0", "g1-1", "g0-0", "g0-1"]
    assert [record["rollout_id"] for record in read_step(tmp_path, 1)] == names
    assert [record["rollout_id"] for record in read_step(tmp_path, 2)] == names[:3]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        "step-000001.jsonl",
        "step-000002.jsonl",
    ]


def test_text_that_is_no_unicode_survives_the_file(tmp_path):
    rollout = new(0, 0.0)
    say(rollout, (10, 2))
    rollout.trajectories[0].messages.append(
        {"role": "tool", "content": "half a pair \ud83d, a line\u2028, NUL \x00"}
    )
    rollout.rewards = {"answer": math.nan}
    write_step(tmp_path, 1, [rollout])
    (record,) = read_step(tmp_path, 1)
    assert record["trajectories"][0]["messages"] == rollout.trajectories[0].messages
    assert record["rewards"] == {"answer": None}


def test_resuming_continues_metrics_after_the_checkpoint(tmp_path):
    config = TrackerConfig(rollouts="none")
    settings = {"project": "shop", "name": "run", "total_steps": 4}
    with Tracker(tmp_path, config, **settings) as tracker:
        for step in (1, 2, 3):
            tracker.step(step, {"reward": step / 10}, three())
    with Tracker(tmp_path, config, **settings, resume_step=2) as tracker:
        tracker.step(3, {"reward": 0.7}, three())
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.7)]
    assert not (tmp_path / "rollouts").exists()


def test_resuming_takes_back_the_alarms_of_steps_that_it_repeats(tmp_path):
    settings = {"project": "shop", "name": "run", "total_steps": 4}
    config = TrackerConfig(rollouts="none")
    with Tracker(tmp_path, config, **settings) as tracker:
        tracker.warn("of no alarm")
        for step in (2, 3):
            tracker.alarm({"step": step, "text": f"alarm {step}", "rollouts": []})
            tracker.warn(f"guard: step {step}: alarm {step} (guards.reward_hacking)")
    with Tracker(tmp_path, config, **settings, resume_step=2) as tracker:
        summary = read_summary(tmp_path)
        assert [alarm["step"] for alarm in summary["alarms"]] == [2]
        assert [text.partition(" (")[0] for text in summary["warnings"]] == [
            "of no alarm",
            "guard: step 2: alarm 2",
        ]
        tracker.alarm({"step": 3, "text": "alarm 3", "rollouts": []})
    assert [alarm["step"] for alarm in read_summary(tmp_path)["alarms"]] == [2, 3]
    Tracker(tmp_path, config, **settings, resume_step=0).close()
    assert "alarms" not in read_summary(tmp_path)


@pytest.mark.parametrize("setting", ["some", "-1", "1.5", ""])
def test_a_bad_number_of_rollouts_is_refused(setting):
    with pytest.raises(ValueError, match="expected all, none, or a whole number"):
        TrackerConfig(rollouts=setting)


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://tracker/table")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionResetError("reset"), True),
        (httpx.ConnectError("no route to host"), True),
        (httpx.ReadTimeout("no answer"), True),
        (answered(503), True),
        (answered(429), True),
        (answered(413), False),
        (ValueError("a column of lists"), False),
    ],
    ids=str,
)
def test_only_errors_that_pass_are_tried_again(error: Exception, passing: bool) -> None:
    assert is_transient(error) is passing
    wrapped = RuntimeError("upload failed")
    wrapped.__cause__ = error
    assert is_transient(wrapped) is passing
