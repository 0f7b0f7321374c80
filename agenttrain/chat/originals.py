"""Stock templates of known families to look at, and small tokenizers to try them with.

The templates are those that the test dependency `trl` carries as data (it is read, not imported),
and for Mistral those that `mistral_common` makes. For families whose templates come with no package
there are templates of ours that write the same turns (`OWN`).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agenttrain.chat.families import Family

TRL = "trl"
TEMPLATES = "chat_templates"
MISTRAL = "mistral_common:"
OWN = {
    # A turn begins on a new line; without a system message there is one of the model's.
    "own:dbrx": (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}"
        "{%- endif %}{%- for message in messages %}{{- '' if loop.first else '\n' }}"
        "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '\n<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # A turn ends with a line break.
    "own:falcon_mamba": (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
        "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
}
"""By the names that families know them by."""


def originals_folder() -> Path | None:
    """The folder of the stock templates; None when they are not installed."""
    package = find_spec(TRL)
    folders = list(package.submodule_search_locations or ()) if package else []
    folder = Path(folders[0]) / TEMPLATES if folders else None
    return folder if folder and folder.is_dir() else None


def original(name: str) -> str | None:
    """The source of a stock template, e.g. of `qwen3`, `mistral_common:v7` or `own:dbrx`; None
    where it is not installed."""
    if name in OWN:
        return OWN[name]
    folder = originals_folder()
    if folder is None:
        return None
    if not name.startswith(MISTRAL):
        file = folder / f"{name}.jinja"
        return file.read_text(encoding="utf-8") if file.is_file() else None
    if find_spec("mistral_common") is None:
        return None
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    # `v7`, or with thinking `v13:thinking`; `v1` is that of SentencePiece.
    version, _, thinking = name.removeprefix(MISTRAL).partition(":")
    return generate_chat_template(
        spm=version == "v1",
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=bool(thinking),
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


@cache
def small_tokenizer(family: Family) -> Any:
    """A tokenizer of single bytes with the family's control tokens: enough to try a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in family.control])
    core.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=family.control[0],
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
    )
