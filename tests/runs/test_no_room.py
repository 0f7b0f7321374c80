"""Disks that are full, folders that are gone or may not be written: told, and survived."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny
from children import Ended, Moment, agenttrain, arm, in_child
from training_cases import policy, random_groups

from agenttrain.cli import main
from agenttrain.runs.provenance import write_config
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.run_folder import read_summary
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import UNWRITABLE, Checkpoints
from agenttrain.training.checkpoint_files import latest, verify
from agenttrain.utils.exit_codes import DONE, FAILED, REFUSED

pytestmark = pytest.mark.timeout(1200)  # whole runs, one after the other
RUN = (
    *("debug=tiny", "steps=4", "checkpoint.every=2", "eval.questions=0", "tracker=none"),
    *("reward=[]", "+reward.drawn._target_=drawing.drawn"),  # so that each step updates
)


def begin(folder: Path, moment: Moment) -> Ended:
    """A run to which something happens; after step 2 it has a checkpoint."""
    log = folder.parent.parent / "log.txt"
    return agenttrain(*RUN, f"hydra.run.dir={folder}", log=log, prepare=partial(arm, moment))


def assert_goes_on(folder: Path) -> None:
    log = folder.parent.parent / "again.txt"
    ended = agenttrain(f"resume={folder}", log=log)
    assert ended.code == DONE, ended.said
    assert read_summary(folder)["status"] == "finished"
    assert latest(folder / "checkpoints").name == "step-000004"


def again(folder: Path) -> str:
    return f"checkpoints/step-000002 stands; once this is mended: agenttrain resume={folder}"


def limit_files(size: int) -> None:
    """As a full disk: no file may grow beyond this."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def save_with_little_room(folder: Path) -> None:
    trained, saver = policy(), Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=2)
    written = saver.save(trained, step=1)
    train_policy(trained, random_groups(0))
    sizes = sorted({path.stat().st_size for path in written.iterdir()})
    assert len(sizes) > 5
    for size in (0, *(size - 1 for size in sizes)):
        limit_files(size)
        try:
            saver.save(trained, step=2)
        except UNWRITABLE as error:
            limit_files(resource.RLIM_INFINITY)
            told = f"{error}"
            assert ".step-000002.part" in told, (size, told)
        else:
            raise AssertionError(f"nothing was told at {size} bytes")
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000001"]
        verify(folder / "step-000001")
    assert saver.save(trained, step=2) == latest(folder)


@pytest.mark.long
def test_whichever_file_of_a_checkpoint_has_no_room_it_is_told(tmp_path: Path) -> None:
    in_child(partial(save_with_little_room, tmp_path / "checkpoints"), tmp_path / "log.txt")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for two checkpoints and a little."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)]
    try:
        subprocess.run(options, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system; run as root: scripts/test -k disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, left: int) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(max(free - left, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("left", [pytest.param(0, marks=pytest.mark.long), 100_000])
def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_when_there_is_room(small_disk, left):
    """Nothing fits: neither a row of metrics; or that does, and a checkpoint does not."""
    folder = small_disk / "runs" / "run"
    ended = begin(folder, Moment(kind="update", steps=2, action=partial(fill, small_disk, left)))
    assert ended.code == FAILED, ended.said
    assert "No space left on device" in ended.said
    assert str(folder) in ended.said and again(folder) in ended.said
    (small_disk / "filler").unlink()
    assert_goes_on(folder)


def replace_by_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("aside"))
    folder.write_text("")


@pytest.mark.slow
def test_a_checkpoint_folder_that_became_a_file_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    checkpoints = folder / "checkpoints"
    ended = begin(
        folder, Moment(kind="update", steps=2, action=partial(replace_by_a_file, checkpoints))
    )
    assert ended.code == FAILED, ended.said
    assert f"{checkpoints}/.step-000004.part" in ended.said and again(folder) in ended.said
    checkpoints.unlink()
    (folder / "aside").rename(checkpoints)
    assert_goes_on(folder)


def forbid(folder: Path) -> None:
    """Nobody may write: for root, who may all, by the file system's own flag."""
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i", str(folder)], check=True)
    else:
        folder.chmod(0o500)


def allow(folder: Path) -> None:
    if os.geteuid() == 0:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    else:
        folder.chmod(0o700)


@pytest.mark.slow
def test_a_folder_that_may_no_longer_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    checkpoints = folder / "checkpoints"
    try:
        forbid(tmp_path)
        allow(tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root may write everywhere here; run as another user: scripts/test -k written")
    try:
        ended = begin(folder, Moment(kind="update", steps=2, action=partial(forbid, checkpoints)))
    finally:
        allow(checkpoints)
    assert ended.code == FAILED, ended.said
    assert "not permitted" in ended.said or "Permission denied" in ended.said
    assert str(checkpoints) in ended.said and again(folder) in ended.said
    assert_goes_on(folder)


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the folder of a run in it, neither of which can be written."""
    place = tmp_path_factory.mktemp("read_only") / "shared"
    run = place / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "rollouts" / "step-000001.jsonl").write_text("")
    with hydra_session(Source()):
        write_config(run, compose_run(["debug=tiny"], Source()).plain, None)
    if os.geteuid() == 0:
        bound = ["mount", "--bind", "-o", "ro", str(place), str(place)]
        if subprocess.run(bound, capture_output=True).returncode:
            pytest.skip("root may write everywhere here; run as another user: scripts/test")
        yield place
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    else:
        folders = (run / "rollouts", run, place)
        for folder in folders:
            folder.chmod(0o500)
        yield place
        for folder in folders:
            folder.chmod(0o700)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["debug=tiny", "hydra.run.dir={0}/new"], "hydra.run.dir={0}/new: the run's folder cannot"),
        (["debug=tiny", "hydra.run.dir={0}/run/rollouts"], "{0}/run/rollouts may not be written"),
        (["view", "{0}/run"], "{0}/run/rollouts may not be written (read-only?); write the page"),
        (["resume={0}/run"], "resume={0}/run: {0}/run may not be written (read-only?); make it"),
        (["eval", "model=shop", "hydra.run.dir={0}/new"], "the run's folder cannot be made"),
        (
            ["-m", "debug=tiny", "seed=0,1", "hydra.sweep.dir={0}/new"],
            "hydra.sweep.dir={0}/new: {0} may not be written",
        ),
        (
            ["rescore", "{0}/run", "reward=[exact_match]", "to={0}/scores.jsonl"],
            "--to {0}/scores.jsonl: {0} may not be written",
        ),
    ],
)
def test_a_read_only_folder_is_told_in_a_sentence(read_only, capsys, arguments, told) -> None:
    assert main([text.format(read_only) for text in arguments]) == REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agenttrain: ") and told.format(read_only) in line
    assert ".lock" not in line


@pytest.mark.slow
def test_a_run_folder_that_vanishes_is_told_and_nothing_is_written_in_its_place(tmp_path) -> None:
    folder = tmp_path / "runs" / "run"
    moved = tmp_path / "moved"
    ended = begin(folder, Moment(kind="update", steps=2, action=partial(folder.rename, moved)))
    assert ended.code == FAILED, ended.said
    assert f"{folder}: the run's folder was moved or deleted" in ended.said
    assert not folder.exists()
    shutil.move(moved, folder)
    assert_goes_on(folder)
