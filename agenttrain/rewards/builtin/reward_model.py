"""`reward_model`: a sequence-classification model's score of the conversation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agenttrain.rewards.function import RewardUnavailable
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import model_folder

if TYPE_CHECKING:
    from torch import Tensor


class RewardModel:
    """The model's logit for each conversation, or, with several labels, the probability of `label`.

    The conversation (prompt, completions, tool calls and replies) is rendered by the model's own
    chat template. The model is loaded when it is first needed. A conversation that is too long is
    RewardUnavailable, because a clipped one would be another conversation.
    """

    def __init__(
        self,
        *,
        path: str,
        label: int | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 8,
    ) -> None:
        """Take the model's folder; `label` is the index of the good one of several labels.

        `device` null: this process's GPU, if there is one.

        Raises ValueError when `path` is no model's folder.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        try:
            self._folder = model_folder(path)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("model.")) from error
        self._path, self._label, self._device_name = path, label, device
        self._dtype, self._batch_size = dtype, batch_size

    def __call__(
        self, prompts: Sequence[list[dict]], completions: Sequence[list[dict]]
    ) -> list[float | RewardUnavailable]:
        """Return one score per rollout; called once with all rollouts of a step, as TRL does."""
        import torch

        conversations = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        texts = [
            self._tokenizer.apply_chat_template(messages, tokenize=False)
            for messages in conversations
        ]
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        scores: list[float | RewardUnavailable] = [
            RewardUnavailable(
                f"the conversation has {len(tokens)} tokens, and {self._path} takes {self._limit}"
            )
            for tokens in ids
        ]
        # Conversations of similar length share a batch, so that there is little padding.
        fitting = [index for index, tokens in enumerate(ids) if len(tokens) <= self._limit]
        order = sorted(fitting, key=lambda index: len(ids[index]))
        size = self._batch_size if self._can_pad else 1
        with torch.inference_mode():
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                values = self._scores([ids[index] for index in batch]).tolist()
                for index, score in zip(batch, values, strict=True):
                    scores[index] = score
        return scores

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        if tokenizer.chat_template is None:
            raise ValueError(f"path={self._path}: its tokenizer has no chat template; add one")
        return tokenizer

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        with torch.random.fork_rng(
            devices=[]
        ):  # a missing head is drawn at random, and refused below
            model, info = AutoModelForSequenceClassification.from_pretrained(
                self._folder, dtype=getattr(torch, self._dtype), output_loading_info=True
            )
        if info["missing_keys"]:
            raise ValueError(
                f"path={self._path}: has no weights for {', '.join(sorted(info['missing_keys']))}: "
                "it is no reward model, and would score at random"
            )
        labels = model.config.num_labels
        if labels > 1 and (self._label is None or not 0 <= self._label < labels):
            raise ValueError(
                f"label={self._label}: the model has {labels} labels {model.config.id2label}; give "
                "the number of the good one"
            )
        # With padding, the head must know the pad id to find the last token of each conversation.
        model.config.pad_token_id = self._tokenizer.pad_token_id if self._can_pad else None
        # "cuda" alone is the calling thread's GPU, which may differ at the next call.
        on_gpu = torch.cuda.is_available()
        default = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        return model.to(self._device_name or default).eval()

    @property
    def _can_pad(self) -> bool:
        """True if the pad token is not an end of turn, so that the head can tell them apart."""
        pad = self._tokenizer.pad_token_id
        return pad is not None and pad != self._tokenizer.eos_token_id

    @property
    def _limit(self) -> int:
        """Length of the longest conversation that the model takes, in tokens."""
        return getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize

    def _scores(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return one score per conversation, [B]."""
        import torch

        longest = max(map(len, ids))
        pad = self._tokenizer.pad_token_id if self._can_pad else 0
        padded = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in ids]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in ids]
        device = self._model.device
        logits = self._model(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
        ).logits.float()
        return logits[:, 0] if logits.shape[1] == 1 else logits.softmax(dim=1)[:, self._label]
