"""Runs that replay the experts of their rollouts, with a tiny Qwen3-MoE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agenttrain.cli import main
from agenttrain.tracking.names import depends_on_clock
from agenttrain.utils.model_path import model_folder

ODD = """
def odd(rollout, **columns) -> float:
    ids = rollout.trajectories[0].token_ids
    return sum(token % 2 for token in ids) / len(ids)


def huge(rollout, **columns) -> float:
    return 1e60 if rollout.sample == 0 else 0.0
"""
WORDS = (
    *("debug=tiny", "experiment=shop", "steps=2", "checkpoint.every=1", "tracker=none"),
    *("optimizer.schedule=constant", "eval.questions=0", "algorithm.router_replay=rollout"),
    *("reward=[]", "reward.odd._target_=odd_routes.odd", "training.share_prefix=always"),
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny random Qwen3-MoE and the bundled agent's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    folder = tmp_path / "moe"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    Path("odd_routes.py").write_text(ODD)  # a random model earns nothing in the shop
    return folder


def train(folder: Path, model: Path, *words: str) -> list[dict[str, Any]]:
    """Run, and return the metrics of each step that do not depend on the clock."""
    assert main([*WORDS, f"model.path={model}", *words, f"hydra.run.dir={folder}"]) == 0
    return metrics(folder)


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]


@pytest.mark.slow
def test_a_run_replays_its_experts_and_resumes_to_the_bit(tmp_path: Path, model: Path) -> None:
    whole = train(tmp_path / "whole", model)
    for row in whole:
        # The engine samples from the policy itself: the trainer would have chosen alike.
        assert row["routing/equal"] > 0.999
        assert row["routing/logprob_gap_replayed"] < 1e-5
        assert row["sampling/logprob_gap"] < 1e-5
    train(tmp_path / "resumed", model, "steps=1")
    assert main([f"resume={tmp_path / 'resumed'}", "steps=2"]) == 0
    assert metrics(tmp_path / "resumed") == whole
    start = load_file(model / "model.safetensors")
    latest = tmp_path / "whole" / "checkpoints" / "latest" / "model.safetensors"
    trained = load_file(latest)
    assert all((start[name] != trained[name]).any() for name in start if "mlp.gate" in name)
    for file in (tmp_path / "whole" / "rollouts").glob("*.jsonl"):
        assert "routes" not in file.read_text()


@pytest.mark.slow
def test_an_evaluation_records_no_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the bundled agent, which has none, is evaluated by an experiment that replays them."""
    monkeypatch.chdir(tmp_path)
    algorithm = Path("my_conf/algorithm/replayed.yaml")
    algorithm.parent.mkdir(parents=True)
    algorithm.write_text("defaults:\n  - grpo\n  - _self_\nrouter_replay: rollout\n")
    words = ["--config-dir", "my_conf", "experiment=shop", "debug=tiny", "tracker=none"]
    words += ["algorithm=replayed", "eval.questions=2"]
    assert main(["eval", *words, "hydra.run.dir=evaluated"]) == 0
    capsys.readouterr()
    assert main([*words, "hydra.run.dir=trained"]) == 1
    assert "UnknownRouters: algorithm.router_replay=rollout: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_update_is_repeated_with_its_experts(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The crash bundle has them, though its rollouts' files do not."""
    words = [*WORDS, f"model.path={model}", "algorithm.scale=none"]
    words += ["reward.odd._target_=odd_routes.huge", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(words) == 1
    bundle = tmp_path / "run" / "crash" / "step-000001"
    records = torch.load(bundle / "batch.pt", weights_only=True)
    for record in records:
        routes = record["routes"]
        assert routes["positions_R"].equal(record["targets_S"])
        assert routes["experts_RLK"].shape == (len(record["targets_S"]), 2, 2)
    capsys.readouterr()
    assert main(["replay", str(bundle)]) == 0
    assert "the same culprit" in capsys.readouterr().out


@pytest.mark.slow
def test_experts_of_another_process_are_replayed_after_updates(tmp_path: Path, model: Path) -> None:
    """Groups sampled ahead cross processes, and wait in the journal, with their experts."""
    words = ("async_training.max_staleness=1", "steps=3", "optimizer.lr=0.02")
    rows = train(tmp_path / "ahead", model, *words)
    assert rows[0]["routing/equal"] > 0.999
    # Tokens of older weights: the policy's routers have moved since, and would choose otherwise.
    assert any(row["sampling/stale_tokens"] > 0 for row in rows)
    assert min(row["routing/equal"] for row in rows) < 1.0
