"""`agenttrain.train`: a run started by Python code, in a script or a notebook.

It composes, checks and runs what the command line would with the same settings. Importing this
module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.exit_codes import FAILED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agenttrain.settings.run_config import RunConfig

Code = Callable[..., Any]
"""A function or a class, which has a name at the top of a module or notebook."""


class RunFailed(AgenttrainError):
    """A run ended by an error; the message gives its folder and the reason."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended: its folder, and what is in it.

    Example::

        run = train(debug="tiny")
        run.summary["eval"]["after"]["reward"]
        model, tokenizer = run.load_policy()
    """

    folder: Path
    """The run folder (docs/operate/run-folder.md). `train(resume=run.folder)` goes on with it."""
    status: str
    """``finished``; ``preempted``: stopped by Ctrl-C or a signal, with a checkpoint;
    ``interrupted``: stopped at once, with the checkpoints that were there."""

    @property
    def summary(self) -> dict[str, Any]:
        """The scores before and after training, seconds and steps, as in summary.json."""
        from agenttrain.tracking.run_folder import read_summary

        return read_summary(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step: ``[{"step": 1, "reward": 0.25, "loss": …}, …]``.

        docs/reference/metrics.md lists the names. Empty for an evaluation.
        """
        from agenttrain.utils.json_lines import read_rows

        file = self.folder / "metrics.jsonl"
        return list(read_rows(file)) if file.exists() else []

    def evaluate(self, *overrides: str, **settings: Any) -> RunResult:
        """Evaluate the newest checkpoint, as ``agenttrain eval run=<folder>`` does.

        Settings are those that such an evaluation may change, e.g. ``eval={"questions": 200}``. The
        scores are in ``summary["eval"]["after"]`` of the result. Raises ConfigError and RunFailed.
        """
        return start("eval", [f"run={self.folder}", *overrides], settings)

    def load_policy(
        self, step: int | Literal["best"] | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a checkpoint: the newest one, that of a step, or that of the best evaluation.

        Returns the model of transformers, on the CPU, in the number format of the training, with
        adapters merged, and the tokenizer with the chat template of the training::

            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                return_tensors="pt", return_dict=True)  # [1, T]
            model.generate(**ids)  # [1, T + new tokens]

        Raises ConfigError if there is no such checkpoint, CheckpointError if it is incomplete.
        """
        from agenttrain.commands.export import LATEST, checkpoint_to_export, load_checkpoint

        if not (self.folder / LATEST).is_dir():
            raise ConfigError(f"{self.folder}: has no checkpoint yet; train it further first")
        checkpoint = checkpoint_to_export(self.folder, None if step is None else str(step))
        return load_checkpoint(checkpoint)


def train(
    *overrides: str,
    tools: Sequence[str | Code] | Mapping[str, Any] | None = None,
    reward: Sequence[str | Code] | Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunResult:
    """Train an agent, as ``agenttrain train`` does with the same settings; return the run.

    Example::

        def add(a: int, b: int) -> int:
            \"\"\"Add two numbers.\"\"\"
            return a + b

        def right(rollout, answer) -> float:
            return float(answer in rollout.trajectories[-1].messages[-1]["content"])

        run = train(
            "experiment=none", model={"path": "my_model"}, steps=20, optimizer={"lr": 1e-5},
            data={"train": make_rows}, tools=["calculator", add], reward=[right],
        )

    `overrides` are words of the command line (``"algorithm=rloo"``, ``"--config-dir", "conf"``).
    `settings` are the sections of the YAML; they come after the words. A mapping changes the keys
    that it has; a list of `tools` or `reward` replaces the experiment's. Functions and classes may
    stand wherever the YAML has a `_target_`.

    Returns when the run has ended. Ctrl-C (a notebook's stop button) stops it at the next safe
    point with a checkpoint, and returns it; again, two seconds later, at once. A running event
    loop, such as a notebook's, waits meanwhile.

    Raises ConfigError before anything starts, with all mistakes in the settings; RunFailed for a
    run that ended by an error. An error in agenttrain itself is raised as it is.
    """
    components = {"tools": tools, "reward": reward}
    replaced = {name: value for name, value in components.items() if value is not None}
    return start("train", overrides, {**settings, **replaced})


def start(verb: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> RunResult:
    """Compose, check and run one run of `verb` in this process; return it once it has ended."""
    from agenttrain.commands import running
    from agenttrain.commands.verbs import parse
    from agenttrain.settings.command_line import command_of
    from agenttrain.settings.python_values import as_overrides
    from agenttrain.tracking.run_folder import read_summary
    from agenttrain.utils.event_loop import without_running_loop
    from agenttrain.utils.signals import listening

    _, args, words = parse([verb, *overrides, *as_overrides(settings)])
    if args.cfg or args.info or args.hydra_help:
        raise ConfigError("--cfg, --info and --hydra-help print: type them after `agenttrain`")
    folder = Path()  # set by `before_start`

    def before_start(run_folder: Path, config: RunConfig) -> None:
        """Take the run's folder. Raises ConfigError for a run of several processes."""
        nonlocal folder
        folder = run_folder
        if config.distributed.name != "single":
            raise ConfigError(
                f"distributed={config.distributed.name}: train() runs in this process; start "
                "several with `agenttrain`, or set distributed=single"
            )

    command = replace(command_of(verb, args, words), before_start=before_start)
    if command.sweep:
        raise ConfigError("-m: train() starts one run; call it for each, or type `agenttrain -m …`")
    if "RANK" in os.environ:
        raise ConfigError("RANK is set: train() runs in one process; start `agenttrain` instead")
    with without_running_loop(), listening(defers_interrupts=True):
        code = running.run(command)
    summary = read_summary(folder)
    if code == FAILED:
        raise RunFailed(f"{folder}: {summary.get('error') or 'it failed; the reason is above'}")
    return RunResult(folder, str(summary.get("status")))
