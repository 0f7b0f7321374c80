"""A machine with GPUs and vLLM, as far as they can be told apart from outside: which thread calls
what, on which device. There is no GPU and no vLLM in it."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@dataclass
class Machine:
    """Records every call as (thread's name, thread's device, call)."""

    calls: list[tuple[str, int, str]] = field(default_factory=list)
    llms: list[FakeLLM] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)

    @property
    def device(self) -> int:
        """Of the calling thread; a new thread begins with 0."""
        return getattr(self._local, "device", 0)

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, self.device, call))

    def set_device(self, device: int) -> None:
        self._local.device = device
        self.note(f"set_device {device}")

    def of(self, *names: str) -> list[tuple[str, int, str]]:
        """The calls with these first words."""
        return [call for call in self.calls if call[2].split()[0] in names]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The main thread works on GPU 3, as rank 3 of a node does."""
    made = Machine()
    made._local.device = 3
    for name, fake in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: made.device,
        "set_device": made.set_device,
        "set_stream": lambda stream: made.note("set_stream"),
        "synchronize": lambda device=None: made.note("synchronize"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name, members in {
        "vllm": {"EngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace},
        "vllm.config": {"LoggingConfig": SimpleNamespace},
        "vllm.exceptions": {"VLLMValidationError": ValueError},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(FINAL_ONLY=2),
            "StructuredOutputsParams": SimpleNamespace,
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {
            "LLMEngine": SimpleNamespace(
                from_engine_args=lambda arguments: FakeLLM(made, arguments)
            )
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "finalize_layerwise_reload": lambda model, config: None
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


class FakeLLM:
    """vLLM's `LLMEngine` with one worker in this process, whose model has two parameters.

    A step hands a batch over and returns the tokens of the one before it, as with asynchronous
    scheduling: each token is the sum of the weights that it was computed with, and is labelled
    with the version at the time when it is returned. It has two layers, and the experts of the
    position p are ``[[p, 1], [0, p]]``.
    """

    def __init__(self, machine: Machine, arguments: Any) -> None:
        machine.note("build")
        machine.llms.append(self)
        self.machine, self.arguments = machine, arguments
        self.local_rank = os.environ.get("LOCAL_RANK")
        random.seed(arguments.seed)  # as vLLM's workers do
        np.random.seed(arguments.seed)
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("medium")
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.model_config = SimpleNamespace(
            max_model_len=64, get_vocab_size=lambda: 100, dtype=getattr(torch, arguments.dtype)
        )
        self.model = torch.nn.Module()
        self.model.packed_modules_mapping = {"qkv": ["q", "k"]}
        for name, shape in (("qkv", (4, 2)), ("norm", (2,))):
            self.model.add_module(name, torch.nn.Module())
            getattr(self.model, name).weight = torch.nn.Parameter(torch.zeros(shape))
        self.loses: str | None = None
        """A weight that a reload drops on its way."""
        self.until: str | None = None
        """The version of which a request has to see a token before it ends."""
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=self))
        self.engine_core = SimpleNamespace(engine_core=self, shutdown=self._shutdown)
        self.batch_queue: deque[dict[str, int]] = deque()
        self.version = ""
        self.paused = False
        self.requests: dict[str, Any] = {}
        self.prompts: dict[str, list[int]] = {}
        self.sampled: dict[str, list[tuple[int, str]]] = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        self.machine.note("load")
        rows = {"q.weight": ("qkv", 0), "k.weight": ("qkv", 2), "norm.weight": ("norm", 0)}
        with torch.no_grad():
            for name, tensor in weights_iterator:
                module, start = rows[name]
                if name != self.loses:
                    weight = getattr(self.model, module).weight
                    weight[start : start + len(tensor)] = tensor.float()

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        pass

    def sleep(self, level: int) -> None:
        self.machine.note(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.machine.note(f"wake_up {' '.join(tags)}")
        self.paused = False  # as vLLM, once all of its memory is back

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.machine.note("pause")
        self.paused = True

    def resume_scheduler(self) -> None:
        self.machine.note("resume")
        self.paused = False

    def _shutdown(self) -> None:
        self.machine.note("shutdown")

    def add_request(self, request_id: str, prompt: Any, parameters: Any, lora_request: Any) -> None:
        self.requests[request_id] = parameters
        self.prompts[request_id] = prompt["prompt_token_ids"]
        self.sampled[request_id] = []

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        self.machine.note("step")
        if not self.paused:
            total = sum(int(p.sum()) for p in self.model.parameters())
            self.batch_queue.appendleft(dict.fromkeys(self.requests, total))
            if len(self.batch_queue) < 2:
                return []
        done = []
        for request_id, token in self.batch_queue.pop().items():
            if request_id not in self.requests:
                continue
            tokens = self.sampled[request_id]
            tokens.append((token, self.version))
            if len(tokens) >= self.requests[request_id].max_tokens and self.until in (
                None,
                self.version,
            ):
                parameters = self.requests.pop(request_id)
                experts = None
                if getattr(self.arguments, "enable_return_routed_experts", False):
                    # As vLLM 0.32: no row for the last token, which no pass was fed.
                    start = getattr(parameters, "routed_experts_prompt_start", 0)
                    end = len(self.prompts[request_id]) + len(tokens) - 1
                    rows = [[[p, 1], [0, p]] for p in range(start, end)]
                    experts = np.array(rows, dtype=np.uint8)
                done.append(_output(request_id, tokens, experts))
        return done


def _output(request_id: str, tokens: list[tuple[int, str]], experts: np.ndarray | None) -> Any:
    spans = []
    for index, (_, version) in enumerate(tokens):
        if not spans or spans[-1].version != version:
            spans.append(SimpleNamespace(version=version, start=index, end=index))
        spans[-1].end = index + 1
    completion = SimpleNamespace(
        token_ids=[token for token, _ in tokens],
        logprobs=SimpleNamespace(logprobs=[0.0] * len(tokens)),
        finish_reason="length",
        weight_versions=spans,
        routed_experts=experts,
    )
    return SimpleNamespace(
        request_id=request_id,
        finished=True,
        outputs=[completion],
        prompt_token_ids=[],
        num_cached_tokens=0,
    )
