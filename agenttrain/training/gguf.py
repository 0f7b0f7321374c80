"""Conversion of a GGUF file into a folder that transformers loads, in a process of its own.

    python -m agenttrain.training.gguf SmolLM2-135M-Instruct.Q4_1.gguf my_folder

`agenttrain.utils.gguf` runs it and says where the folder is. What transformers 5.23 reads wrongly
from such a file is mended: pre-tokenizers and the size of attention heads.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

FLOAT32_BYTES = 4
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Names of pre-tokenizers (`tokenizer.ggml.pre`) that are GPT-2's with each digit for itself.
transformers 5.23 takes them for GPT-2's: "a  1" would become other tokens than in training."""


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a new folder, in float32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reader = GGUFReader(file)
    size = FLOAT32_BYTES * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise OSError(f"float32 weights take {size:,} bytes, and {free:,} are free")
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    pre = reader.fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() in DIGITS_ALONE:
        # transformers 5.23 leaves out that each digit is a token of its own.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    config = AutoConfig.from_pretrained(file.parent, **source)
    architecture = reader.fields["general.architecture"].contents()
    head_dim = reader.fields.get(f"{architecture}.attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = int(head_dim.contents())  # transformers 5.23 takes 128 for each Qwen3
    quantized = AutoModelForCausalLM.from_pretrained(
        file.parent,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **source,
    )
    # A model that was loaded from a GGUF file counts as quantized and cannot be saved. A new model
    # on the meta device takes its weights over.
    config = quantized.config
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
