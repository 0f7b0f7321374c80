"""Make a model that knows nothing yet: tokenizer, chat template and random weights.

    python scripts/new_model.py --task shop --out blank
    agenttrain sft experiment=shop_warmstart model.path=blank model.init=pretrained

The first command takes seconds. It trains the tokenizer on 3000 demonstrations of the task; the
model is a Qwen3 of 0.65 M parameters, with --hybrid a Qwen3.5 of 0.65 M, or with --task sight a
Qwen3-VL of 0.64 M. The bundled models' tokenizers were made so. With --task programs the tokenizer
is trained on this repository's English and Python, and the model has a context of 32768 tokens: for
trying out programs such as Claude Code as agents, whose first prompt alone fills 12,000 tokens of a
large tokenizer.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agenttrain.data.bundled.demonstrations import row  # noqa: E402

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PROGRAMS = "programs"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Further control tokens of a model that sees."""

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

CONTENT = r"""
{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
""".strip()
SEEING_TEMPLATE = (
    CONTENT
    + "\n"
    + re.sub(r"(message|messages\[0\])\.content \+", r"show(\1.content) +", CHAT_TEMPLATE)
)
"""The same with images in the contents of users and tools."""

TOOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "shop": {"sql": ("query",), "final_answer": ("answer",)},
    "calculator": {
        "add": ("a", "b"),
        "subtract": ("a", "b"),
        "multiply": ("a", "b"),
        "final_answer": ("answer",),
    },
    "sight": {"crop": ("part",), "final_answer": ("answer",)},
    "word_problems": {},
    "word_problems_python": {"python": ("code",)},
    "reverse_text": {},
    "alphabet_sort": {},
}
"""Tools and their arguments; the template renders no more of a tool than these names."""
PATCH, MERGE = 4, 2
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Settings of the image processor: 8 x 8 pixels of an image become one vector."""


def build_tokenizer(
    texts: Iterable[str], vocabulary: int = 1024, *, sees: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on rendered conversations; their closed text fills some 600 tokens."""
    control = (*CONTROL, *(VISION if sees else ()))
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
        special_tokens=[*control, *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, (*control, *MARKERS))))
    tokenizer.train_from_iterator((special.sub("\n", text) for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_markers_as_text(tokenizer, control),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *(VISION if sees else ())],
        clean_up_tokenization_spaces=False,
        chat_template=SEEING_TEMPLATE if sees else CHAT_TEMPLATE,
    )


def _markers_as_text(tokenizer: Tokenizer, control: Iterable[str]) -> Tokenizer:
    """Make `<tool_call>` and its kin single tokens that decoding keeps, as Qwen3 has them."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in control
    return Tokenizer.from_str(json.dumps(state))


def build_model(tokenizer: PreTrainedTokenizerFast, context: int) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 of 0.65 M parameters; one KV head keeps decoding fast."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def build_hybrid_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Return a randomly initialised Qwen3.5 of 0.65 M parameters, two of its layers recurrent."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=320,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3_5ForCausalLM(config)


def build_seeing_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return a randomly initialised Qwen3-VL of 0.64 M parameters, some of which see."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    seeing = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=seeing,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def render(task: str, count: int, seed: int) -> list[str]:
    """Return `count` demonstrations of a task as text."""
    schemas = [
        {"name": name, "parameters": {"properties": {argument: {} for argument in arguments}}}
        for name, arguments in TOOLS[task].items()
    ]
    rendered, _ = render_jinja_template(
        conversations=[row(task, "train", index, seed)["messages"] for index in range(count)],
        tools=schemas,
        chat_template=SEEING_TEMPLATE if task == "sight" else CHAT_TEMPLATE,
    )
    return list(rendered)


def repository_texts() -> list[str]:
    """Return the package's code and pages."""
    paths = [*(ROOT / "agenttrain").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--task", choices=sorted((*TOOLS, PROGRAMS)), default="shop")
    parser.add_argument("--hybrid", action="store_true", help="a Qwen3.5, with recurrent layers")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations and weights")
    parser.add_argument("--count", type=int, default=3000, help="demonstrations")
    options = parser.parse_args()
    if options.hybrid and options.task == "sight":
        parser.error("--hybrid: a model that sees is a Qwen3-VL; choose another --task")
    return options


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    sees = options.task == "sight"
    if options.task == PROGRAMS:
        tokenizer = build_tokenizer(repository_texts(), sees=False, vocabulary=8192)
    else:
        tokenizer = build_tokenizer(render(options.task, options.count, options.seed), sees=sees)
    model: PreTrainedModel
    if sees or options.hybrid:
        model = build_seeing_model(tokenizer) if sees else build_hybrid_model(tokenizer)
    else:
        model = build_model(tokenizer, context=32768 if options.task == PROGRAMS else 1024)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    if sees:
        (options.out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2))
    print(f"{options.out}: {len(tokenizer)} tokens, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
