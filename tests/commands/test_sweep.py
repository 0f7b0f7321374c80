"""Sweeps without a process: which runs there are, how they stand, the table and the picture."""

from __future__ import annotations

import fcntl
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.types import Override

from agenttrain import cli
from agenttrain.commands.sweep import compare as plot
from agenttrain.commands.sweep.config import METRICS, Direction, objective_problems
from agenttrain.commands.sweep.expand import expand
from agenttrain.commands.sweep.expand import parse as parsed
from agenttrain.commands.sweep.process import JobEnd
from agenttrain.commands.sweep.record import (
    SweepJob,
    SweepRecord,
    TrialSearch,
    is_job,
    job_state,
    job_states,
    quote_path,
    read_record,
    status_counts,
    varying_settings,
    write_record,
)
from agenttrain.commands.sweep.run import divide_machine, record_end, trials
from agenttrain.commands.sweep.search import Trial, corners, next_trial
from agenttrain.commands.sweep.table import compare_jobs
from agenttrain.commands.verb import STDOUT
from agenttrain.commands.verbs import DECLARED
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.run_folder import update_summary
from agenttrain.types import ConfigError


def runs(*overrides: str) -> list[list[str]]:
    with hydra_session(Source()):
        return expand(overrides, Source()).runs


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two rates of learning x two seeds, the last of which has not begun; its second job failed."""
    folder = tmp_path / "shop" / "sweep"
    jobs = [
        SweepJob(folder=str(n), overrides=["steps=2", f"optimizer.lr={lr}", f"seed={seed}"])
        for n, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)])
    ]
    write_record(folder, SweepRecord(verb="train", objective="eval/pass@1", jobs=jobs))
    for number, (score, status) in enumerate([(0.5, "finished"), (0.0, "failed"), (0.25, None)]):
        run = folder / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_text(
            f'{{"step":1,"reward":0.0}}\n{{"step":2,"reward":{score}}}\n'
        )
        told = {"after": {"pass@1": score, "reward": score}} if status == "finished" else None
        error = "OSError: [Errno 28] the disk is full" if status == "failed" else None
        update_summary(run, verb="train", status=status, eval=told, error=error, seconds=10.0)
    return folder


def finish(run: Path, score: float) -> None:
    run.mkdir(exist_ok=True)
    update_summary(run, status="finished", error=None, eval={"after": {"pass@1": score}})


def test_configurations_one_by_one_are_combined_with_the_values() -> None:
    listed = "sweep.runs=['algorithm=rloo optimizer.lr=1e-4','steps=5']"
    found = runs("sweep=list", "seed=3,4", listed)
    common = ["sweep=list", listed]
    assert found == [
        ["algorithm=rloo", "optimizer.lr=1e-4", "seed=3", *common],
        ["algorithm=rloo", "optimizer.lr=1e-4", "seed=4", *common],
        ["steps=5", "seed=3", *common],
        ["steps=5", "seed=4", *common],
    ]


def test_trials_are_drawn_from_ranges_and_run_with_every_seed() -> None:
    overrides = ("optimizer.lr=tag(log, interval(1e-4, 1e-2))", "algorithm=grpo,rloo", "seed=1,2")
    found = runs(*overrides, "tasks_per_step=int(interval(2, 4))", "sweep.trials=20")
    assert len(found) == 40
    drawn = [tuple(text.partition("=")[2] for text in run[:3]) for run in found[::2]]
    assert len(set(drawn)) == 20
    rates = [float(rate) for rate, _, _ in drawn]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    # Half of a logarithmic range lies below its geometric mean, 1e-3; of an even one 9 %.
    assert sum(rate < 1e-3 for rate in rates) >= 5
    assert {algorithm for _, algorithm, _ in drawn} == {"grpo", "rloo"}
    assert {tasks for _, _, tasks in drawn} == {"2", "3", "4"}
    seeds = [[text for text in run if text.startswith("seed=")] for run in found]
    assert seeds == [["seed=1"], ["seed=2"]] * 20
    assert runs(*overrides, "sweep.trials=3") == runs(*overrides, "sweep.trials=3")
    other = runs(*overrides, "sweep.trials=3", "sweep.trials_seed=1")
    assert other[0][:2] != runs(*overrides, "sweep.trials=3")[0][:2]


def test_trials_of_values_alone_are_never_the_same_twice() -> None:
    found = runs("steps=1,2,3", "algorithm=grpo,rloo", "sweep.trials=6")
    assert len({tuple(run) for run in found}) == 6


@pytest.mark.parametrize("option", ["grid", "list", "random", "optuna"])
def test_every_example_composes(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(runs(f"sweep={option}")) in (4, 6, 8)
    assert cli.main([f"sweep={option}", "--cfg", "job"]) == 0
    assert "objective: eval/pass@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-m seed=0,1 sweep.objective=eval/pas@1", "did you mean 'eval/pass@1'?"),
        ("-m seed=0,1 sweep.objective=rewrd", "did you mean 'reward'?"),
        ("-m seed=0,1 eval.questions=0 sweep.objective=eval/reward", "evaluates nothing"),
        ("-m seed=0,1 sweep.objective=kl", "there is no KL; set algorithm.kl.beta="),
        ("eval -m seed=0,1 sweep.objective=reward", "expected one of: eval/reward, eval/pass@1"),
        ("-m seed=0,1 sweep.trials=2", "sweep.trials=2: nothing varies"),
        ("-m steps=1,2 sweep.trials=3", "there are only 2 combinations"),
        ("-m optimizer.lr=interval(1e-4,1e-3)", "add sweep.trials=… to draw"),
        ("-m optimizer.lr=interval(2,1) sweep.trials=1", "optimizer.lr=interval(2,1): must rise"),
        ("-m optimizer.lr=tag(log,interval(0,1)) sweep.trials=1", "with log from above 0"),
        ("-m optimizer.lr=interval(1,inf) sweep.trials=1", "between finite numbers"),
        ("-m optimizer.lr=tag(lg,interval(1,2)) sweep.trials=1", "the tag 'lg' means nothing"),
        ("-m steps=tag(log,choice(1,2)) sweep.trials=1", "the tag log is for interval(…)"),
        ("-m steps=interval(1,2) sweep.trials=1", "steps=1."),
        (
            "-m sweep=optuna sweep.trials=null",
            "sweep.sampler=tpe: needs a number of trials; add",
        ),
        ("-m sweep=optuna sweep.objective=null", "sweep.sampler=tpe chooses by it"),
        ("-m sweep=optuna sweep.runs=['steps=1']", "cannot be combined with sweep.sampler=tpe"),
        ("-m sweep=optuna sweep.sampler=gp", "expected one of: random, tpe"),
        ("-m sweep=optuna algorithm=grpo,ppo", "in the run optimizer.lr=0.0001 algorithm=ppo"),
        ("-m sweep=optuna optimizer.lr=interval(0,1)", "optimizer.lr=0.0: must be more than 0"),
        ("-m sweep=optuna hydra.sweep.subdir=x", "a search numbers its jobs"),
        ("-m steps=1,2 sweep.sampler=tpe sweep.trials=3 sweep.objective=loss", "only 2 combinat"),
        ("-m sweep=random sweep.direction=minimize", "does not choose by the objective"),
        ("-m seed=0,1 sweep.parallel=0", "sweep.parallel=0: must be at least 1"),
        ("-m seed=0,1 hydra/launcher=joblib", "sweep.parallel=2 runs two at a time"),
        ("-m seed=0,1 hydra.launcher.n_jobs=2", "sweep.parallel=2 runs two at a time"),
        ("-m seed=0,1 hydra/sweeper=optuna", "sweep=optuna searches by sweep.objective"),
        ("-m seed=0,1 hydra.sweeper.n_trials=2", "sweep.trials=20 draws so many at random"),
        ("-m seed=range(4,1)", "seed=range(4,1): has no values"),
        ("check -m debug=tiny seed=range(4,1)", "seed=range(4,1): has no values"),
        ("-m seed=range(0,4,0)", "seed=range(0,4,0): has no end; change the last value or the st"),
        ("-m seed=range(0,inf)", "seed=range(0,inf): has no end"),
        ("-m seed=range(0,nan)", "seed=range(0,nan): has no end"),
        (
            "check -m seed=range(0,10000000)",
            "seed=range(0,10000000): 10000000 configurations; a sweep takes at most 10000; name",
        ),
        (
            "-m seed=range(0,200) steps=range(1,200)",
            "seed=range(0,200) steps=range(1,200): 39800 configurations",
        ),
        ("-m sweep=optuna steps=range(1,10000000)", "9999999 configurations; a sweep takes at"),
        ("-m sweep=random sweep.trials=6000 seed=1,2", "sweep.trials=6000: 12000 configurations"),
        ("-m seed=1,1", "seed=1: the sweep has this run twice; name each value once"),
        ("-m sweep=optuna seed=1,1", "seed=1: the sweep has this run twice"),
        ("-m sweep.runs=['seed=1','seed=2'] seed=3", "the sweep has this run twice"),
        ("check -m sweep=optuna sweep.objective=nope", "sweep.objective=nope: expected one of: "),
        ("-m hydra.sweeper=optuna", "hydra/sweeper=optuna: agenttrain chooses the runs itself"),
        ("-m sweep.trials=1,2 steps=1,2", "sweep.trials=1,2: is the sweep's own"),
        ("sweep=grid", "sweep=grid: has no effect in a single run; add -m"),
        ("-m seed=0,1 hydra.sweep.subdir=x", "every run needs a folder of its own"),
        ("-m resume=nope", "nope: is no sweep's folder"),
        ("eval -m run=nope", "a sweep starts new runs"),
        ("-m sweep=grid --cfg job", "--cfg: shows one run; leave -m out"),
        ("compare nope", "nope: is no sweep's folder"),
        ("compare nope --plot x.jpg", "--plot x.jpg: give a name that ends in .png"),
        ("compare nope --plot nowhere/x.svg", "--plot nowhere/x.svg: "),
        ('-m sweep.runs=["algorithm=\'grpo"]', "sweep.runs: algorithm='grpo: No closing quota"),
    ],
)
def test_what_cannot_be_is_refused(
    line: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, *line.split())
    assert list(tmp_path.iterdir()) == []


SEARCH = TrialSearch(
    trials=12,
    seed=0,
    direction="maximize",
    space=["optimizer.lr=tag(log, interval(1e-4, 1e-2))", "algorithm=grpo,rloo"],
    repeats=[["seed=0"], ["seed=1"]],
)


def axes_of(*space: str) -> dict[str, Override]:
    with hydra_session(Source()):
        return {axis.get_key_element(): axis for axis in parsed(space)}


def chosen_in_turn(
    axes: dict[str, Override], trials: list[Trial], count: int
) -> list[tuple[str, ...]]:
    """The next trials of a search whose objective is best for a rate of 0.001 and rloo."""
    for _ in range(count):
        values = next_trial(axes, 0, Direction.maximize, trials)
        assert values is not None
        result = -abs(math.log10(float(values[0])) + 3) + (values[1] == "rloo")
        trials = [*trials, Trial(values=values, result=result)]
    return [trial.values for trial in trials[-count:]]


def test_a_search_comes_nearer_to_the_best_of_its_space() -> None:
    trials = chosen_in_turn(axes_of(*SEARCH.space), [], 40)
    first, later = (
        statistics.fmean(abs(math.log10(float(rate)) + 3) for rate, _ in some)
        for some in (trials[:10], trials[10:])
    )
    # At random a rate is half a decade from the middle of two, and every other trial has rloo.
    assert later < 0.35 < first
    assert [algorithm for _, algorithm in trials[10:]].count("rloo") >= 22
    assert len(set(trials)) == 40


def test_a_search_that_goes_on_asks_what_an_unbroken_one_does() -> None:
    axes = axes_of(*SEARCH.space)
    unbroken = chosen_in_turn(axes, [], 15)
    results = [
        Trial(values=(rate, name), result=-abs(math.log10(float(rate)) + 3) + (name == "rloo"))
        for rate, name in unbroken[:12]
    ]
    assert chosen_in_turn(axes, results, 3) == unbroken[12:]
    failed = [*results[:11], replace(results[11], result=None, failed=True)]
    running = [*results[:11], replace(results[11], result=None)]
    for so_far in (failed, running):
        assert next_trial(axes, 0, Direction.maximize, so_far) is not None


def test_a_space_that_is_used_up_gives_nothing_more() -> None:
    axes = axes_of("steps=int(interval(1, 2))", "tasks_per_step=range(2, 8, 3)")
    trials = list[Trial]()
    for _ in range(4):
        values = next_trial(axes, 0, Direction.minimize, trials)
        assert values is not None
        trials.append(Trial(values=values, result=1.0))
    assert {one.values for one in trials} == {("1", "2"), ("1", "5"), ("2", "2"), ("2", "5")}
    assert next_trial(axes, 0, Direction.minimize, trials) is None


def test_every_choice_and_both_ends_are_checked_before_a_search() -> None:
    assert corners(axes_of("optimizer.lr=interval(1,9)", "algorithm=grpo,rloo,gspo")) == [
        ("1.0", "grpo"),
        ("9.0", "grpo"),
        ("1.0", "rloo"),
        ("1.0", "gspo"),
    ]


def test_a_trial_has_the_mean_of_its_seeds_once_all_have_ended(tmp_path: Path) -> None:
    values = (("0.001", "grpo"), ("0.002", "rloo"), ("0.003", "grpo"), ("0.004", "grpo"))
    jobs = [
        SweepJob(
            folder=f"{trial}-{seed}",
            overrides=[f"optimizer.lr={rate}", f"algorithm={name}", f"seed={seed}"],
        )
        for trial, (rate, name) in enumerate(values)
        for seed in (0, 1)
    ]
    record = SweepRecord(verb="train", objective="eval/pass@1", search=SEARCH, jobs=jobs)
    for folder, score in {"0-0": 0.25, "0-1": 0.75, "1-0": 0.5, "2-0": 0.5}.items():
        finish(tmp_path / folder, score)
    for folder, status in {"1-1": "failed", "2-1": "interrupted"}.items():
        (tmp_path / folder).mkdir()
        update_summary(tmp_path / folder, status=status)
    assert trials(tmp_path, record, SEARCH) == [
        Trial(values=values[0], result=0.5),
        Trial(values=values[1], failed=True),
        Trial(values=values[2]),  # is to go on
        Trial(values=values[3]),
    ]


@pytest.mark.parametrize(
    ("objective", "direction"),
    [("eval/pass@1", "maximize"), ("eval/loss", "minimize"), ("seconds", "minimize")],
)
def test_losses_and_seconds_are_minimized(objective: str, direction: str) -> None:
    wanted = ["sweep=optuna", f"sweep.objective={objective}"]
    with hydra_session(Source()):
        search = expand(wanted, Source()).search
        turned = expand([*wanted, "sweep.direction=maximize"], Source()).search
    assert search is not None and search.direction == direction
    assert turned is not None and turned.direction == "maximize"


def test_jobs_at_a_time_divide_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra_session(Source()):
        one = compose_run([], Source()).config
        two = compose_run(["distributed=ddp", "distributed.processes=2"], Source()).config
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert divide_machine("train", 1, [one], lambda: 8) == [{}]
    assert divide_machine("train", 2, [one], lambda: 1) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert divide_machine("train", 2, [two], lambda: 0) == [{"OMP_NUM_THREADS": "2"}] * 2
    gpus = [share["CUDA_VISIBLE_DEVICES"] for share in divide_machine("train", 2, [one], lambda: 4)]
    assert gpus == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert divide_machine("train", 4, [one], lambda: 4)[2] == {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(ConfigError, match=r"=3: 4 GPUs cannot be divided.*take 2 or 4"):
        divide_machine("train", 3, [one], lambda: 4)
    with pytest.raises(ConfigError, match=r"each job has 1 of 4 GPUs\ndistributed\.processes=2"):
        divide_machine("train", 4, [two], lambda: 4)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = SweepRecord(
        verb="sft",
        objective="eval/loss",
        options=["--config-name", "mine"],
        shared=["steps=6"],
        jobs=[SweepJob(folder="0", overrides=["seed=0", "data.path='a b'"])],
    )
    write_record(tmp_path / "s", record)
    assert replace(read_record(tmp_path / "s"), signature=None) == record
    assert read_record(tmp_path / "s").signature is not None
    assert read_record(tmp_path / "s").is_signed_by_user
    searching = replace(record, search=SEARCH)
    write_record(tmp_path / "s", searching)
    assert (
        read_record(tmp_path / "s").search == SEARCH
        and read_record(tmp_path / "s").is_signed_by_user
    )
    arguments = record.arguments(tmp_path / "s", record.jobs[0], "steps=3")
    assert arguments[:6] == ["sft", "--config-name", "mine", "seed=0", "data.path='a b'", "steps=3"]
    assert arguments[6] == f"hydra.run.dir={quote_path(tmp_path / 's' / '0')}"
    assert is_job(tmp_path / "s" / "0") and not is_job(tmp_path / "s" / "2")
    assert not is_job(tmp_path / "0")
    (tmp_path / "s" / "sweep.json").write_text('{"jobs": 3}')
    with pytest.raises(ConfigError, match=r"sweep\.json: is no record of a sweep"):
        read_record(tmp_path / "s")


def test_what_varies_is_what_differs_or_is_not_everywhere() -> None:
    jobs = [["steps=2", "seed=0"], ["steps=2", "seed=1", "++tools.sql.timeout_s=5"]]
    record = SweepRecord(verb="train", jobs=[SweepJob(folder="", overrides=o) for o in jobs])
    assert varying_settings(record) == [{"seed": "0"}, {"seed": "1", "tools.sql.timeout_s": "5"}]


def test_jobs_stand_as_their_folders_say(sweep: Path) -> None:
    record = read_record(sweep)
    told = [(job.status, job.unfinished) for job in job_states(sweep, record)]
    assert told == [
        ("finished", False),
        ("failed", True),
        ("killed", True),  # it began, says nothing of its end, and nobody holds its folder
        ("never started", True),
    ]
    (sweep / "3").mkdir()
    update_summary(sweep / "3", status="preempted")
    with (sweep / "2" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = job_states(sweep, record)
    assert [job.status for job in found[2:]] == ["running", "preempted"]
    assert not found[2].unfinished and found[3].unfinished
    assert status_counts(found) == "1 finished, 1 failed, 1 preempted, 1 running"


def test_a_job_that_cannot_tell_how_it_ended_is_told_of(tmp_path: Path) -> None:
    job = SweepJob(folder="0", overrides=[])
    ended = JobEnd(code=137, last_words="Killed")
    record_end(tmp_path, ended, signalled=False)
    found = job_state(tmp_path, job)
    assert (found.status, found.error) == ("failed", "exit code 137: Killed")
    update_summary(tmp_path, status="preempted", error=None)
    record_end(tmp_path, ended, signalled=False)
    assert job_state(tmp_path, job).status == "preempted"  # its own word stands
    update_summary(tmp_path, status="running")
    record_end(tmp_path, JobEnd(code=130, last_words=""), signalled=True)
    assert job_state(tmp_path, job).status == "interrupted"


def test_figures_are_the_mean_of_the_seeds_that_finished(sweep: Path) -> None:
    finish(sweep / "1", 1.0)
    found = compare_jobs(sweep, read_record(sweep), [])
    assert found.keys == ["optimizer.lr"] and found.metrics[0] == "eval/pass@1"
    figures = [one.figures.get("eval/pass@1") for one in found.configurations]
    # 0.5 and 1.0: mean 0.75, variance (0.25² + 0.25²) / 1 = 0.125, whose root is 0.354
    assert str(figures[0]) == "0.75 ± 0.35" and figures[0] is not None and figures[0].n == 2
    assert figures[1] is None
    assert compare_jobs(sweep, read_record(sweep), ["reward"]).results[0]["reward"] == 0.5


def test_compare_tells_results_and_how_to_go_on(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "1" / "config.yaml").touch()
    assert cli.main(["compare", str(sweep)]) == 0
    text = capsys.readouterr().out
    assert "1 finished, 1 failed, 1 killed, 1 never started" in text
    assert "1 finished, 1 failed (0, 1)" in text
    assert f"{sweep}/1  failed: OSError: [Errno 28] the disk is full" in text
    assert f"\n    agenttrain resume={sweep}/1\n" in text
    new = f"agenttrain train steps=2 optimizer.lr=0.2 seed=1 hydra.run.dir={sweep}/3"
    assert new in text
    assert f"agenttrain -m resume={sweep}\n" in text
    for number in "123":
        finish(sweep / number, 0.5)
    assert cli.main(["compare", str(sweep)]) == 0
    assert "resume" not in capsys.readouterr().out


def test_a_picture_that_cannot_be_is_told_before_the_table(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert "pip install 'agenttrain[sweep]'" in refused(
            capsys, "compare", str(sweep), "--plot", str(sweep / "x.svg")
        )
    pytest.importorskip("matplotlib", reason="pip install 'agenttrain[sweep]'")
    (sweep / "x.svg").mkdir()
    assert cli.main(["compare", str(sweep), "--plot", str(sweep / "x.svg")]) == 2
    assert capsys.readouterr().out == ""


def test_what_a_sweep_cannot_go_on_with_is_refused(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep.parent)

    def told(*changes: str) -> str:
        return refused(capsys, "-m", "resume=sweep", *changes)

    assert "optimizer.lr=1: cannot be combined with resume=sweep" in told("optimizer.lr=1")
    assert "hydra/launcher=joblib: cannot be combined" in told("hydra/launcher=joblib")
    assert "sweep.parallel=0: must be at least 1" in told("sweep.parallel=0")
    assert "all jobs of sweep were known when it was started" in told("sweep.trials=5")
    record = read_record(sweep)
    search = replace(SEARCH, space=["optimizer.lr=0.1,0.2"])
    write_record(sweep, replace(record, search=search))
    assert "sweep.trials=1: sweep has 2 trials already" in told("sweep.trials=1")
    assert "there are only 2 combinations" in told("sweep.trials=3")
    assert read_record(sweep).search == search


def test_a_sweep_that_runs_is_left_alone(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep.parent)
    with (sweep / ".running").open("w") as file:  # another process has it
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "sweep: another process runs this sweep" in refused(capsys, "-m", "resume=sweep")
    assert not (sweep / "3").exists()


def test_compare_for_other_programs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(sweep), "eval/reward", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| optimizer.lr | eval/reward | jobs |"
    assert lines[2] == "| 0.1 | 0.5 | 1 finished, 1 failed (0, 1) |"
    assert cli.main(["compare", str(sweep), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [job["status"] for job in found["jobs"]][:2] == ["finished", "failed"]
    assert found["configurations"][0]["figures"]["eval/pass@1"] == {
        "mean": 0.5,
        "std": None,
        "n": 1,
    }
    assert found["resume"] == f"agenttrain -m resume={sweep}"


def test_an_unknown_figure_is_refused(sweep: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval/pas@1: no finished job .*did you mean 'eval/pass"):
        compare_jobs(sweep, read_record(sweep), ["eval/pas@1"])


def test_compares_arguments() -> None:
    args, _ = DECLARED["compare"].parse(["s", "reward", "--plot=a.svg", "loss", "--json"])
    assert (args.folder, args.metrics) == (Path("s"), ["reward", "loss"])
    assert (args.plot, args.json) == (Path("a.svg"), STDOUT)


def test_a_curve_is_averaged_over_steps() -> None:
    rows = [{"step": n, "reward": value} for n, value in enumerate([0.0, None, 1.0, 1.0])]
    # Steps 0, 2 and 3 have the figure: 0, (0 + 1) / 2, (1 + 1) / 2
    assert plot.smoothed(rows, "reward", 2) == {0: 0.0, 2: 0.5, 3: 1.0}


@pytest.mark.slow
def test_the_picture_is_of_the_kind_that_its_name_says(sweep: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'agenttrain[sweep]'")
    finish(sweep / "2", 0.25)
    found = compare_jobs(sweep, read_record(sweep), [])
    beginnings = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!doctype html>"}
    for kind, beginning in beginnings.items():
        path = tmp_path / f"picture.{kind}"
        plot.write(found, path)
        assert path.read_bytes().startswith(beginning)
    page = (tmp_path / "picture.html").read_text()
    assert "<svg" in page and "<td>0.1</td><td>0.5</td>" in page


def test_objectives_that_a_run_has_are_accepted(tmp_path: Path) -> None:
    names = ["eval/reward_greedy", "eval/pass@4", "success", "rewards/exact_match/mean", "seconds"]
    with hydra_session(Source()):
        for name in names:
            overrides = [f"sweep.objective={name}", "eval.samples=4"]
            config = compose_run(overrides, Source()).config
            assert list(objective_problems("train", config)) == []
        config = compose_run(["sweep.objective=eval/loss"], Source()).config
    assert list(objective_problems("sft", config)) == []
    assert METRICS["eval"] == ()
