"""The reward model: a tiny random classifier on disk, scored in batches as one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny
import torch
from fake_vllm import Machine, machine
from reward_cases import called, made
from transformers import (
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Gemma2PreTrainedModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from agenttrain.rewards.builtin.reward_model import RewardModel
from agenttrain.rewards.function import RewardError, RewardUnavailable
from agenttrain.rewards.rubric import build_rubric
from agenttrain.types import Rollout

__all__ = ["machine"]
TEXTS = ("7", "The answer is seven, as far as I can tell.", "what is 3 + 4?")


def saved(
    folder: Path, *, labels: int = 1, pad: str = "<|endoftext|>", positions: int = 256
) -> str:
    """A random Qwen3 with a score head and the tiny tokenizer."""
    tokenizer = tiny.tokenizer()
    settings = dict(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 8, "max_position_embeddings": positions, "num_labels": labels},
        **{"pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>")},
    )
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(Qwen3Config(**settings)).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rollouts(*texts: str) -> list[Rollout]:
    found = [made(text, called("add", a=1)) for text in texts]
    for rollout in found:
        rollout.trajectories[0].messages.insert(
            1,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
            },
        )
        rollout.trajectories[0].messages.insert(2, {"role": "tool", "content": "1"})
    return found


def scores(path: str, *texts: str, **settings: object) -> list[float | None]:
    section = {
        "_target_": "agenttrain.rewards.builtin.reward_model.RewardModel",
        "path": path,
        **settings,
    }
    found = rollouts(*texts)
    asyncio.run(build_rubric({"rm": section}).score(found))
    return [rollout.reward for rollout in found]


def by_hand(path: str, text: str) -> torch.Tensor:
    """The logits of one conversation, alone and without padding."""
    model = Qwen3ForSequenceClassification.from_pretrained(path).eval()
    (rollout,) = rollouts(text)
    tokenizer = tiny.tokenizer()
    ids = tokenizer.apply_chat_template(rollout.trajectories[0].messages, return_dict=False)
    model.config.pad_token_id = None
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_a_batch_scores_what_each_conversation_scores_alone(tmp_path):
    path = saved(tmp_path)
    expected = [float(by_hand(path, text)) for text in TEXTS]
    assert len(set(expected)) == 3
    assert scores(path, *TEXTS) == pytest.approx(expected, abs=1e-5)
    assert scores(path, *TEXTS, batch_size=2) == pytest.approx(expected, abs=1e-5)


def test_a_padding_token_that_also_ends_turns_is_not_padded_with(tmp_path):
    path = saved(tmp_path)
    tokenizer = tiny.tokenizer()
    before, tokenizer.pad_token = tokenizer.pad_token, tokenizer.eos_token
    try:
        tokenizer.save_pretrained(path)
    finally:
        tokenizer.pad_token = before
    expected = [float(by_hand(path, text)) for text in TEXTS]
    assert scores(path, *TEXTS) == pytest.approx(expected, abs=1e-5)


def test_one_label_of_several(tmp_path):
    path = saved(tmp_path, labels=3)
    expected = by_hand(path, TEXTS[0]).softmax(0)[2].item()
    assert scores(path, TEXTS[0], label=2) == pytest.approx([expected], abs=1e-6)
    with pytest.raises(RewardError, match=r"label=None: the model has 3 labels .* the good one"):
        scores(path, TEXTS[0])


def test_a_conversation_that_is_too_long_is_left_out(tmp_path):
    path = saved(tmp_path, positions=60)
    long = "seven " * 60
    assert scores(path, "7", long, on_unavailable="drop")[1] is None
    assert scores(path, "7", long, on_unavailable="drop")[0] == pytest.approx(
        float(by_hand(path, "7")), abs=1e-5
    )
    with pytest.raises(RewardError, match=r"the conversation has \d+ tokens, and .* takes 60"):
        scores(path, "7", long)


def test_scoring_leaves_the_runs_random_numbers_alone(tmp_path):
    path = saved(tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    scores(path, "7")
    assert torch.equal(torch.rand(2), expected)


def test_a_soft_cap_is_kept_where_transformers_chooses_attention_that_ignores_it(
    tmp_path, monkeypatch
):
    tokenizer = tiny.tokenizer()
    config = Gemma2Config(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 8, "num_labels": 1, "attn_logit_softcapping": 0.5},
        **{"pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>")},
    )
    torch.manual_seed(0)
    model = Gemma2ForSequenceClassification(config).float()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # before transformers 5.21
    by_default = Gemma2ForSequenceClassification.from_pretrained(tmp_path)
    assert by_default.config._attn_implementation == "sdpa"
    (rollout,) = rollouts("7")
    ids = tokenizer.apply_chat_template(rollout.trajectories[0].messages, return_dict=False)
    model.eval().set_attn_implementation("eager")
    model.config.pad_token_id = None
    with torch.inference_mode():
        capped = model(torch.tensor([ids])).logits.item()
    assert scores(str(tmp_path), "7") == pytest.approx([capped], abs=1e-5)


def test_a_model_without_a_score_head_is_refused(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"has no weights for score.weight: it is no reward mod"):
        scores(str(tmp_path), "7")


def test_settings_that_cannot_work(tmp_path):
    with pytest.raises(ValueError, match=r"^path=/no/model: there is no such folder"):
        RewardModel(path="/no/model")
    with pytest.raises(ValueError, match="batch_size=0: must be at least 1"):
        RewardModel(path=saved(tmp_path), batch_size=0)
    assert issubclass(RewardUnavailable, Exception)


def test_the_model_is_on_the_gpu_of_its_process(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded in a thread of its own, where "cuda" alone would be GPU 0."""
    path = saved(tmp_path)
    devices: list[str] = []
    monkeypatch.setattr(
        PreTrainedModel, "to", lambda model, device: (devices.append(device), model)[1]
    )
    scores(path, "7")
    assert devices == ["cuda:3"]
    ((thread, device, call),) = machine.of("set_device")
    assert (thread != "MainThread", device, call) == (True, 3, "set_device 3")
