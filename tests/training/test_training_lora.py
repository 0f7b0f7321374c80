"""Adapters: what is trained, the reference, checkpoints of adapters alone, export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from training_cases import policy, random_groups, rollout, weights
from transformers import AutoModelForCausalLM

from agenttrain.commands.export import export
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.config import LoraSettings
from agenttrain.training.lora import adapter_weights, add_lora, merged, save_adapter_config
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.types import Origin

TEXT = [7, 8, 9, 20, 21, 22, 2]


def base(folder: Path, **settings: object) -> Path:
    """The tiny model on disk, as a user's."""
    tiny.model(**settings).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def adapted(folder: Path, rank: int = 4, **settings: object):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    add_lora(model, LoraSettings(rank=rank, **settings))
    return model


def write_adapter(model: torch.nn.Module, folder: Path) -> None:
    """A folder of adapters, as a checkpoint has it."""
    save_adapter_config(model, folder)
    save_file(adapter_weights(model), folder / "adapter_model.safetensors")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[7, 8, 9, 20, 2]])).logits


def test_only_the_adapters_are_trained(tmp_path: Path) -> None:
    trained = policy(adapted(base(tmp_path)), lr=1e-2)
    before = weights(trained)
    train_policy(trained, random_groups(0))
    changed = {n for n, t in weights(trained).items() if not torch.equal(t, before[n])}
    # B is zero at first, so that A has no gradient in the first update.
    assert changed and all("lora_B" in name for name in changed)
    assert not any("lm_head" in name or "embed" in name for name in changed)


def test_the_reference_is_the_model_without_adapters(tmp_path: Path) -> None:
    algorithm = {"kl": {"beta": 0.1}}
    trained = policy(adapted(base(tmp_path / "m")), algorithm=algorithm, lr=1e-2)
    full = policy(tiny.model(), algorithm=algorithm, lr=1e-9)
    first = train_policy(trained, random_groups(0))
    assert first["kl"] == pytest.approx(0, abs=1e-7), "an adapter starts as nothing"
    moved = train_policy(trained, random_groups(1))
    assert moved["kl"] > 1e-6
    assert train_policy(trained, random_groups(2))["grad_norm"] > 0, (
        "training goes on with adapters"
    )
    assert train_policy(full, random_groups(0))["kl"] == pytest.approx(0, abs=1e-7)


def continued(folder: Path, **settings: object):
    """A policy with the adapters of a folder, and the logprobs of a text under these."""
    model = adapted(folder)
    loaded = policy_logprobs(model, TEXT)
    return policy(model, algorithm={"kl": {"beta": 0.1}}, lr=1e-2, **settings), loaded


def reference_logprobs(trained: Policy) -> list[float]:
    one = rollout([(Origin.prompt, TEXT[:1]), (Origin.sampled, TEXT[1:])])
    ((sequence,),) = trained.score([[one]])
    return sequence.ref_logprobs_S.tolist()


def test_the_reference_of_continued_adapters_is_the_policy_at_the_start_of_the_run(
    tmp_path: Path,
) -> None:
    warm = policy(adapted(base(tmp_path / "m")), lr=1e-1)
    train_policy(warm, random_groups(0))
    write_adapter(warm.model, tmp_path / "warm")
    trained, loaded = continued(tmp_path / "warm")
    before = weights(trained)
    assert reference_logprobs(trained) == pytest.approx(loaded, abs=1e-5)
    assert train_policy(trained, random_groups(0))["kl"] == pytest.approx(0, abs=1e-7)
    moved = weights(trained)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in moved.items())
    assert train_policy(trained, random_groups(1))["kl"] > 1e-6
    assert reference_logprobs(trained) == pytest.approx(loaded, abs=1e-5)
    # Scoring put the trained adapters back to the bit.
    after = weights(trained)
    trained.score(random_groups(2))
    assert all(torch.equal(tensor, weights(trained)[name]) for name, tensor in after.items())

    # A resumed run loads model.path again before its checkpoint.
    checkpoints = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1)
    checkpoints.save(trained, step=2)
    resumed, _ = continued(tmp_path / "warm")
    checkpoints.load_latest(resumed)
    assert reference_logprobs(resumed) == reference_logprobs(trained)
    kl = train_policy(trained, random_groups(2))["kl"]
    assert train_policy(resumed, random_groups(2))["kl"] == kl > 1e-6


def test_sharded_continued_adapters_have_the_same_reference(tmp_path: Path, alone: None) -> None:
    warm = policy(adapted(base(tmp_path / "m")), lr=1e-1)
    train_policy(warm, random_groups(0))
    write_adapter(warm.model, tmp_path / "warm")
    trained, loaded = continued(tmp_path / "warm", processes={"sharding": Sharding()})
    train_policy(trained, random_groups(0))
    assert reference_logprobs(trained) == pytest.approx(loaded, abs=1e-5)
    assert train_policy(trained, random_groups(1))["kl"] > 1e-6


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left behind."""
    AcceleratorState._reset_state()
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state()


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_to_the_bit(tmp_path: Path) -> None:
    folder = base(tmp_path / "m")

    def saver() -> Checkpoints:
        return Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1)

    whole = policy(adapted(folder), lr=1e-2)
    for seed in range(3):
        train_policy(whole, random_groups(seed))
    first = policy(adapted(folder), lr=1e-2)
    train_policy(first, random_groups(0))
    path = saver().save(first, step=1)
    assert not (path / "model.safetensors").exists()
    sizes = [
        (path / name).stat().st_size
        for name in ("adapter_model.safetensors", "adapter_config.json")
    ]
    assert sizes[0] < (folder / "model.safetensors").stat().st_size
    resumed = policy(adapted(folder), lr=1e-2)
    saver().load_latest(resumed)
    for seed in (1, 2):
        train_policy(resumed, random_groups(seed))
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_a_checkpoint_of_adapters_loads_in_plain_transformers(tmp_path: Path) -> None:
    trained = policy(adapted(base(tmp_path / "m")), lr=1e-1)
    train_policy(trained, random_groups(0))
    path = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(trained, step=1)
    loaded = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(logits(loaded), logits(trained.model))
    assert not torch.equal(logits(loaded), logits(tiny.model()))
    add_lora(loaded, LoraSettings(rank=4))
    assert torch.equal(logits(loaded), logits(trained.model)), "adapters that are there stay"
    assert all(p.requires_grad == ("lora_" in n) for n, p in loaded.named_parameters())


def test_export_merges_adapters_into_a_plain_model(tmp_path: Path) -> None:
    trained = policy(adapted(base(tmp_path / "m")), lr=1e-1)
    train_policy(trained, random_groups(0))
    path = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(trained, step=1)
    export(path, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and "tokenizer.json" in names
    assert not names & {"adapter_config.json", "policy.pt", "rng-0.pt", "manifest.json"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(merged), logits(trained.model), rtol=1e-4, atol=1e-5)


def test_adapters_are_merged_in_float32_and_cast_once(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tiny.model().bfloat16().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_lora(model, LoraSettings(rank=4))
    trained = policy(model, lr=1e-3)
    train_policy(trained, random_groups(0))
    path = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(trained, step=1)
    exact = dict(named_weights(trained.model))
    for dtype, format in {"auto": torch.float32, "bfloat16": torch.bfloat16}.items():
        export(path, tmp_path / dtype, dtype=dtype)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert merged.dtype is format
        for name, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, exact[name].to(format), rtol=1e-6, atol=1e-8)
    changed = [n for n, t in exact.items() if not torch.equal(t, t.bfloat16().float())]
    assert len(changed) == 14  # 7 linear layers of each of 2 layers: what bfloat16 would round


def test_adapters_without_ends_of_sequence_keep_those_of_their_base(tmp_path: Path) -> None:
    trained = policy(adapted(base(tmp_path / "m", eos_token_id=2)))
    path = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(trained, step=1)
    (path / "generation_config.json").write_text("{}")
    model, _ = merged(path, "auto")
    assert model.config.eos_token_id == 2


def test_export_converts_the_format_of_full_weights(tmp_path: Path) -> None:
    trained = policy()
    path = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(trained, step=1)
    export(path, tmp_path / "out", dtype="bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype is torch.bfloat16
    for name, tensor in weights(trained).items():
        assert torch.equal(plain.state_dict()[name], tensor.bfloat16()), name


def test_targets_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.lora.targets=\[query\]"):
        adapted(base(tmp_path), targets=["query"])


def test_one_target_that_the_model_does_not_have_is_refused_beside_one_that_it_has(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"has no module v_prj \(did you mean 'v_proj'\?\)"):
        adapted(base(tmp_path), targets=["q_proj", "v_prj"])


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_weight_that_two_layers_share_is_refused(
    target: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="embedding and head of Qwen3ForCausalLM are one weight"):
        adapted(base(tmp_path), targets=["q_proj", target])


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_of_embedding_and_head_are_saved_resumed_and_exported(tmp_path: Path) -> None:
    folder = base(tmp_path / "m", tie_word_embeddings=False)
    targets = ["embed_tokens", "lm_head", "v_proj"]
    checkpoints = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1)
    trained = policy(adapted(folder, targets=targets), lr=1e-2)
    for seed in range(2):
        train_policy(trained, random_groups(seed))
    path = checkpoints.save(trained, step=1)
    resumed = policy(adapted(folder, targets=targets), lr=1e-2)
    checkpoints.load_latest(resumed)
    assert torch.equal(logits(resumed.model), logits(trained.model))
    assert not torch.equal(
        logits(resumed.model), logits(AutoModelForCausalLM.from_pretrained(folder))
    )
    export(path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(merged), logits(trained.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 8}, {"rank": 4, "alpha": 8.0}])
def test_loaded_adapters_are_not_taken_for_others(settings: dict, tmp_path: Path) -> None:
    model = adapted(base(tmp_path / "base"))
    write_adapter(model, tmp_path / "adapters")
    expected = r"set model.lora.rank=4 model.lora.alpha=32 to continue"
    with pytest.raises(ValueError, match=expected):
        adapted(tmp_path / "adapters", **settings)
    assert any(p.requires_grad for p in adapted(tmp_path / "adapters", rank=4).parameters())


def test_loaded_adapters_of_other_modules_than_asked_for_are_refused(tmp_path: Path) -> None:
    model = adapted(base(tmp_path / "base"), targets=["q_proj", "v_proj"])
    write_adapter(model, tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"holds adapters of q_proj, v_proj; leave it out"):
        adapted(tmp_path / "adapters", targets=["k_proj"])
    for targets in (["v_proj", "q_proj"], ["all-linear"]):
        adapted(tmp_path / "adapters", targets=targets)
