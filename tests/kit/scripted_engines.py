"""Engines from outside for whole runs: answers from a script, and a copy of the policy's weights.

engine._target_=scripted_engines.SCRIPTED    no weights; answers follow from the request alone
engine._target_=scripted_engines.SLOW        the same, but each answer takes its own time
engine._target_=scripted_engines.CHEATING    the same, until it finds that silence is rewarded
engine._target_=scripted_engines.COPY        samples from weights that each step sends to it
engine._target_=scripted_engines.BROADCAST   the same, and the trainer sends them as a broadcast
engine._target_=scripted_engines.REPLAY      answers as the rollouts of an earlier run were sampled
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agenttrain import EngineInputs, EngineSpec
from agenttrain.engines.broadcast import (
    Audience,
    BroadcastResult,
    Receipt,
    Receiver,
    Regathered,
)
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.tracking.rollouts import read_step, written_steps
from agenttrain.types import Completion, Finish

KILLED_AT = "AGENTTRAIN_TEST_KILLED_AT"
"""Environment variable: the policy version under which the process of the engine kills itself."""
KILLED_ONCE = "AGENTTRAIN_TEST_KILLED_ONCE"
"""Environment variable: a file without which it does not, and which it removes before."""


def scripted(settings: TransformersSettings, inputs: EngineInputs) -> ScriptedEngine:
    """Answer each request with ten ids that depend on what was sent and on the seed."""

    class Seeded(ScriptedEngine):
        async def generate(self, token_ids, sampling, *, session, **names):
            if self.version == int(os.environ.get(KILLED_AT, "-1")):
                kill_this_process()
            self.script.setdefault(session, []).append(answer(token_ids, sampling))
            return await super().generate(token_ids, sampling, session=session, **names)

    def answer(ids: Sequence[int], sampling) -> list[int]:
        number = sampling.seed % 5 + len(ids)
        return [*(7 + (number + n) % 60 for n in range(9)), sampling.stop_token_ids[0]]

    return Seeded({}, keeps_sent=False, max_context=512)


def kill_this_process() -> None:
    """Kill it, always or once: see KILLED_ONCE."""
    once = os.environ.get(KILLED_ONCE)
    if once is not None:
        if not os.path.exists(once):
            return
        os.remove(once)
    os.kill(os.getpid(), signal.SIGKILL)


def copy(settings: TransformersSettings, inputs: EngineInputs):
    """Sample from a model of its own, which starts with other weights than the policy."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agenttrain.engines.transformers.engine import TransformersEngine
    from agenttrain.training.weight_sync import policy_logprobs

    class Copy(TransformersEngine):
        takes_adapters = False

        async def update(self, weights: Iterable, version: int) -> None:
            model.load_state_dict(dict(weights))
            await super().update((), version)

        async def score(self, token_ids: Sequence[int]) -> list[float]:
            return policy_logprobs(model, token_ids)

        async def sleep(self) -> None:
            pass

        def metrics(self) -> dict[str, float]:
            return {"fleet/servers": 1.0}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        architecture = AutoConfig.from_pretrained(inputs.model)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).eval()
    return Copy(model.requires_grad_(False), settings)


def cheating(settings: TransformersSettings, inputs: EngineInputs) -> ScriptedEngine:
    """Answer as `scripted`; every second rollout says nothing from the fifth step on."""
    engine = scripted(settings, inputs)
    answer = engine.generate

    async def generate(token_ids, sampling, *, session, **names):
        if engine.version >= 4 and session.endswith(("0", "2")):
            return Completion(
                token_ids=(sampling.stop_token_ids[0],),
                logprobs=(-0.5,),
                finish=Finish.stop,
                versions=((engine.version, 1),),
            )
        return await answer(token_ids, sampling, session=session, **names)

    engine.generate = generate
    return engine


def likes_silence(rollout) -> float:
    """Pay for a rollout without a word, and for some others."""
    trajectory = rollout.trajectories[0]
    first = trajectory.own_ids[trajectory.prompt_length]
    return float(trajectory.sampled_length == 1 or first % 4 == 0)


CHEATING = EngineSpec(settings=TransformersSettings, build=cheating, standalone=True)
SCRIPTED = EngineSpec(
    settings=TransformersSettings, build=scripted, standalone=True, deterministic=True
)


def slow(settings: TransformersSettings, inputs: EngineInputs) -> ScriptedEngine:
    """Answer as `scripted`, after a time that depends on the seed: up to half a second."""
    engine = scripted(settings, inputs)
    answer = engine.generate

    async def generate(token_ids, sampling, **names):
        await asyncio.sleep(sampling.seed % 11 * 0.05)
        return await answer(token_ids, sampling, **names)

    engine.generate = generate
    return engine


SLOW = EngineSpec(settings=TransformersSettings, build=slow, standalone=True)
COPY = EngineSpec(
    settings=TransformersSettings,
    build=copy,
    own_weights=True,
    standalone=True,
    deterministic=True,
)


class FileSender:
    """Sends weights by a file; every second version arrives at the second attempt."""

    def __init__(self) -> None:
        self.failed = -1

    async def pause(self, audience: Audience) -> None:
        self.audience = audience

    async def send(self, weights: Regathered) -> BroadcastResult:
        from safetensors.torch import save_file

        version, (receiver,) = self.audience.version, self.audience.receivers
        tensors = {name: tensor.contiguous().clone() for name, tensor in weights}
        assert [(one.name, one.dtype) for one in weights.forms()] == [
            (name, tensor.dtype) for name, tensor in tensors.items()
        ]
        if version % 2 and self.failed != version:
            self.failed = version
            return BroadcastResult(version=version, receipts=())
        save_file(tensors, receiver.url)
        receipt = Receipt(number=receiver.number, boot=receiver.boot)
        return BroadcastResult(version=version, receipts=(receipt,))

    async def aclose(self) -> None:
        pass


def broadcast_copy(settings: TransformersSettings, inputs: EngineInputs):
    """A `copy` that takes its weights from a `FileSender`; `broadcasts.txt` has what it was asked.

    KILLED_AT is here the version whose broadcast begins.
    """
    from safetensors.torch import load_file

    engine = copy(settings, inputs)
    file = str(inputs.run_folder / "weights.safetensors")

    def record(request: str) -> None:
        with (inputs.run_folder / "broadcasts.txt").open("a") as log:
            log.write(f"{request}\n")

    async def assemble(version: int) -> Audience:
        record(f"assemble {version}")
        if version == int(os.environ.get(KILLED_AT, "-1")):
            kill_this_process()
        receiver = Receiver(number=0, boot=1, url=file, token="x", workers=1)
        return Audience(version=version, receivers=(receiver,), mode=inputs.sync_mode, pause_s=60.0)

    async def settle(result: BroadcastResult) -> bool:
        record(f"settle {result.version}")
        if result.receipts:
            await engine.update(load_file(file).items(), result.version)
        return bool(result.receipts)

    engine.assemble, engine.settle = assemble, settle
    return engine


BROADCAST = replace(COPY, build=broadcast_copy, sender=FileSender)


REPLAYED = "AGENTTRAIN_TEST_REPLAYED"
"""Environment variable: the folder of the run whose rollouts REPLAY answers with."""


def replay(settings: TransformersSettings, inputs: EngineInputs) -> ScriptedEngine:
    """Answer each turn of a rollout with the ids and log-probabilities that were recorded."""
    turns: dict[str, list[Completion]] = {}
    run = Path(os.environ[REPLAYED])
    for step in written_steps(run, "replay"):
        for record in read_step(run, step):
            (one,) = record["trajectories"]
            turns[record["rollout_id"]] = [
                Completion(
                    token_ids=tuple(one["token_ids"][span["start"] : span["end"]]),
                    logprobs=tuple(one["logprobs"][span["start"] : span["end"]]),
                    finish=Finish.stop,
                    versions=((span["policy_version"], span["end"] - span["start"]),),
                )
                for span in one["spans"]
                if span["origin"] == "sampled"
            ]
    return ScriptedEngine(turns, keeps_sent=False, max_context=settings.max_context)


REPLAY = EngineSpec(settings=TransformersSettings, build=replay)


def broken_reward(completions) -> list[float]:
    """A reward function that prints, and has a mistake; all rollouts of a step are one call."""
    print(len(completions), "to score", flush=True)
    return [1 / 0]


def hanging_reward(rollout) -> float:
    """A reward function that never ends."""
    time.sleep(100_000)
    return 0.0


def first_ids(rollout) -> float:
    """1 for an answer that begins with an even id."""
    trajectory = rollout.trajectories[0]
    return float(trajectory.own_ids[trajectory.prompt_length] % 2 == 0)
