"""`reward_model`: a sequence-classification model's score of the conversation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from agenttrain.rewards.function import RewardUnavailable
from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import Data
from agenttrain.utils.model_path import model_folder, weights_folder


class RewardModel:
    """The model's logit for each conversation; with several labels, the probability of `label`.

    The conversation (prompt, completions, tool calls and replies) is rendered by the model's own
    chat template. The model is loaded when it is first needed. A conversation that is too long is
    RewardUnavailable, because a clipped one would be another conversation.
    """

    def __init__(
        self,
        *,
        path: Data[str],
        revision: Data[str | None] = None,
        label: Data[int | None] = None,
        device: Data[str | None] = None,
        dtype: Data[str] = "float32",
        batch_size: Data[int] = 8,
    ) -> None:
        """Take a model's folder, or an id of the hub and its `revision`.

        `label` is the index of the good label, if the model has several. `device` null means this
        process's GPU, if there is one. Raises ValueError if `path` is no model's folder.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        try:
            model_folder(path, revision=revision, key="path")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        self._path, self._revision = path, revision
        self._label, self._device_name = label, device
        self._dtype, self._batch_size = dtype, batch_size

    def __call__(
        self, prompts: Sequence[list[dict]], completions: Sequence[list[dict]]
    ) -> list[float | RewardUnavailable]:
        """Return one score per rollout. Called once with all rollouts of a step, as TRL does."""
        conversations = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        tokenizer, model = self._tokenizer_and_model
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations
        ]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        max_tokens = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        # The scores of conversations that are too long. Those of others are set below.
        scores: list[float | RewardUnavailable] = [
            RewardUnavailable(
                f"the conversation has {len(tokens)} tokens, and {self._path} takes {max_tokens}"
            )
            for tokens in ids
        ]
        # Conversations of similar length share a batch, so that there is little padding.
        fitting = [index for index, tokens in enumerate(ids) if len(tokens) <= max_tokens]
        order = sorted(fitting, key=lambda index: len(ids[index]))
        # Without a pad token nothing can be padded: one conversation at a time.
        size = 1 if model.config.pad_token_id is None else self._batch_size
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            batch_scores = self._score_batch([ids[index] for index in batch])
            for index, score in zip(batch, batch_scores, strict=True):
                scores[index] = score
        return scores

    def _score_batch(self, ids: Sequence[list[int]]) -> list[float]:
        """Return the scores of B conversations, each of at most T tokens, in one forward pass."""
        import torch

        _, model = self._tokenizer_and_model
        longest = max(map(len, ids))
        padding = [longest - len(tokens) for tokens in ids]
        pad = model.config.pad_token_id  # None for a batch of one, which has no padding
        ids_BT = [[*tokens, *[pad] * count] for tokens, count in zip(ids, padding, strict=True)]
        mask_BT = [[1] * (longest - count) + [0] * count for count in padding]
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor(ids_BT, device=model.device),
                attention_mask=torch.tensor(mask_BT, device=model.device),
            ).logits.float()  # [B, labels]
            one_label = logits.shape[1] == 1
            scores_B = logits[:, 0] if one_label else logits.softmax(dim=1)[:, self._label]
            return [float(score) for score in scores_B.tolist()]

    @cached_property
    def _tokenizer_and_model(self) -> tuple[Any, Any]:
        """Load the tokenizer and the model. Raises ValueError for one that cannot score."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from agenttrain.engines.soft_cap import keep_soft_cap

        folder = weights_folder(self._path, revision=self._revision, key="path")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.chat_template is None:
            raise ValueError(f"path={self._path}: its tokenizer has no chat template; add one")
        # transformers initialises a missing head at random, which is an error below. That must not
        # change the run's random state.
        with torch.random.fork_rng(devices=[]):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=getattr(torch, self._dtype), output_loading_info=True
            )
        keep_soft_cap(model)  # fused attention would ignore Gemma 2's soft cap of scores
        if info["missing_keys"]:
            raise ValueError(
                f"path={self._path}: has no weights for {', '.join(sorted(info['missing_keys']))}: "
                "it is no reward model, and would score at random"
            )
        self._check_label(model)
        # The head scores the last token of a conversation, which it finds by the pad id. A pad
        # token that also ends turns would hide the true last token. With None the head takes the
        # last position, and `__call__` scores one conversation at a time, without padding.
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        model.config.pad_token_id = None if pad == end else pad
        # "cuda" alone is the calling thread's GPU, which may differ at the next call.
        on_gpu = torch.cuda.is_available()
        default = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        return tokenizer, model.to(self._device_name or default).eval()

    def _check_label(self, model: Any) -> None:
        """Raise ValueError if the model has several labels, and `label` is none of them."""
        labels = model.config.num_labels
        if labels > 1 and (self._label is None or not 0 <= self._label < labels):
            raise ValueError(
                f"label={self._label}: the model has {labels} labels {model.config.id2label}; give "
                "the number of the good one"
            )
