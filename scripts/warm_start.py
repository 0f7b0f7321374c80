"""Rebuild the bundled model: tokenizer, chat template and warm-started weights.

    python scripts/warm_start.py --out agenttrain/data/models/shop
    python scripts/warm_start.py --task calculator --steps 300 --out …/models/calculator

These two commands made the shipped folders, in 207 and 143 seconds of one core.

A Qwen3 of 0.6 M parameters learns from demonstrations with bad habits (see
`agenttrain.data.demonstrations`), one pass in order, `torch.optim.Muon` on the matrices of its
layers and AdamW on the rest. One seed and one thread count give the same bytes on one machine.
Shapes: B sequences, T tokens, V vocabulary.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agenttrain.data.demonstrations import conversations  # noqa: E402

Example = tuple[list[int], list[int]]
"""Token ids of a conversation and, for each, 1 where the model is to learn it."""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The constant pieces of a call are cut out first, so that each becomes one token; then Qwen's
# own pattern, which gives every digit a token.
PIECES = r"""\{"name": "|", "arguments": \{"|": "?|"?\}\}\n?|, "|"""
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- '\n' + tool.name + '(' + (tool.parameters.properties | join(', ')) + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


TOOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "shop": {"sql": ("query",), "final_answer": ("answer",)},
    "calculator": {
        "add": ("a", "b"),
        "subtract": ("a", "b"),
        "multiply": ("a", "b"),
        "final_answer": ("answer",),
    },
}
"""Tools and their arguments; the template renders no more of a tool than these names."""


def build_tokenizer(texts: Iterable[str], vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on rendered conversations; their closed text fills some 600 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES + QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*CONTROL, *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, (*CONTROL, *MARKERS))))
    tokenizer.train_from_iterator((special.sub("\n", text) for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_markers_as_text(tokenizer),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _markers_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Make `<tool_call>` and its kin single tokens that decoding keeps, as Qwen3 has them."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(state))


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 of 0.65 M parameters; one KV head keeps decoding fast."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def render(task: str, count: int, seed: int) -> list[str]:
    """Return `count` demonstrations of a task as text, in the order in which they are learnt."""
    schemas = [
        {"name": name, "parameters": {"properties": {argument: {} for argument in arguments}}}
        for name, arguments in TOOLS[task].items()
    ]
    rendered, _ = render_jinja_template(
        conversations=list(conversations(task, count, seed)),
        tools=schemas,
        chat_template=CHAT_TEMPLATE,
    )
    return list(rendered)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Example:
    """Tokenise a conversation and mark what the assistant says, its `<|im_end|>` included.

    Example: `<|im_start|> assistant \\n 4 2 <|im_end|> \\n` gives the mask 0 0 0 1 1 1 0.
    """
    start, end, assistant = tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>", "assistant"]
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    mask: list[int] = []
    speaking = False
    for position, token in enumerate(ids):
        if position >= 3 and ids[position - 3 : position - 1] == [start, assistant]:
            speaking = True
        mask.append(int(speaking))
        speaking = speaking and token != end
    return ids, mask


def interleave(lists: Sequence[list[Example]]) -> list[Example]:
    """Merge the tasks' examples, taking one of each in turn."""
    return [example for examples in zip(*lists, strict=True) for example in examples]


def collate(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right to ids [B, T] and mask [B, T]; causal attention never sees the padding."""
    width = max(len(ids) for ids, _ in examples)
    ids_BT = torch.zeros(len(examples), width, dtype=torch.long)
    mask_BT = torch.zeros(len(examples), width)
    for row, (ids, mask) in enumerate(examples):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(mask)] = torch.tensor(mask)
    return ids_BT, mask_BT


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Learning-rate factor: 30 steps of warm-up, flat to half-way, then linear to 5 %."""
    decay = max(0.0, step / steps - 0.5) / 0.5
    return min(1.0, (step + 1) / 30) * (1 - 0.95 * decay)


def update(
    model: Qwen3ForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Sequence[Example],
) -> float:
    """Take one optimizer step on a batch; return its loss, in nats per learnt token."""
    by_length = sorted(batch, key=lambda example: len(example[0]))
    learnt = sum(sum(mask) for _, mask in batch)
    half = len(batch) // 2
    total = 0.0
    for part in (by_length[:half], by_length[half:]):
        ids_BT, mask_BT = collate(part)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss_BT = functional.cross_entropy(
            logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none"
        )
        loss = (loss_BT * mask_BT[:, 1:]).sum() / learnt
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


def train(model: Qwen3ForCausalLM, examples: Sequence[Example], batch: int) -> list[float]:
    """Pass once over the examples, in order; return the loss of every step."""
    model.train()
    chosen = optimizers(model)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in chosen]
    steps = len(examples) // batch
    losses = []
    for step in range(steps):
        for optimizer, initial in zip(chosen, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = rate * schedule(step, steps)
        losses.append(update(model, chosen, examples[step * batch : (step + 1) * batch]))
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps} loss {losses[-1]:.4f}", flush=True)
    return losses


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    recipe: dict[str, Any],
) -> None:
    """Write the model in bfloat16, the tokenizer with its template, and `recipe.json`."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    weights = (folder / "model.safetensors").read_bytes()
    recipe["parameters"] = sum(p.numel() for p in model.parameters())
    recipe["torch"] = torch.__version__
    recipe["transformers"] = transformers.__version__
    recipe["sha256"] = hashlib.sha256(weights).hexdigest()
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--task", nargs="+", choices=sorted(TOOLS), default=["shop"])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations and weights")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps, in all")
    parser.add_argument("--batch", type=int, default=32, help="conversations per step")
    parser.add_argument("--threads", type=int, default=1, help="part of what fixes the bytes")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    count = options.steps * options.batch // len(options.task)
    texts = [render(task, count, options.seed) for task in options.task]
    tokenizer = build_tokenizer(text for task_texts in texts for text in task_texts[:3000])
    examples = interleave([[encode(tokenizer, text) for text in part] for part in texts])
    prepared = time.perf_counter()
    print(f"{len(examples)} demonstrations, {len(tokenizer)} tokens, {prepared - began:.0f} s")
    model = build_model(tokenizer)
    losses = train(model, examples, options.batch)
    recipe = {
        "task": options.task,
        "seed": options.seed,
        "demonstrations": len(examples),
        "steps": len(losses),
        "batch": options.batch,
        "threads": options.threads,
        "loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
        "seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(time.process_time()),
    }
    save(model, tokenizer, options.out, recipe)
    print(json.dumps(recipe))


if __name__ == "__main__":
    main()
