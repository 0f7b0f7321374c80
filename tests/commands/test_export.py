"""`agenttrain export`: the folder, its card, and a model of a (stub) hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from stub_hub_upload import UploadHub

from agenttrain.cli import main
from agenttrain.commands.model_card import model_card, published_settings
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.utils.model_path import MODELS

LORA = ("model.lora.rank=4", "algorithm.kl.beta=0.01", "eval.questions=0", "steps=1")


@pytest.fixture(scope="module")
def run(trained_run: Path) -> Path:
    """A run of two steps."""
    return trained_run


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with adapters."""
    folder = tmp_path_factory.mktemp("adapters") / "run"
    assert main(["debug=tiny", "tracker=none", *LORA, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    # Plain LFS: the chunks of Xet go to a store that the stub does not have.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with UploadHub(token="hf_secret") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def front_matter(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---")[1])


def test_the_folder_has_a_card_and_can_be_read_by_others(run, tmp_path) -> None:
    folder = tmp_path / "agent"
    before = os.umask(0o077)
    try:
        assert main(["export", f"run={run}", f"to={folder}", "step=2"]) == 0
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755
    card = (folder / "README.md").read_text()
    front = front_matter(card)
    assert front["license"] == "apache-2.0"
    assert front["tags"] == ["agenttrain", "tool-use", "reinforcement-learning", "grpo"]
    for text in (
        "| base model | `bundled:shop` |",
        "| training | grpo, 2 steps, seed 0 |",
        "| rewards | `exact_match` (weight 1) |",
        "| decoding | questions | before training | after |",
        "agenttrain --config-dir agent --config-name agenttrain",
    ):
        assert text in card


def test_the_exported_settings_are_those_of_the_run(run, tmp_path) -> None:
    folder = tmp_path / "agent"
    assert main(["export", str(run), f"to={folder}"]) == 0
    source = Source(extra=str(folder), name="agenttrain")
    with hydra_session(source):
        composed = compose_run([], source)
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    del recorded["provenance"]
    assert composed.plain == recorded


@pytest.mark.slow
def test_adapters_alone_or_merged(adapters, tmp_path) -> None:
    assert main(["export", f"run={adapters}", f"to={tmp_path}/a", "format=adapter"]) == 0
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    assert "model.safetensors" not in names
    card = (tmp_path / "a" / "README.md").read_text()
    assert front_matter(card)["library_name"] == "peft"
    assert "| weights | adapters (LoRA) alone" in card
    assert main(["export", f"run={adapters}", f"to={tmp_path}/m", "format=merged"]) == 0
    assert (tmp_path / "m" / "model.safetensors").is_file()


def test_adapters_name_their_base_model_on_the_hub(adapters, tmp_path) -> None:
    run = shutil.copytree(adapters, tmp_path / "run", symlinks=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"path": "org/agent", "revision": "c" * 40}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["export", f"run={run}", f"to={tmp_path}/a", "format=adapter"]) == 0
    described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "org/agent"
    assert described["revision"] == "c" * 40 and described["r"] > 0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled agent as a base model: files end sequences with <|endoftext|> (0) alone."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(MODELS / "shop", folder)
    for name, change in (
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return folder


def ends(folder: Path) -> dict[str, object]:
    """Where the files of a folder say that a sequence ends."""
    keys = {
        "config.json": "eos_token_id",
        "generation_config.json": "eos_token_id",
        "tokenizer_config.json": "eos_token",
    }
    return {
        name: json.loads((folder / name).read_text())[key]
        for name, key in keys.items()
        if (folder / name).is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "formats"), [((), ["transformers"]), (LORA, ["merged", "adapter"])]
)
def test_checkpoints_and_exports_stop_where_training_did(
    settings: tuple[str, ...], formats: list[str], base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["debug=tiny", "tracker=none", "eval.questions=0", "steps=1", f"model.path={base}"]
    assert main([*words, *settings, f"hydra.run.dir={run}"]) == 0
    complete = {
        "config.json": [0, 2],
        "generation_config.json": [0, 2],
        "tokenizer_config.json": "<|im_end|>",
    }
    without_config = {name: end for name, end in complete.items() if name != "config.json"}
    checkpoint = run / "checkpoints" / "latest"
    assert ends(checkpoint) == (without_config if settings else complete)
    for form in formats:
        folder = tmp_path / form
        assert main(["export", f"run={run}", f"to={folder}", f"format={form}"]) == 0
        assert ends(folder) == (without_config if form == "adapter" else complete)
        if form == "merged":
            weights = "| weights | complete, adapters (LoRA) merged in float32, saved in float32 |"
            assert weights in (folder / "README.md").read_text()


def test_ends_that_are_right_stay_as_they_are(run: Path) -> None:
    assert ends(run / "checkpoints" / "latest") == ends(MODELS / "shop")


@pytest.mark.slow
def test_nothing_half_written_is_left_after_a_kill(run, tmp_path) -> None:
    command = [sys.executable, "-m", "agenttrain.cli", "export", str(run), "to=agent"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    part = tmp_path / ".agent.part"
    while not part.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "agent").exists()
    assert main(["export", str(run), f"to={tmp_path / 'agent'}"]) == 0
    assert not part.exists()


def test_a_model_of_the_hub_is_private_unless_it_is_to_be_public(run, hub, capsys) -> None:
    assert main(["export", f"run={run}", "to=hub:org/agent"]) == 0
    assert f"step-000002 -> {hub.url}/org/agent" in capsys.readouterr().out
    repository = hub.repositories["org/agent"]
    assert repository.private
    assert repository.commits == ["agenttrain step-000002"]
    names = set(repository.files)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert all(b"hf_secret" not in content for content in repository.files.values())
    assert b"# agent\n" in repository.files["README.md"]
    assert main(["export", f"run={run}", "to=hub:org/open", "public=true"]) == 0
    assert not hub.repositories["org/open"].private
    assert main(["export", f"run={run}", "to=hub:org/agent"]) == 0  # a second commit
    assert len(repository.commits) == 2


@pytest.mark.parametrize(
    ("token", "refuse", "to", "problem"),
    [
        ("other", None, "org/agent", "the hub answered 401; set HF_TOKEN to a token that may"),
        ("hf_secret", 403, "org/agent", "403; the token of HF_TOKEN may not write to org"),
        ("hf_secret", 500, "org/agent", "the hub answered 500; try again"),
        ("hf_secret", None, "a/b/c", "Repo id must be in the form"),
    ],
)
def test_a_refused_upload(run, hub, monkeypatch, capsys, token, refuse, to, problem) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.refuse = refuse
    assert main(["export", f"run={run}", f"to=hub:{to}"]) == 2
    error = capsys.readouterr().err
    assert f"--to hub:{to}: " in error
    assert problem in error


def test_a_hub_that_cannot_be_reached(run, hub, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["export", f"run={run}", "to=hub:org/agent"]) == 2
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_a_card_of_a_model_and_data_of_the_hub() -> None:
    config = {
        "model": {"path": "Qwen/Qwen3-0.6B", "revision": "c1899de"},
        "data": {"train": {"_target_": "agenttrain.data.files.HubRows", "path": "org/questions"}},
        "algorithm": {"name": "rloo"},
    }
    card = model_card("agent", config, {"verb": "train"}, step=40, adapter=True)
    assert front_matter(card) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "license": "unknown",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["agenttrain", "tool-use", "reinforcement-learning", "rloo"],
        "datasets": ["org/questions"],
    }
    assert "| base model | `Qwen/Qwen3-0.6B` at revision `c1899de` |" in card
    assert "## Evaluation" not in card


def test_settings_are_published_without_secrets() -> None:
    headers = {"Authorization": "Bearer x1", "X-Key": "$KEY", "X-Dollar": "pa$$word"}
    section = {"headers": headers, "env": {"A": "b2"}}
    tools = {"mcp": section, "env": {"_target_": "my.Env", "limit": 3}}
    config = {"tools": tools, "provenance": {"signature": "s3"}}
    text = published_settings(config)
    assert "$KEY" in text
    assert yaml.safe_load(text)["tools"]["env"] == {"_target_": "my.Env", "limit": 3}
    assert not any(secret in text for secret in ("x1", "b2", "s3", "pa$$word"))
