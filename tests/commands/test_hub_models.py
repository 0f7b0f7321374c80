"""Commands with models of the hub: what they fetch, pin and refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_kit import parse
from stub_hub import StubHub, bundled_files

from agenttrain import cli
from agenttrain.commands.running import compose_all
from agenttrain.commands.sweep.command import new_sweep
from agenttrain.commands.sweep.expand import expand
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.settings.pinning import pin, pins
from agenttrain.settings.saved import settings_for_auto_resume
from agenttrain.utils.hub import snapshot

NAME = "Qwen/Qwen3-0.6B"
TOKEN = "hf_a_secret_token"
SHORT = ("experiment=shop", "debug=tiny", "tracker=none", "eval.questions=1", "steps=1")


def with_limits() -> dict[str, bytes]:
    files = bundled_files()
    generation = json.loads(files["generation_config.json"])
    generation |= {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    return {**files, "generation_config.json": json.dumps(generation).encode()}


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.long
def test_check_in_a_process_of_its_own_fetches_no_weights(hub: StubHub, tmp_path: Path) -> None:
    hub.publish(NAME)
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", "check", f"model.path={NAME}"],
        env={**os.environ, **hub.environment(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"model       {NAME} (float32)" in done.stdout
    assert "certificate passed" in done.stdout
    assert not any("safetensors" in request for request in hub.requests)
    assert hub.sent < 20e6
    assert done.stderr == ""


def test_a_run_is_pinned_to_a_commit(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.publish(NAME, with_limits(), token=TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = (f"model.path={NAME}", *SHORT, "hydra.run.dir=out")
    assert cli.main(list(run)) == 0
    out = capsys.readouterr().out
    assert out.index("downloading 1.3 MB of weights") < out.index("train in ")
    assert out.count("has top_p=0.95 top_k=20, which training does not use") == 1
    saved = yaml.safe_load(Path("out/config.yaml").read_text())["model"]
    assert (saved["path"], saved["revision"]) == (NAME, commit)
    prints = json.loads(Path("out/fingerprints.json").read_text())["model"]
    assert prints["revision of model.path"] == commit
    files = [file for file in Path("out").rglob("*") if file.is_file()]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    # The branch moves on: the run stays with its commit, and asks the hub for nothing.
    hub.publish(NAME, bundled_files(), token=TOKEN)
    snapshot.cache_clear()
    hub.requests.clear()
    assert cli.main(["resume=out", "steps=2"]) == 0
    assert hub.requests == []
    for weights in Path("hf").rglob("*.safetensors"):
        weights.unlink()
    capsys.readouterr()
    assert cli.main(["resume=out"]) == 0
    assert "out: finished after 2 steps" in capsys.readouterr().out
    assert "out: holds a run already" in errors(capsys, *run)
    assert not any("safetensors" in request for request in hub.requests)
    with hydra_session(Source()):
        again = settings_for_auto_resume(Path("out"), [*run, "steps=3", "resume=auto"], Source())
    assert again.config.model.revision == commit


def test_other_processes_compose_the_same_commit(hub: StubHub) -> None:
    commit = hub.publish(NAME)
    with hydra_session(Source()):
        composed = compose_run([f"model.path={NAME}"], Source())
        pin(composed, "train")
        assert pins(composed, "train") == [f'++model.revision="{commit}"']
        again = compose_run([f"model.path={NAME}", *pins(composed, "train")], Source())
    assert composed.plain["model"]["revision"] == commit
    assert again.plain == composed.plain


def test_other_processes_compose_the_same_commits_of_the_one_source(hub: StubHub) -> None:
    judge, policy = hub.publish("me/judge"), hub.publish(NAME)
    words = [
        *(f"model.path={NAME}", "data=mix", "+data@data.sources.a=shop"),
        *("+data@data.sources.b=calculator", "data.only=a"),
        "+reward@data.sources.a.reward.rm=reward_model",
        "++data.sources.a.reward.rm.path=me/judge",
    ]
    with hydra_session(Source()):
        composed = compose_run(words, Source())
        pin(composed, "train")
        again = compose_run([*words, *pins(composed, "train")], Source())
    assert again.plain == composed.plain
    assert again.config.reward["rm"]["revision"] == judge
    assert again.config.model.revision == policy


def test_rewards_and_templates_are_pinned_too(hub: StubHub) -> None:
    reward, template = hub.publish("me/judge"), hub.publish("me/template")
    words = [
        *("reward=[reward_model]", "reward.reward_model.path=me/judge"),
        *("chat_template=file", "chat_template.path=me/template"),
    ]
    with hydra_session(Source()):
        composed = compose_run(words, Source())
    pin(composed, "train")
    assert composed.config.reward["reward_model"]["revision"] == reward
    assert composed.plain["reward"]["reward_model"]["revision"] == reward
    assert composed.plain["chat_template"]["revision"] == template
    assert composed.plain["model"]["revision"] is None


def test_demonstrations_read_no_reward_model(hub: StubHub) -> None:
    """Workers of `sft` refuse settings of rewards."""
    commit = hub.publish(NAME)
    rewards = ["reward=[reward_model]", "reward.reward_model.path=me/judge"]
    with hydra_session(Source()):
        composed = compose_run([f"model.path={NAME}", *rewards], Source())
    pin(composed, "sft")
    assert pins(composed, "sft") == [f'++model.revision="{commit}"']


@pytest.mark.slow
def test_data_and_tools_take_an_id(hub: StubHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.publish(NAME)
    assert cli.main(["data", "--rows", "1", f"model.path={NAME}"]) == 0
    assert cli.main(["tools", f"model.path={NAME}"]) == 0
    assert cli.main(["templates", NAME]) == 0
    capsys.readouterr()
    assert cli.main(["plan", "--json", f"model.path={NAME}"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 1
    assert not any("safetensors" in request for request in hub.requests)


def test_a_foreign_model_asks_for_an_experiment(
    hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.publish(NAME)
    text = errors(capsys, f"model.path={NAME}")
    assert f"model.path={NAME}: is not the bundled agent" in text
    assert "add experiment=none" in text
    assert hub.requests == []
    assert not Path("outputs").exists()


def test_a_revision_is_a_text(hub: StubHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.publish(NAME)
    text = errors(capsys, "check", f"model.path={NAME}", "model.revision=1234567")
    assert "model.revision=1234567: expected a text; quote it" in text
    text = errors(capsys, "check", f"model.path={NAME}", "model.revision=v7")
    assert f"model.path={NAME}: the hub has no revision v7 of it" in text


def test_submit_refuses_weights_that_nodes_cannot_fetch(
    hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.publish(NAME)
    job = ("submit", "--dry-run", "--no-check", f"model.path={NAME}", *SHORT)
    text = errors(capsys, *job)
    assert f"model.path={NAME}: its weights are not in the cache" in text
    assert f"run `hf download {NAME} --revision {commit}` here first" in text
    capsys.readouterr()
    assert cli.main([*job, "slurm.offline=false"]) == 0
    # The branch may move on while the job waits.
    assert f'++model.revision="{commit}"' in capsys.readouterr().out


@pytest.mark.slow
def test_all_jobs_of_a_sweep_have_the_commit_of_its_start(hub: StubHub) -> None:
    first, second = hub.publish(NAME), hub.publish("me/other", with_limits())
    grid = parse(["-m", "experiment=none", f"model.path={NAME},me/other"])
    with hydra_session(Source()):
        _, record = new_sweep(grid, compose_all(grid), expand(grid.overrides, grid.source))
    assert [job.overrides[-1] for job in record.jobs] == [
        f'++model.revision="{first}"',
        f'++model.revision="{second}"',
    ]
    words = [f"model.path={NAME}", "optimizer.lr=1e-5,1e-4", "seed=0,1", "sweep.trials=2"]
    search = parse(["-m", "experiment=none", "sweep=optuna", *words])
    with hydra_session(Source()):
        _, record = new_sweep(search, compose_all(search), expand(search.overrides, search.source))
    assert record.search is not None
    assert {repeat[-1] for repeat in record.search.repeats} == {f'++model.revision="{first}"'}


@pytest.mark.parametrize(
    "base", [(), ("model.quantization=nf4", "model.double_quantization=false")]
)
def test_adapters_of_the_hub_need_the_base_in_4_bits_of_their_training(
    base: tuple[str, ...], hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    whole = ("config.json", "model.safetensors")
    files = {name: content for name, content in bundled_files().items() if name not in whole}
    files["adapter_config.json"] = json.dumps(
        {**described, "base_model_name_or_path": "bundled:shop"}
    ).encode()
    trained_on = {"quantization": "nf4", "double_quantization": True}
    files["base_quantization.json"] = json.dumps(trained_on).encode()
    hub.publish("org/adapters", files)
    adapters = ("experiment=shop", "model.path=org/adapters", "model.lora.rank=2")
    message = errors(capsys, "check", *adapters, "model.lora.alpha=4", *base)
    assert "model.quantization=nf4 model.double_quantization=true" in message
    assert not any("safetensors" in request for request in hub.requests)


@pytest.mark.long
def test_the_base_of_adapters_is_pinned_too(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.publish(NAME)
    first = ("experiment=shop", *SHORT[1:], "model.lora.rank=2", "hydra.run.dir=first")
    assert cli.main(list(first)) == 0
    adapters = tmp_path / "adapters"
    assert cli.main(["export", "run=first", f"to={adapters}", "format=adapter"]) == 0
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": NAME}))
    run = [f"model.path={adapters}", "model.lora.rank=2", *SHORT, "hydra.run.dir=out"]
    assert cli.main(run) == 0
    assert "downloading 1.3 MB of weights" in capsys.readouterr().out
    saved = yaml.safe_load(Path("out/config.yaml").read_text())["model"]
    assert (saved["path"], saved["revision"]) == (str(adapters), None)
    assert saved["base_revision"] == commit
    described = json.loads(Path("out/checkpoints/latest/adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["revision"]) == (NAME, commit)
    hub.publish(NAME, {**bundled_files(), "config.json": b"{}"})  # main has moved on
    evaluation = ["eval", "run=out", "eval.questions=1", "tracker=none"]
    assert cli.main([*evaluation, "hydra.run.dir=eval"]) == 0
    assert cli.main(["resume=out", "steps=2"]) == 0

    message = errors(capsys, "check", "experiment=shop", "model.base_revision=v1")
    assert message == (
        "agenttrain: model.base_revision=v1: model.path=bundled:shop holds no adapters for a "
        "model of the hub; leave it out\n"
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "a/b"}))
    message = errors(
        capsys, "check", "experiment=shop", f"model.path={adapters}", "model.lora.rank=2"
    )
    assert "model.base_path=a/b: there is no such folder, and" in message


@pytest.mark.slow
def test_a_download_that_fails_leaves_no_run_folder(
    hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.publish(NAME)
    hub.fail("/resolve/.*safetensors", status=503)
    message = errors(capsys, f"model.path={NAME}", *SHORT, "hydra.run.dir=out/run")
    assert f"model.path={NAME}: {hub.url} answers with status 503" in message
    assert not Path("out").exists()
