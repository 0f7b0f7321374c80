"""One run of a verb, from its folder to its exit code: train, sft and eval go the same way.

    code = Run(verb="train", config=config, plain=plain, folder=folder).execute()

A run locks its folder, handles signals, is watched, builds its components, continues from its
newest checkpoint, and records its end in summary.json.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from agenttrain.algorithms.config import (
    Advantage,
    Aggregation,
    AlgorithmConfig,
    RouterReplay,
    Scale,
)
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.chat.saving import saved_tokenizer
from agenttrain.engines.base import Engine, EngineDead
from agenttrain.engines.weights_place import remove_weights_folder
from agenttrain.evaluation import Best, Evaluation, Evaluator, from_json
from agenttrain.health.crash import Evidence
from agenttrain.health.guards import Guards
from agenttrain.health.stop_when import StopWhen
from agenttrain.health.watchdog import Watchdog
from agenttrain.rollout.collector import Collected, Collector, NoRewards, why_unrewarded
from agenttrain.rollout.declared import write_declared
from agenttrain.runs.fingerprints import check_unchanged, fingerprints
from agenttrain.runs.fingerprints import write as write_fingerprints
from agenttrain.runs.loading import make_engine, make_policy
from agenttrain.runs.memory_plan import (
    PlannedHardware,
    device_memory,
    keep_servers_share,
    level_of,
    shares_gpu,
)
from agenttrain.runs.provenance import write_config
from agenttrain.runs.remote import make_remote_engine, make_remote_source, start_rollouts
from agenttrain.runs.report import print_losses, print_scores
from agenttrain.runs.roles import start_roles
from agenttrain.runs.rollouts import Rollouts
from agenttrain.runs.sampling import adapters_are_sent
from agenttrain.runs.setup import Components, prepare, sampling_note
from agenttrain.runs.sources import make_recorded_source, make_sampled_source
from agenttrain.runs.teacher import make_teacher, teacher_prompt
from agenttrain.settings.async_checks import async_note
from agenttrain.settings.command_line import resuming
from agenttrain.settings.engine_checks import (
    broadcast_note,
    has_rollout_process,
    replays_routes,
    run_spec,
)
from agenttrain.settings.machine import run_gpus
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.saved import done_steps
from agenttrain.tracking.cards import peak_tflops
from agenttrain.tracking.rollouts import rollout_limit, write_step
from agenttrain.tracking.run_folder import FolderInUse, lock_folder, read_summary, update_summary
from agenttrain.tracking.timeline import Timeline
from agenttrain.tracking.tracker import SilentTracker, Tracker
from agenttrain.tracking.usage import Usage
from agenttrain.trainer import BatchSource, Trainer
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import CheckpointError, NotWritten, set_stop_tokens
from agenttrain.training.config import ActivationCheckpointing
from agenttrain.training.operations import card_name
from agenttrain.training.policy import Policy
from agenttrain.training.teacher_scores import Teacher
from agenttrain.training.weight_sync import SyncProbe, sync
from agenttrain.training.world import PeerFailed, World
from agenttrain.types import AgenttrainError, ConfigError, Rollout
from agenttrain.utils.exit_codes import DONE, FAILED, INTERRUPTED, PREEMPTED, TERMINATED
from agenttrain.utils.garbage import no_garbage_collection
from agenttrain.utils.json_lines import read_rows
from agenttrain.utils.redaction import hide_in_words, hide_secrets
from agenttrain.utils.signals import Preempted, StopRequest, listening

CROSS_ENTROPY = AlgorithmConfig(
    name="sft",
    group_size=1,
    advantage=Advantage.none,
    scale=Scale.none,
    objective=build_objective("reinforce"),
    aggregation=Aggregation.token_mean,
)
"""The loss of `sft`. Demonstrations have a reward of 1: sum of -log p / tokens of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How a phase of a step is shown, timed and watched."""

    shown: bool = False
    """The console shows its name."""
    watched: bool = True
    """The watchdog has a deadline for it, and the heartbeat its name."""
    timed: bool = False
    """Its wall seconds become a metric."""
    collective: str | None = None
    """Name, for errors, of work that needs torch's collectives; None: the phase has none."""
    evidence: bool = False
    """An error in it leaves a crash bundle."""


PHASES = {
    "rollout": Phase(shown=True, timed=True, evidence=True),
    "data": Phase(shown=True, timed=True),
    "check": Phase(watched=False, evidence=True),
    "train": Phase(shown=True, timed=True, collective="the update", evidence=True),
    "sync": Phase(timed=True, collective="the weight sync"),
    "evaluation": Phase(shown=True),
    "checkpoint": Phase(),
}


@dataclass(slots=True, kw_only=True)
class Run:
    """One process of an execution of a verb. The main one writes its folder.

    `execute` does everything, and builds a trainer by `make_trainer`. The trainer gets this object:
    it puts its work into `phase`, and uses the world, the tracker and the stop request.
    """

    verb: str
    config: RunConfig
    plain: dict[str, Any]
    """The resolved settings, as config.yaml keeps them."""
    folder: Path
    """The run folder; a run in it is resumed."""
    sweep: bool = False
    """True if the folder is one of a sweep's, `<experiment>/<sweep>/<number>`."""
    words: Sequence[str] = ()
    """Arguments of the command that starts a new run; empty for a resumed run."""
    experiment: str | None = None
    """Name of the experiment; None: the name of the folder that holds the run folder."""
    world: World = field(default_factory=World)
    stop: StopRequest = field(default_factory=StopRequest)
    """The request that a signal makes; `execute` puts the one that listens here."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    tracker: Tracker = field(default_factory=SilentTracker)
    timeline: Timeline = field(default_factory=Timeline)
    evidence: Evidence | None = None
    """Writes crash bundles; None: the run writes none."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of the timed phases, which the trainer clears at the start of a step."""
    usage: Usage = field(default_factory=Usage)
    """Tokens, seconds and cost of the run, which the main process knows."""
    started: float = field(default_factory=time.perf_counter)
    """Time at which this execution began."""

    def execute(self) -> int:
        """Run the verb; return the exit code. Raises ConfigError for a folder of another verb."""
        with listening() as self.stop:
            if self.world.size > 1:  # a signal to one process stops all of them
                self.stop.agree = self._agree
            if not self.world.is_main:
                return self._execute()
            try:
                with lock_folder(self.folder):
                    self._record_start()
                    remove_weights_folder(self.folder)  # of a run that was killed
                    try:
                        return self._execute()
                    finally:
                        remove_weights_folder(self.folder)
            except (FolderInUse, OSError) as error:
                print(self._message(error), file=sys.stderr)
                return FAILED

    def _record_start(self) -> None:
        """Record the run in summary.json. Raises ConfigError for a folder of another verb."""
        summary = read_summary(self.folder)
        verb = summary.get("verb", self.verb)
        if verb != self.verb:
            raise ConfigError(
                f"{self.folder}: holds a run of `agenttrain {verb}`, and `agenttrain "
                f"{self.verb}` cannot go on with it. Use `agenttrain {verb}`, or "
                "give another folder: resume= the run that was trained, or "
                "hydra.run.dir= a new one."
            )
        self.sweep = self.sweep or summary.get("sweep", False)
        self.record(
            verb=self.verb,
            sweep=self.sweep or None,
            processes=self.world.size if self.world.size > 1 else None,
            stalled_phase=None,  # remove it: an earlier execution may have stalled
            project=self.project,
            # A resumed run keeps the recorded arguments of its first start.
            **({"arguments": hide_in_words(self.words)} if self.words else {}),
        )

    def _agree(self, signalled: bool) -> bool:
        """Return True, in all processes, if one of them was `signalled`."""
        return self.world.max(float(signalled), "whether a signal came") > 0

    def _execute(self) -> int:
        """Run the verb in the locked folder; the main process reports and records errors."""
        timeline_folder = self.folder if self.config.tracker.timeline else None
        try:
            with (
                Timeline(timeline_folder, f"trainer-{self.world.rank}") as self.timeline,
                Watchdog(self.folder, self.config.watchdog, self.world) as self.watchdog,
            ):
                self.watchdog.begin("load")
                components = self.prepare()
                run_verb = self._evaluate if self.verb == "eval" else self._train
                asyncio.run(run_verb(components))
        except Preempted as stopped:
            return self._preempted(str(stopped))
        except KeyboardInterrupt:
            return self._interrupted()
        except ConfigError:  # reported by the caller, like those of composition
            raise
        except Exception as error:
            if not self.world.is_main:
                raise
            return self._failed(error)
        return DONE

    @no_garbage_collection()  # the many objects of torch and transformers all stay
    def prepare(self) -> Components:
        """Build the run's components, and record them in the folder.

        The main process writes config.yaml before anything slow, so that a run that is stopped
        meanwhile can be resumed. It completes the file afterwards.
        """
        if not self.world.is_main:
            return self._build_components()
        config_file = self.folder / "config.yaml"
        is_new = not config_file.exists()
        if is_new:
            write_config(self.folder, self.plain, certificate=None)
        try:
            components = self._build_components()
        except Exception:
            if is_new:  # without the file, the next try can use the folder
                config_file.unlink(missing_ok=True)
            raise
        digests = fingerprints(components)
        if self.config.resume is not None and done_steps(self.folder):
            check_unchanged(self.folder, digests, self.config.resume_changed)
        write_fingerprints(self.folder, digests)
        write_config(self.folder, self.plain, components.certificate.hash)
        write_declared(self.folder, components.toolbox, components.environments)
        self._print_notes(components)
        return components

    def _build_components(self) -> Components:
        """Call `setup.prepare`. Its ValueError is a mistake in the settings, raised as ConfigError.

        Tools, rewards and rows raise ValueError, as user code that builds them by itself expects.
        """
        try:
            return prepare(self.config, self.verb, self.folder, world=self.world)
        except ValueError as error:
            if type(error) is not ValueError:  # an error of ours, or one about bytes or JSON
                raise
            raise ConfigError(str(error)) from error

    def _print_notes(self, components: Components) -> None:
        """Print the choices that the user did not make; write the template's changes to a file."""
        fix = components.chat.fix
        if fix.chosen:  # a note on the template that was chosen
            print(f"chat template: {fix.chosen}")
        if diff := fix.text():  # changes to the model's own template
            file = self.folder / "chat_template.diff"
            file.write_text(diff, encoding="utf-8")
            print(f"{diff.splitlines()[0]} ({file})")
        for warning in components.certificate.warnings:
            print(f"  {warning}")
        for note in components.notes:
            print(note, flush=True)
        if self.verb == "train":
            config = self.config
            waiting = async_note(config, adapters_are_sent)
            for text in (sampling_note(config), waiting, broadcast_note(config)):
                if text:
                    print(text, flush=True)

    async def _train(self, components: Components) -> None:
        """Train by reinforcement or supervised learning; evaluate before and after."""
        with self._recording_usage():
            async with AsyncExitStack() as stack:
                trainer = await make_trainer(self, components, stack)
                # A signal in the block stops the run between two phases, with a checkpoint.
                with self.stop.deferred(trainer.save_checkpoint):
                    before = await self._evaluate_before(trainer)
                    scores = {"before": before, **_best_record(trainer)}
                    self.record(status="running", error=None, eval=scores)
                    with self._timed("training_seconds"):
                        await trainer.train()
                    evaluations = await trainer.evaluate("after")
                    trainer.save_checkpoint()
        after = trainer.evaluator.summary(evaluations)
        scores = {"before": before, "after": after, **_best_record(trainer)}
        steps = trainer.finished_steps
        # After the last step the run ends anyway, whatever `stop_when` has found.
        stopped = trainer.stop_when.record if steps < self.config.steps else None
        self.record(status="finished", steps=steps, eval=scores, stopped_when=stopped)
        if not self.world.is_main:
            return
        if stopped is not None:
            print(
                f"ended after {steps} of {self.config.steps} steps: {self.config.stop_when} "
                f"({stopped['mean']:.4g})"
            )
        if self.verb == "sft":
            arguments = read_summary(self.folder).get("arguments", ())
            print_losses(self.folder, before, after, self.tracker.views, arguments)
        else:
            self._print_scores(components, before, evaluations, trainer)

    async def _evaluate_before(self, trainer: Trainer) -> dict[str, Any]:
        """Return the evaluation before the first step; a resumed run reads it from its summary."""
        before = None
        if self.world.is_main:
            before = read_summary(self.folder).get("eval", {}).get("before")
        before = self.world.broadcast(before, "the evaluation before training")
        if before is None:
            before = trainer.evaluator.summary(await trainer.evaluate("before"))
        return before

    async def _evaluate(self, components: Components) -> None:
        """Evaluate the model as it is, without training."""
        with self._recording_usage():
            async with AsyncExitStack() as stack:
                trainer = await make_trainer(self, components, stack)
                evaluations = await trainer.evaluate("eval")
                # "after", as the last evaluation of a training run: readers of summary.json find
                # the scores of both in one place.
                scores = {"after": trainer.evaluator.summary(evaluations)}
                # Inside the stack: an error must reach the trackers before they close as finished.
                if self.world.is_main:
                    self._write_rollouts(evaluations, scores)
        if not self.world.is_main:
            return
        self.record(status="finished", steps=0, eval=scores)
        no_scores_before: dict[str, Any] = {}  # nothing was trained
        self._print_scores(components, no_scores_before, evaluations)

    def _write_rollouts(self, evaluations: Sequence[Any], scores: dict[str, Any]) -> None:
        """Write the rollouts of the evaluations; raise NoRewards if not one has a reward."""
        rollouts = [rollout for evaluation in evaluations for rollout in evaluation.rollouts]
        settings = self.config.tracker
        limit = rollout_limit(settings.rollouts)
        write_step(self.folder, 0, rollouts, limit, settings.arrays_above)
        reason = why_unrewarded(rollouts)  # None: there are rewards; "": no rollout was scored
        if reason is not None:
            self.record(steps=0, eval=scores)  # the other scores count all the same
            cause = reason or "all of them failed"
            message = f"not one of {len(rollouts)} rollouts has a reward: {cause}"
            raise NoRewards(message, Collected())  # empty: an evaluation collects for no step

    def _print_scores(
        self,
        components: Components,
        before: dict[str, Any],
        evaluations: Sequence[Any],
        trainer: Trainer | None = None,
    ) -> None:
        """Print the report at the end of a run that sampled rollouts."""
        best = None if trainer is None else trainer.best
        if trainer and best and best.are_all_at(trainer.finished_steps):
            best = None  # the evaluation after the last step, whose scores are printed anyway
        print_scores(
            before=from_json(before),
            # For the type checker. A run that sampled rollouts has no others: HeldOutLoss, the
            # other type, is that of `sft`.
            after=[e for e in evaluations if isinstance(e, Evaluation)],
            decode=components.chat.decode,
            run_folder=self.folder,
            dashboards=self.tracker.views,
            best=None if best is None else best.record,
        )

    @contextmanager
    def phase(
        self, name: str, step: int, *, label: str = "", rollouts: Sequence[Rollout] = ()
    ) -> Iterator[None]:
        """Show, time and watch the block as a phase of a step, as PHASES says.

        `label` is shown instead of the name. `rollouts` are those of the step so far, for a crash
        bundle.
        """
        phase = PHASES[name]
        with ExitStack() as stack:
            if phase.evidence and self.evidence is not None:
                stack.enter_context(self.evidence.collect(step, rollouts))
            if phase.shown:
                self.tracker.phase(label or name)
            if phase.timed:
                stack.enter_context(self._clock(name))
            if phase.watched:
                stack.enter_context(self.watchdog.phase(name, step))
                stack.enter_context(self.timeline.phase(name, step, label))
            if phase.collective is not None:
                stack.enter_context(self.world.collective(f"{phase.collective} of step {step}"))
            yield

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        """Add the block's wall seconds to `seconds`, even if it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the block's wall seconds to the field `name` of summary.json, even if it raises."""
        earlier = read_summary(self.folder).get(name, 0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._record_end(**{name: earlier + time.perf_counter() - started})

    @contextmanager
    def _recording_usage(self) -> Iterator[None]:
        """Record the block's seconds and the run's usage in summary.json, even if it raises."""
        with self._timed("seconds"):
            try:
                yield
            finally:
                self._record_end(usage=self.usage.summary())

    def record(self, **changes: Any) -> None:
        """Call `update_summary` in the main process only."""
        if self.world.is_main:
            update_summary(self.folder, **changes)

    def _record_end(self, **changes: Any) -> None:
        """Call `record` at the end of the run, where a full disk must not hide its error."""
        with suppress(OSError):
            self.record(**changes)

    @property
    def project(self) -> str:
        """Name of the experiment, typed or that of the folder that holds the run or its sweep."""
        if self.experiment is not None:
            return self.experiment
        parent = self.folder.resolve().parent
        return parent.parent.name if self.sweep else parent.name

    @property
    def name(self) -> str:
        """The run's name at its trackers; in a sweep, with the sweep's name before its number."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}-{folder.name}" if self.sweep else folder.name

    def checkpoints(self, tokenizer: Any) -> Checkpoints:
        """Return the run's checkpoints."""
        folder, keep = self.folder / "checkpoints", self.config.checkpoint.keep
        return Checkpoints(folder, tokenizer=tokenizer, keep=keep, main=self.world.is_main)

    def restore(self, checkpoints: Checkpoints, policy: Policy) -> dict[str, Any] | None:
        """Load the newest checkpoint of a resumed run into the policy; return its state.

        Return None if the run starts at step 0: it is new, or was stopped before its first
        checkpoint. Raises CheckpointError if a checkpoint that it has saved is gone.
        """
        if self.config.resume is None:
            return None
        exists = False
        # The main process looks, and all processes raise its error.
        with self.world.together("whether there is a checkpoint", CheckpointError):
            if self.world.is_main:
                exists = not checkpoints.empty
                if not exists:  # may raise CheckpointError
                    self._report_new_start(checkpoints.folder)
        return checkpoints.load_latest(policy) if self.world.broadcast(exists) else None

    def _report_new_start(self, empty_folder: Path) -> None:
        """Report that a resumed run without a checkpoint begins at step 0.

        Raises CheckpointError if the run has saved one, which is gone from `empty_folder`.
        """
        saved = read_summary(self.folder).get("latest_checkpoint")
        if saved is not None:
            raise CheckpointError(
                f"{self.folder / saved}: the run saved this checkpoint, and {empty_folder} holds "
                "none now. Put it back; or start a new run: resuming would begin at step 0."
            )
        metrics = self.folder / "metrics.jsonl"
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        cut_note = f", {steps} recorded steps are cut" if steps else ""
        print(f"no checkpoint yet: starting again from step 0{cut_note}", flush=True)

    def make_tracker(self, done: int) -> Tracker:
        """Build the tracker of a run that has done `done` steps, and set `usage`.

        Runs of one experiment share a folder: the parent of the run's, or of its sweep's.
        """
        if not self.world.is_main:
            return SilentTracker()
        tracker = Tracker(
            self.folder,
            self.config.tracker,
            project=self.project,
            name=self.name,
            total_steps=self.config.steps,
            resume_step=None if self.config.resume is None else done,
            shared=self.folder.parent.parent if self.sweep else self.folder.parent,
            group=self.folder.resolve().parent.name if self.sweep else None,
            run_config=self.plain,
        )
        # After the tracker, which cuts the rows of metrics.jsonl that the resumed run repeats.
        self.usage = self._make_usage()
        return tracker

    def _make_usage(self) -> Usage:
        """Return the usage of the run until now: that of its earlier parts, if it is resumed."""
        cost, metrics = self.config.cost, self.folder / "metrics.jsonl"
        resumed = self.config.resume is not None and metrics.exists()
        asked = 1 if shares_gpu(self.config) else run_gpus(self.config, self.verb, self.world.size)
        return Usage(
            gpus=cost.gpus or asked,
            gpu_hour=cost.gpu_hour,
            earlier_s=read_summary(self.folder).get("seconds", 0.0),
            rows=read_rows(metrics) if resumed else (),
            started=self.started,
        )

    def choose_level(self) -> bool:
        """Choose a level for training.activation_checkpointing=auto; return True if it was `auto`.

        Every process gets the level that the estimate for the smallest GPU gives.
        """
        setting = self.config.training.activation_checkpointing
        if setting is not ActivationCheckpointing.auto or self.verb == "eval":
            return False
        memory, kind = device_memory()
        memories = self.world.gather([memory], "the memory of the devices")
        level, note = ActivationCheckpointing.none, ""
        if self.world.is_main:
            machine = PlannedHardware(
                devices=self.world.size,
                memory=min((size for size in memories if size is not None), default=None),
                kind=kind,
                shared=shares_gpu(self.config),
            )
            try:
                level = self._level_for(machine)
            except ConfigError as error:
                note = f"all activations are kept, because no level could be chosen: {error}"
            if level is not ActivationCheckpointing.none:
                note = f"training.activation_checkpointing={level}: by the estimate of the memory"
        self._set_level(self.world.broadcast(level, "the level of activation checkpointing"))
        if note:
            print(note, flush=True)
        return True

    def _level_for(self, machine: PlannedHardware) -> ActivationCheckpointing:
        """Return the level with which an update fits; raises ConfigError if it is not known."""
        if machine.memory is None:
            raise ConfigError(
                "the system does not say how much memory it has. If memory runs out, set "
                "training.activation_checkpointing=blocks or all"
            )
        return level_of(self.config, machine, supervised=self.verb == "sft")

    def _set_level(self, level: ActivationCheckpointing) -> None:
        """Set the level of activation checkpointing in the settings."""
        self.config.training.activation_checkpointing = level
        self.plain["training"]["activation_checkpointing"] = str(level)

    def record_level(
        self, components: Components, policy: Policy, level: ActivationCheckpointing
    ) -> None:
        """Record in config.yaml the higher level that the first step needs."""
        self._set_level(level)
        if self.world.is_main:
            write_config(self.folder, self.plain, components.certificate.hash, policy.kernel)
            print(
                f"training.activation_checkpointing={level}: the first step needs more memory than "
                "was estimated",
                flush=True,
            )

    def record_kernel(self, components: Components, policy: Policy) -> None:
        """Record in config.yaml the kernel that computes the attention in training."""
        if not self.world.is_main:
            return
        write_config(self.folder, self.plain, components.certificate.hash, policy.kernel)
        if policy.device.type == "cuda":
            print(f"attention: training/kernel={policy.kernel}", flush=True)
            card = card_name(policy.device)
            if self.config.cost.peak_tflops is None and peak_tflops(card) is None:
                print(
                    f"perf/mfu is left out: no peak rate is known for {card}; set "
                    "cost.peak_tflops to its dense bf16 TFLOP/s",
                    flush=True,
                )

    def _preempted(self, signal: str) -> int:
        """Record and report a stop by a signal after everything was saved; return the exit code."""
        self._record_end(status="preempted")
        if self.world.is_main:
            checkpoint = read_summary(self.folder).get("latest_checkpoint")
            where = "before the first step" if checkpoint is None else f"with {checkpoint}"
            print(f"stopped by {signal} {where}; to go on: {self._resume_command}", file=sys.stderr)
        return PREEMPTED

    def _interrupted(self) -> int:
        """Record and report a KeyboardInterrupt; return the exit code.

        It has one of three causes:

        - Ctrl-C: `stop.at_once` and `stop.insisted` are False. INTERRUPTED.
        - a first signal while there was nothing to save (`stop.at_once`): it counts as a stop after
          a save (PREEMPTED). Of an evaluation, which has to begin anew, the work is lost:
          TERMINATED.
        - a second SIGTERM, which did not wait for the save (`stop.insisted`): TERMINATED.
        """
        stop = self.stop
        nothing_lost = stop.at_once and not stop.insisted and self.verb != "eval"
        if nothing_lost:
            return self._preempted(str(stop.name))  # the signal's name, such as SIGTERM
        self._record_end(status="interrupted")
        if self.world.is_main:
            remedy = "" if self.verb == "eval" else f"; to go on: {self._resume_command}"
            print(f"interrupted{remedy}", file=sys.stderr)
        was_signalled = stop.insisted or stop.at_once
        return TERMINATED if was_signalled else INTERRUPTED

    def _failed(self, error: Exception) -> int:
        """Record and report an error; return the exit code.

        A bug, and an error that another process reports, are raised again. If a write failed or the
        engine died, the message names the checkpoint from which the run can go on.
        """
        if isinstance(error, PeerFailed):  # its message begins with the rank and the error's class
            self._record_end(status="failed", error=str(error))
            raise error
        if not isinstance(error, AgenttrainError | ValueError | OSError):
            self._record_end(status="failed", error=f"{type(error).__name__}: {error}")
            raise error
        message = self._message(error)
        self._record_end(status="failed", error=message)
        with suppress(OSError):
            checkpoint = read_summary(self.folder).get("latest_checkpoint")
            if isinstance(error, OSError | NotWritten | EngineDead) and checkpoint is not None:
                message += f"\n{checkpoint} stands; once this is mended: {self._resume_command}"
        print(message, file=sys.stderr)
        return FAILED

    def _message(self, error: Exception) -> str:
        """Return an error as one line without secrets.

        An OSError that names no path, such as a full disk, gets the run folder's.
        """
        has_no_path = isinstance(error, OSError) and error.filename is None
        where = f" (run folder {self.folder})" if has_no_path else ""
        return hide_secrets(f"{type(error).__name__}: {error}{where}")

    @property
    def _resume_command(self) -> str:
        verb_word = resuming(self.verb)  # "sft ", or nothing for train
        return f"agenttrain {verb_word}resume={quote(str(self.folder))}"


async def make_trainer(run: Run, components: Components, stack: AsyncExitStack) -> Trainer:
    """Build the trainer at the run's newest checkpoint, or at its start.

    In this order: the servers of other models (roles), the process that makes the rollouts, if it
    is not this one, the policy, the engine, the state of the checkpoint, the engine's weights, the
    tracker and the trainer. The stack closes roles, components, engine and tracker in the opposite
    order. The tracker and the crash evidence become the run's.
    """
    config, world, supervised = run.config, run.world, run.verb == "sft"
    roles = start_roles(config, run.verb, run.folder, stack, world=world)
    # Requests to the servers end before the servers do: the stack calls the last callback first.
    stack.callback(components.close_roles)
    rollouts = await _start_rollout_process(run, components, stack)
    may_raise_level = run.choose_level()  # the level of activation checkpointing
    if not supervised:
        keep_servers_share(config)
    policy = make_policy(
        config,
        _algorithm_of(run),
        temperature=1.0 if supervised else config.rollout.temperature,
        reward_weights=None if supervised else components.reward_weights,
        world=world,
        sampled=not supervised,
    )
    engine = await _make_engine(run, policy, rollouts)
    if engine is not None:
        stack.push_async_callback(engine.aclose)
    if rollouts is None:
        stack.push_async_callback(components.aclose)
    teacher = _make_teacher(run, components, policy)
    run.record_kernel(components, policy)
    if may_raise_level:
        policy.on_level = partial(run.record_level, components, policy)

    collector: Collector | None = None
    if engine is not None and rollouts is None:  # this process makes the rollouts
        collector = components.collector(engine, run.folder, run.timeline)
    _watch_progress(run, policy, rollouts, collector)
    set_stop_tokens(policy.model, components.chat.stop_token_ids)
    checkpoints = run.checkpoints(saved_tokenizer(components.chat))
    state = run.restore(checkpoints, policy)
    done = 0 if state is None else state["step"]
    # After the checkpoint is loaded: the engine starts with its weights. `probe` checks later ones.
    probe = await _first_sync(run, components, policy, engine, done)
    await roles.ready()
    run.tracker = stack.enter_context(run.make_tracker(done))
    if not supervised:  # what the run writes down of a crash
        run.evidence = Evidence(
            folder=run.folder,
            policy=policy,
            checkpoints=checkpoints,
            arrays_above=config.tracker.arrays_above,
        )

    source, evaluator = _make_source(run, components, policy, rollouts, collector)
    trainer = Trainer(
        config=config,
        run=run,
        source=source,
        policy=policy,
        evaluator=evaluator,
        engine=engine,
        teacher=teacher,
        checkpoints=checkpoints,
        stop_when=StopWhen(config.stop_when),
        guards=None if supervised else _make_guards(run),
        best=None if supervised else Best(),
        probe=probe,
    )
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def _watch_progress(
    run: Run, policy: Policy, rollouts: Rollouts | None, collector: Collector | None
) -> None:
    """Let the watchdog see progress: rollouts, wherever they are made, and forward passes.

    It counts forward passes at the embeddings.
    """
    process = None if rollouts is None else rollouts.process
    run.watchdog.watch(
        process or collector,
        policy.model.get_input_embeddings(),
        None if process is None else process.print_stacks,
    )


def _make_guards(run: Run) -> Guards:
    """Return the guards of a run that samples rollouts; their alarms go to its tracker."""
    return Guards(
        config=run.config.guards,
        asynchronous=run.config.is_asynchronous,
        folder=run.folder,
        on_alarm=run.tracker.alarm,
    )


def _algorithm_of(run: Run) -> AlgorithmConfig:
    """Return the algorithm of the run's policy; no replay of experts where none are recorded."""
    if run.verb == "sft":
        return CROSS_ENTROPY
    algorithm = run.config.algorithm
    if replays_routes(run.config, run.verb):
        return algorithm
    return replace(algorithm, router_replay=RouterReplay.off)


async def _start_rollout_process(
    run: Run, components: Components, stack: AsyncExitStack
) -> Rollouts | None:
    """Start the rollout process, before the policy is built: both load at the same time.

    Return None if this process makes the rollouts itself, or learns from demonstrations.
    """
    if run.verb == "sft" or not has_rollout_process(run.config):
        return None
    await components.aclose()  # the other process has tools of its own
    rollouts = await start_rollouts(run.plain, run.verb, run.folder, world=run.world, stop=run.stop)
    if rollouts.process is not None:
        stack.push_async_callback(rollouts.process.aclose)
    return rollouts


async def _make_engine(run: Run, policy: Policy, rollouts: Rollouts | None) -> Engine | None:
    """Build the engine, or connect to that of the rollout process; None in supervised runs."""
    config = run.config
    if rollouts is not None:
        sender = run_spec(config).sender
        return await make_remote_engine(rollouts, config.model.dtype, sender)
    if run.verb == "sft":
        return None
    return make_engine(config, policy, run.folder, verb=run.verb)


def _make_teacher(run: Run, components: Components, policy: Policy) -> Teacher | None:
    """Build `algorithm.teacher`; None if there is none, or nothing is trained with it."""
    teacher = run.config.algorithm.teacher
    if run.verb != "train" or teacher is None:
        return None
    prompt = teacher.prompt
    prompt_ids = teacher_prompt(prompt, components.chat, components.schemas)
    return make_teacher(run.config, policy, prompt_ids, components.roles)


async def _first_sync(
    run: Run, components: Components, policy: Policy, engine: Engine | None, done: int
) -> SyncProbe | None:
    """Send the weights after step `done` to the engine; return the probe of later syncs.

    Return None without an engine.
    """
    if engine is None:
        return None
    # Meet here: one engine may compile minutes longer than another.
    run.world.exchange((), "the engine in every process", patient=True)
    with run.world.collective("the first weight sync"):
        prompt_ids = components.probe_prompt()
        return await sync(policy, engine, done, run.config.weight_sync, prompt_ids=prompt_ids)


def _make_source(
    run: Run,
    components: Components,
    policy: Policy,
    rollouts: Rollouts | None,
    collector: Collector | None,
) -> tuple[BatchSource, Evaluator]:
    """Return the source of each step's rollouts, and the evaluator that goes with it."""
    report_progress = run.tracker.progress.rollouts
    if rollouts is not None:
        if rollouts.process is not None:
            rollouts.process.report_progress = report_progress
        return make_remote_source(run.config, components, rollouts)
    if collector is not None:
        collector = replace(collector, stop=run.stop, progress=report_progress)
        return make_sampled_source(run.config, components, collector, run.world)
    return make_recorded_source(run.config, components, policy, run.world)


def _best_record(trainer: Trainer) -> dict[str, Any]:
    """Return the best evaluation so far for summary.json; empty if there is none to compare."""
    return {} if trainer.best is None else {"best": trainer.best.record}
