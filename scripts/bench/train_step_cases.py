"""The rollouts, the model and the variants that `train_step.py` compares."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agenttrain.algorithms.credit import set_advantages
from agenttrain.training.batch import TrainingSequence, make_sequences
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.training.segments import one_after_the_other
from agenttrain.types import Completion, Finish, Origin, Rollout, Task

CPU = torch.device("cpu")
TOKEN_BUDGET = 16384
BUDGET_MB = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch: `tasks` prompts of `group_size` rollouts each over one model."""

    sigma: float = 0.8
    """Of the log-normal length of what follows the prompt."""
    group_size: int = 8
    tasks: int = 2
    vocabulary: int = 32_000
    system: int = 0
    """Tokens before the prompts, the same in all of them."""
    prompt: int = 64
    median: int = 192
    """Tokens after the prompt: half of the rollouts have fewer."""
    longest: int = 2048
    seed: int = 1
    """Of lengths and tokens."""


SIGMAS = (0.4, 0.8, 1.2)
SHARED_PREFIX = Case(sigma=0.4, prompt=768, median=128)
"""Long prompts, computed once per group."""
TREE = Case(sigma=0.4, system=256, tasks=4, group_size=4, median=128)
"""Two levels of prefixes: of all rollouts, and of each group."""


def cases(quick: bool) -> dict[str, Case]:
    """Return the cases of the comparison with TRL by name."""
    shorter = {"median": 96, "longest": 512} if quick else {}
    by_sigma = {f"sigma_{sigma}": Case(sigma=sigma, **shorter) for sigma in SIGMAS}
    if quick:
        return by_sigma
    by_group = {f"group_{g}": Case(group_size=g, tasks=16 // g) for g in (4, 16)}
    by_vocabulary = {
        "vocabulary_1000": Case(vocabulary=1_000),
        "vocabulary_152000": Case(vocabulary=152_000, group_size=4, tasks=1),
    }
    return {**by_sigma, **by_group, **by_vocabulary}


def model(case: Case) -> Qwen3ForCausalLM:
    """A random Qwen3 of 4 layers of 256 with a head of its own, fp32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).float().eval()


def rollouts(case: Case) -> list[Rollout]:
    """Rollouts whose every fourth token after the prompt is a tool's, in runs of 16."""
    noise = torch.Generator().manual_seed(case.seed)
    lengths = torch.empty(case.tasks, case.group_size).log_normal_(0, case.sigma, generator=noise)
    system = torch.randint(case.vocabulary, (case.system,), generator=noise).tolist()
    made = []
    for task in range(case.tasks):
        own = torch.randint(case.vocabulary, (case.prompt,), generator=noise).tolist()
        prompt = system + own
        for sample in range(case.group_size):
            own = min(case.longest, max(4, round(case.median * lengths[task, sample].item())))
            ids = torch.randint(case.vocabulary, (own,), generator=noise).tolist()
            made.append(_rollout(f"g{task}", sample, prompt, ids))
    return made


def _rollout(group: str, sample: int, prompt: list[int], ids: list[int]) -> Rollout:
    task = Task(task_id=group, messages=())
    grown = Rollout(task=task, rollout_id=f"{group}-{sample}", group_id=group, sample=sample)
    grown.trajectories[0].append_context(prompt, Origin.prompt)
    for start in range(0, len(ids), 64):
        sampled, tool = ids[start : start + 48], ids[start + 48 : start + 64]
        grown.trajectories[0].append_sampled(
            Completion(
                token_ids=tuple(sampled),
                logprobs=(-10.0,) * len(sampled),
                finish=Finish.stop,
                versions=((0, len(sampled)),),
            ),
            grown.trajectories[0].token_ids,
        )
        grown.trajectories[0].append_context(tool, Origin.tool)
    set_advantages(grown, (-1.0) ** sample)
    return grown


Step = Callable[[], None]
"""One forward and backward pass over all rollouts, from zero gradients."""


def bare_step(net: Any, rows: Sequence[TrainingSequence]) -> Step:
    """Each rollout alone, no padding, the head on sampled positions only, log_softmax, backward."""
    tokens = sum(row.sampled_length for row in rows)

    def step() -> None:
        net.zero_grad()
        for row in rows:
            hidden = net.model(input_ids=row.token_ids_T[None], use_cache=False)
            logits = net.lm_head(hidden.last_hidden_state[0, row.targets_S])
            labels = row.token_ids_T[row.targets_S + 1]
            logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            _loss(logprobs, row.advantages_S, tokens).backward()

    return step


def our_step(
    net: Any, rows: Sequence[TrainingSequence], share_prefix: SharePrefix, *, flat: bool = False
) -> Step:
    """Packing, `Scorer`, and the same loss; `flat` makes each branch a sequence of its own."""
    scorer = Scorer(net, temperature=1.0, logits_budget_mb=BUDGET_MB, share_prefix=share_prefix)
    tokens = sum(row.sampled_length for row in rows)

    def step() -> None:
        net.zero_grad()
        with scorer.ready():
            for batch in scorer.pack(rows, TOKEN_BUDGET, CPU):
                if flat:
                    lengths = [segment.length for segment in batch.segments]
                    batch = replace(batch, segments=one_after_the_other(lengths))
                logprobs, _ = scorer(batch)
                _loss(logprobs, batch.advantages_S, tokens).backward()

    return step


def _loss(logprobs: Tensor, advantages: Tensor, tokens: int) -> Tensor:
    return -(advantages * (logprobs - logprobs.detach()).exp()).sum() / tokens


def trl_step(net: Any, made: Sequence[Rollout]) -> Step:
    """TRL's own `GRPOTrainer._compute_loss` on the batch padded as TRL pads it."""
    trainer, inputs = _trl_trainer(net), _trl_inputs(made)

    def step() -> None:
        net.zero_grad()
        trainer._compute_loss(net, inputs).backward()

    return step


def _trl_trainer(net: Any, *, use_cpu: bool = True, bf16: bool = False) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=use_cpu,
        bf16=bf16,
        gradient_checkpointing=False,
        loss_type="dapo",
        per_device_train_batch_size=2,
        num_generations=2,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=net,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    net.eval()
    return trainer


def _trl_inputs(made: Sequence[Rollout]) -> dict[str, Tensor]:
    ids = [torch.tensor(one.trajectories[0].token_ids) for one in made]
    masks = [torch.tensor(one.trajectories[0].loss_mask) for one in made]
    cut = [one.trajectories[0].prompt_length for one in made]
    prompts = [row[:n].flip(0) for row, n in zip(ids, cut, strict=True)]
    own = [row[n:] for row, n in zip(ids, cut, strict=True)]
    return {
        "prompt_ids": _padded(prompts).flip(1),
        "prompt_mask": _padded([torch.ones_like(row) for row in prompts]).flip(1),
        "completion_ids": _padded(own),
        "completion_mask": _padded([torch.ones_like(row) for row in own]),
        "tool_mask": _padded([row[n:] for row, n in zip(masks, cut, strict=True)]),
        "advantages": torch.tensor([one.trajectories[0].advantages[0] for one in made]),
        "num_items_in_batch": torch.tensor(sum(one.sampled_length for one in made)),
    }


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def steps(case: Case, names: Sequence[str]) -> dict[str, Step]:
    """Variants by name, each on a model of its own with the same weights."""
    made = rollouts(case)
    rows = [make_sequences(one)[0] for one in made]
    build = {
        "bare": lambda net: bare_step(net, rows),
        "ours": lambda net: our_step(net, rows, SharePrefix.never),
        "shared": lambda net: our_step(net, rows, SharePrefix.auto),
        "flat": lambda net: our_step(net, rows, SharePrefix.auto, flat=True),
        "trl": lambda net: trl_step(net, made),
    }
    return {name: build[name](model(case)) for name in names}


def loss_step(name: str, *, tokens: int, vocabulary: int) -> Step:
    """Log-probabilities, entropies and their backward pass alone, from given hidden states."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens + 1, 256, requires_grad=True)
    head = torch.nn.Linear(256, vocabulary, bias=False)
    labels = torch.randint(vocabulary, (tokens + 1,))
    if name == "trl":
        return _trl_loss_step(hidden, head, labels)

    def step() -> None:
        from agenttrain.training.head import LogitTransform
        from agenttrain.training.logprobs import head_logprobs

        logprobs, _ = head_logprobs(
            hidden[:-1], head, labels[1:], transform=LogitTransform(), logits_budget_mb=BUDGET_MB
        )
        logprobs.sum().backward()

    return step


class _Headed(torch.nn.Module):
    """A model whose hidden states are given, as `add_fused_lm_head` wants one."""

    def __init__(self, hidden: Tensor, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type=""))
        self.base_model = lambda *_, **__: SimpleNamespace(last_hidden_state=hidden[None])

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, **_: object) -> None:
        raise AssertionError("only the fused head is called")


def _trl_loss_step(hidden: Tensor, head: torch.nn.Module, labels: Tensor) -> Step:
    import contextlib

    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    headed = _Headed(hidden, head)
    add_fused_lm_head(headed, outputs=("log_probs", "entropy"))
    score = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__  # without its profiler
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))

    def step() -> None:
        logprobs, _, _ = score(
            trainer,
            headed,
            labels[None],
            torch.ones_like(labels)[None],
            labels.numel() - 1,
            compute_entropy=True,
        )
        logprobs.sum().backward()

    return step
