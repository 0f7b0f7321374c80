"""The command as a user types it, up to where a run would begin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_kit import parse
from omegaconf import OmegaConf

from agenttrain import cli
from agenttrain.commands.verbs import split_verb
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.utils.model_path import model_folder

ROOT = Path(__file__).parents[1]
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
HAS_VLLM = find_spec("vllm") is not None
WITHOUT_VLLM = pytest.mark.skipif(HAS_VLLM, reason="vLLM is here: run scripts/test without")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and the interpreter's state as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return tmp_path


ANSWERS = """
import contextlib, io, json, sys
from agenttrain.cli import main
for arguments in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main(arguments)
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    print(json.dumps(["ANSWER", arguments, code, errors.getvalue(), heavy]))
"""


def test_answers_come_without_torch_and_without_a_folder(elsewhere: Path) -> None:
    """One process answers all: the first that imports torch is named."""
    commands = [
        *(["--help"], ["--info", "defaults-tree"], ["steps=0"], ["algoritm=rloo"]),
        *(["data.test.split=typo"], ["data=file", "data.train.path=a.csv", "data.test.path=b.csv"]),
        ["-m", "seed=1,2", "steps=0"],
        *([] if HAS_GPU else [["distributed=ddp"]]),
        *([] if HAS_VLLM else [["engine=vllm"]]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS, json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    answers = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('["ANSWER"')
    ]
    assert [arguments for _, arguments, *_ in answers] == commands, done.stderr
    for _, arguments, code, errors, heavy in answers:
        fails = "=" in arguments[-1]
        assert (code, bool(errors), heavy) == (2 if fails else 0, fails, []), arguments
        assert "Traceback" not in errors
    assert list(elsewhere.iterdir()) == []


def test_check_prints_the_certificate_without_a_folder(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    assert "certificate passed" in out
    assert "passed   call of sql" in out
    assert list(elsewhere.iterdir()) == []


def test_check_says_what_is_wrong_with_a_tool(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    Path("my_untyped_tools.py").write_text("def find(word): ...\n")
    assert cli.main(["check", "tools.find._target_=my_untyped_tools.find"]) == 2
    assert "parameter 'word' has no type" in capsys.readouterr().err


def test_help_names_verbs_groups_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "train          train an agent" in text
    assert "algorithm           bnpo, cispo, dapo, dr_grpo" in text
    assert "these may change:" in text and "steps, eval, checkpoint, tracker, engine" in text
    assert max(len(line) for line in text.splitlines()) <= 100 + len(str(ROOT))


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("agenttrain: ") for line in err.splitlines())
    return err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trian", "trian: no such verb (did you mean 'train'?); the verbs are train, sft, eval"),
        ("evl steps=3", "(did you mean 'eval'?)"),
        ("seed=1 check", "the verb comes first: agenttrain check"),
        ("seed=1 rloo", "rloo: settings are written key=value"),
        ("view nope", "agenttrain: view nope: is no run folder"),
        ("-m trian seed=1,2", "trian: no such verb (did you mean 'train'?)"),
        ("run=a&b", "did you mean agenttrain eval run='a&b'?"),
        ("--num_generations 8", "settings are written key=value; write algorithm.group_size=…"),
        ("--learning-rate=1e-5", "--learning-rate=1e-5: settings are written key=value; write opt"),
        ("--use_vllm true", "write engine.name=… (engine=vllm)"),
        ("--seed=3", "write seed=3"),
        ("sft engine._target_=a.B", "agenttrain: engine._target_=a.B: has no effect in agenttrain"),
        ("-m +hydra.sweeper.params.seed=[1,2]", "hydra.sweeper.params: is for files of the group"),
        ("--cfg jub", "invalid choice: 'jub'"),
        ("--cfg job algoritm=x", "unknown key (did you mean 'algorithm'?)"),
        ("--config-path x", "use --config-dir"),
        ("--config-dir /no/such", "--config-dir /no/such: there is no such folder"),
        ("eval resume=x", "resume=x: not with `agenttrain eval`; did you mean run=x?"),
        ("resume=", "resume=: no folder; name a run's (is a shell variable empty?), or leave it"),
        ("eval run=", "run=: no folder; name a run's"),
        ("resume=a resume=b", "resume=b: resume=a is there already; name one folder"),
        ("hydra.run.dir=", "hydra.run.dir=: no folder; name one"),
        ("-m seed=1,2 hydra.sweep.dir=", "hydra.sweep.dir=: no folder; name one"),
        ("run=x", "did you mean agenttrain eval run=x?"),
        ("resume=/no/such", "resume=/no/such: is no run folder"),
        ("eval run=/no/such", "run=/no/such: is no run folder"),
        ("-m seed=1,2 resume=x", "x: is no sweep's folder"),
        pytest.param("engine=vllm", "without one: scripts/install_vllm_cpu", marks=WITHOUT_VLLM),
        pytest.param("eval engine=vllm", "vLLM is not installed here", marks=WITHOUT_VLLM),
    ],
)
def test_a_wrong_command(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in errors(capsys, *line.split())


def test_a_sweep_is_checked_in_all_its_runs(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    text = errors(capsys, "-m", "seed=1,2", "tasks_per_step=12,10", "algorithm.minibatches=3")
    assert "in the run seed=1 tasks_per_step=10 algorithm.minibatches=3" in text
    assert "algorithm.minibatches=3: does not divide tasks_per_step=10" in text
    assert list(elsewhere.iterdir()) == []


def test_check_counts_every_run_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["check", "steps=10", "tasks_per_step=12", "algorithm.group_size=4,8", "-m"]) == 0
    )
    text = capsys.readouterr().out
    assert "48 per step, 480 in all" in text
    assert "96 per step, 960 in all" in text


def test_cfg_prints_the_composed_settings(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert cli.main(["--cfg", "job", "steps=17"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    assert (config.steps, config.algorithm.name) == (17, "grpo")
    assert list(elsewhere.iterdir()) == []


def test_modules_in_the_current_folder_are_found(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    Path("my_cli_tools.py").write_text(
        'def find(word: str, limit: int = 3) -> str:\n    """Find a word.\n\n    Args:\n'
        '        word: What to find.\n        limit: How often.\n    """\n'
    )
    find = "tools.find._target_=my_cli_tools.find"
    assert cli.main(["check", find, "tools.find.limit=5"]) == 0
    assert "tools       sql, final_answer, find" in capsys.readouterr().out
    assert "(did you mean 'limit'?)" in errors(capsys, "check", find, "tools.find.limt=5")


def test_a_finished_run_says_so(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    with hydra_session(Source()):
        plain = compose_run(["steps=9"], Source()).plain
    run = elsewhere / "my run"
    run.mkdir()
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    (run / "summary.json").write_text('{"status": "finished", "steps": 9}')
    before = sorted(run.iterdir())
    assert cli.main([f"resume={run}"]) == 0
    out = capsys.readouterr().out
    assert f"finished after 9 steps; for more of them: agenttrain resume='{run}' steps=18" in out
    assert "optimizer.schedule=linear ended at a learning rate near 0" in out
    assert sorted(run.iterdir()) == before
    # Checking the same with more steps is not finished, and counts what it would be.
    assert cli.main(["check", f"resume={run}", "steps=20"]) == 0
    assert "in 20 steps" in capsys.readouterr().out


def test_an_evaluation_keeps_out_of_a_folder_that_holds_a_run(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    with hydra_session(Source()):
        plain = compose_run([], Source()).plain
    latest = elsewhere / "run" / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (latest / name).write_text("{}")
    (elsewhere / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    assert "holds a run already" in errors(capsys, "eval", "run=run", "hydra.run.dir=run")


def test_the_verb_may_be_left_out() -> None:
    assert parse(["steps=3"]).verb == parse([]).verb == "train"
    assert parse(["eval", "steps=3"]).verb == "eval"


@pytest.mark.parametrize(
    ("line", "verb", "rest"),
    [
        ("check -m seed=1,2", "check", "-m seed=1,2"),
        ("-m check seed=1,2", "check", "-m seed=1,2"),
        ("--config-dir check eval seed=1", "eval", "--config-dir check seed=1"),
        ("--config-dir=mine view run", "view", "--config-dir=mine run"),
        ("--info defaults-tree", "train", "--info defaults-tree"),
        ("--config-dir", "train", "--config-dir"),
        ("seed=1 check", "train", "seed=1 check"),
    ],
)
def test_options_may_stand_before_the_verb(line: str, verb: str, rest: str) -> None:
    assert split_verb(line.split()) == (verb, rest.split())


def test_a_resume_in_a_yaml_is_refused(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    Path("experiment").mkdir()
    Path("experiment/mine.yaml").write_text("# @package _global_\nresume: my run\n")
    text = errors(capsys, "--config-dir", ".", "check", "experiment=mine")
    assert "resume=my run: has no effect in a YAML file" in text
    assert "agenttrain resume='my run'" in text


@pytest.mark.parametrize(
    ("overrides", "rate", "neutral"),
    [
        (["model.path=other"], "lr 1e-06", True),
        (["model.path=other", "experiment=calculator"], "lr 0.0005", False),
        (["model.path=other", "experiment=none"], "lr 1e-06", False),
        (["model.path=own"], "lr 0.0016", False),
        ([], "lr 0.0016", False),
    ],
)
def test_another_model_has_not_the_bundled_agents_settings(
    overrides: list[str],
    rate: str,
    neutral: bool,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundled = model_folder("bundled:shop")
    (elsewhere / "own").symlink_to(bundled)  # as a checkpoint of the bundled agent
    shutil.copytree(bundled, elsewhere / "other")
    sizes = json.loads((bundled / "config.json").read_text())
    (elsewhere / "other/config.json").write_text(json.dumps({**sizes, "intermediate_size": 8}))
    assert cli.main(["check", *overrides]) == 0
    out = capsys.readouterr().out
    assert f"optimizer   {rate}," in out
    assert ("experiment     none: model.path is not the bundled agent" in out) == neutral
    assert cli.main(["plan", *overrides]) == 0
    capsys.readouterr()
    if neutral:
        for verb in ("train", "sft", "eval"):
            text = errors(capsys, verb, *overrides)
            assert "model.path=other: is not the bundled agent" in text
            assert "optimizer.lr=0.0016" in text
            assert "add experiment=none" in text


def test_options_and_overrides_may_be_mixed(elsewhere: Path) -> None:
    command = parse(["seed=1,2", "-m", "steps=3", "--config-dir", str(elsewhere)])
    assert command.overrides == ["seed=1,2", "steps=3"]
    assert command.options == ["--config-dir", str(elsewhere)]
    assert (command.sweep, command.source.extra) == (True, str(elsewhere))
