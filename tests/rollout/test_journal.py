"""The journal of sampled groups: what a resumed run may use of it, and what is removed."""

from __future__ import annotations

from pathlib import Path

from agenttrain.rollout.asynchronous.journal import Journal, settings_digest
from agenttrain.rollout.collector import Collected
from agenttrain.runs.rollout_messages import CODEC
from agenttrain.tracking.rollouts import policy_versions
from agenttrain.types import Completion, Finish, Rollout, Task

TASK = Task(task_id="t", messages=())


def group(*versions: int) -> Collected:
    """A group of one rollout, with a token of each version."""
    rollout = Rollout(task=TASK, rollout_id="r", reward=0.1)
    completion = Completion(
        token_ids=tuple(range(len(versions))),
        logprobs=(-0.3,) * len(versions),
        finish=Finish.length,
        versions=tuple((version, 1) for version in versions),
    )
    rollout.trajectories[0].append_sampled(completion, ())
    return Collected(groups=[[rollout]], places=[0])


def journal(folder: Path, settings: str = "s", *, step: int = 1) -> Journal:
    made = Journal(folder, CODEC, settings)
    made.resume(step=step, version=step - 1, max_staleness=2)
    return made


def resumed(folder: Path, step: int, *, max_staleness: int = 2, settings: str = "s"):
    made = Journal(folder, CODEC, settings)
    files, lost = made.resume(step=step, version=step - 1, max_staleness=max_staleness)
    made.close()
    return sorted(files), lost


def files(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (folder / "groups").iterdir())


def test_a_group_comes_back_with_every_bit(tmp_path: Path) -> None:
    made = journal(tmp_path)
    made.add(0, 1, TASK, group(0), 1.5, 2.5)
    again = Journal(tmp_path, CODEC, "s")
    found, _ = again.resume(step=1, version=0, max_staleness=0)
    assert again.read(found[0]) == group(0)
    assert tuple(sorted(policy_versions(group(3, 4).rollouts))) == (3, 4)


def test_groups_of_weights_that_are_lost_or_too_old_are_sampled_again(tmp_path: Path) -> None:
    """Two tasks a step; the run was at version 3 when it died, the checkpoint is of step 2."""
    made = journal(tmp_path)
    made.add(3, 2, TASK, group(0), 0, 0)  # trained before the checkpoint
    made.add(4, 3, TASK, group(1, 2), 0, 0)
    made.add(5, 3, TASK, group(2, 3), 0, 0)  # version 3 came after the checkpoint, and is lost
    made.add(6, 4, TASK, group(1), 0, 0)  # age 2 at step 4, which trains version 3
    made.add(7, 4, TASK, group(0, 2), 0, 0)  # age 3
    made.close()
    assert resumed(tmp_path, 3) == ([4, 6], 2)
    # The lines of step 2 stay; of the others those that are left.
    assert [serial for serial in (3, 4, 6) if f'"serial":{serial},' in text(tmp_path)] == [3, 4, 6]
    assert '"serial":5,' not in text(tmp_path) and '"serial":7,' not in text(tmp_path)
    assert files(tmp_path) == ["000004", "000006"]
    assert resumed(tmp_path, 3, max_staleness=1) == ([4], 1)


def text(folder: Path) -> str:
    return (folder / "journal.jsonl").read_text()


def test_damaged_files_and_other_settings_are_not_used(tmp_path: Path) -> None:
    made = journal(tmp_path)
    for serial in (0, 1, 2):
        made.add(serial, 1, TASK, group(0), 0, 0)
    made.close()
    first, second, _ = sorted((tmp_path / "groups").iterdir())
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.unlink()
    assert resumed(tmp_path, 1) == ([2], 2)
    assert resumed(tmp_path, 1, settings="other") == ([], 1)
    assert settings_digest({"a": 1, "b": [2]}) == settings_digest({"b": [2], "a": 1})


def test_lines_that_cannot_be_read_cost_their_groups_alone(tmp_path: Path) -> None:
    made = journal(tmp_path)
    for serial in (0, 1):
        made.add(serial, 1, TASK, group(0), 0, 0)
    made.close()
    first, second = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    lines = [b"\0\xff" + first[2:], b'{"serial":7}', b"[]", second, b'{"cut']
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join(lines))
    assert resumed(tmp_path, 1) == ([1], 3)
    assert files(tmp_path) == ["000001"]
    assert resumed(tmp_path, 1) == ([1], 0)


def test_files_go_when_no_checkpoint_can_need_them(tmp_path: Path) -> None:
    """Checkpoints of steps 2 and 4; step 6 was trained."""
    made = journal(tmp_path)
    made.add(0, 2, TASK, group(1), 0, 0)  # in the oldest checkpoint
    made.add(1, 5, TASK, group(4), 0, 0)  # a resume from step 4 trains it again
    made.add(2, 6, TASK, group(4, 5), 0, 0)  # version 5 is in no checkpoint
    made.add(3, 7, TASK, group(5), 0, 0)  # is not trained yet
    made.prune(step=6, oldest=2, newest=4)
    made.close()
    assert files(tmp_path) == ["000001", "000003"]


def test_a_process_that_lives_on_for_a_moment_harms_nothing(tmp_path: Path) -> None:
    """Both have the same serial; the resumed run's own line and file count."""
    orphan = journal(tmp_path)
    ours = journal(tmp_path)
    ours.add(0, 1, TASK, group(0), 0, 0)
    orphan.add(0, 1, TASK, group(0, 0), 0, 0)
    orphan.close()
    ours.close()
    again = Journal(tmp_path, CODEC, "s")
    found, lost = again.resume(step=1, version=0, max_staleness=0)
    assert (again.read(found[0]), lost) == (group(0), 0)
