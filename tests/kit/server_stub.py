"""Double of a server: a process with vLLM's routes, and a formula in place of a model.

The wrapper starts it as it starts vLLM (`build(…, module="server_stub")`), within a second. Its
model is one number, the weight `w` [1]: every token has the log-probability ``-w``. The next token
depends only on the tokens before it and on the seed. Routes for tests::

    POST /stub/fault {"kind": "error", "times": 20}     the next 20 completions answer 500
    POST /stub/fault {"kind": "abort", "times": 1}      … end with finish_reason "abort"
    POST /stub/fault {"kind": "stall", "times": 1}      … are never answered
    POST /stub/fault {"kind": "hang"}                   the engine's process answers nothing
    POST /stub/fault {"kind": "deaf", "times": 1}       an update answers 200 and loads nothing
    POST /stub/fault {"kind": "crash", "times": 1}      it dies while it receives a broadcast
    POST /stub/fault {"kind": "stuck", "times": 1}      it hangs while it receives a broadcast
    POST /stub/fault {"kind": "refuse", "times": 1}     it receives a broadcast, and answers 500
    POST /stub/fault {"kind": "absent", "times": 1}     it does not join a group
    POST /stub/share                                    maps shared memory
    GET  /stub/log                                      completions so far: version and ids
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from server_stub_workers import StubWorkers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agenttrain.engines.vllm_server.files_transport import METHODS
from agenttrain.engines.vllm_server.guard import HOST, TokenGuard
from agenttrain.engines.weight_files import BadWeights, read_verified, verify
from agenttrain.utils.child_process import end_with_parent

VOCABULARY = 500
LONGEST_CHAT = 10_000
"""Most characters of a conversation."""
FAULTS = "AGENTTRAIN_STUB_FAULTS"
"""Environment variable: faults of every stub from its start, ``{"abort": 20}``."""
CONFIG = "AGENTTRAIN_STUB_CONFIG"
"""Environment variable: JSON with any of these keys.

- "version", "model_config", "backend", "without": differences to the server that a run expects:
  ``{"version": "0.31.0", "model_config": {"dtype": "torch.bfloat16"}, "without": ["/pause"]}``;
- "workers": their number (1);
- "w": the weight at the start (0);
- "slope": the part of a score that grows with the id (0);
- "reply": the answer to a conversation ("Score: 7").
"""
TOKEN_S = "AGENTTRAIN_STUB_TOKEN_S"
"""Environment variable: seconds that a token takes (0)."""


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """Return the token after `token_ids`, from 3 to 499."""
    text = f"{seed}:{','.join(map(str, token_ids))}".encode()
    return 3 + int.from_bytes(blake2b(text, digest_size=4).digest()) % (VOCABULARY - 3)


class StubServer:
    """State and routes of one stub."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = json.loads(os.environ.get(CONFIG, "{}"))
        self.w = float(self.config.get("w", 0.0))
        self.version = "default"
        self.adapters: dict[str, float] = {}
        """Adapters by name: each of them is the weight `w`."""
        self.updating = False
        self.group = StubWorkers()
        self.faults: dict[str, int] = json.loads(os.environ.get(FAULTS, "{}"))
        """Kind of fault -> times that it will still happen."""
        self.served: list[dict[str, Any]] = []
        self.running = asyncio.Event()
        """Not set while the server is paused."""
        self.running.set()

    def takes_fault(self, kind: str) -> bool:
        """Return True if a fault of this kind is due, and count it."""
        remaining = self.faults.get(kind, 0)
        self.faults[kind] = max(remaining - 1, 0)
        return remaining > 0

    async def ask_engine(self) -> None:
        """Wait for ever if the engine's process hangs."""
        if self.faults.get("hang"):
            await asyncio.Event().wait()

    async def generate(self, body: Any) -> Any:
        """Continue or score ids."""
        await self.running.wait()
        await self.ask_engine()
        sampling, ids = body["sampling_params"], list(body["token_ids"])
        model = body.get("model", "policy")
        if model != "policy" and model not in self.adapters:
            return Response(f"the model {model} does not exist", status_code=404)
        w = self.adapters.get(model, self.w)
        if max(ids) >= VOCABULARY:
            return Response("id out of vocabulary", status_code=400)
        if self.takes_fault("error"):
            return Response("an error that was asked for", status_code=500)
        if self.takes_fault("stall"):
            await asyncio.Event().wait()
        is_aborted = self.takes_fault("abort")
        stop_ids, prompt_length = sampling.get("stop_token_ids", ()), len(ids)
        while len(ids) - prompt_length < sampling["max_tokens"]:
            await asyncio.sleep(float(os.environ.get(TOKEN_S, 0)))
            await self.running.wait()
            ids.append(next_token(ids, sampling.get("seed", 0)))
            if ids[-1] in stop_ids or is_aborted:
                break
        sampled = ids[prompt_length:]
        finish_reason = "stop" if sampled[-1] in stop_ids else "length"
        prompt_logprobs = None
        if "prompt_logprobs" in sampling:
            slope = self.config.get("slope", 0.0)
            prompt = ids[1:prompt_length]
            prompt_logprobs = [None, *({str(i): {"logprob": -w - slope * i}} for i in prompt)]
        else:
            self.served.append(
                {"version": self.version, "model": model, "ids": sampled, "sampling": sampling}
            )
        choice = {
            "token_ids": sampled,
            "finish_reason": "abort" if is_aborted else finish_reason,
            "logprobs": {"content": [{"token_id": token, "logprob": -w} for token in sampled]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(sampled)}],
        }
        return {
            "model": model,
            "choices": [choice],
            "prompt_logprobs": prompt_logprobs,
            "usage": {"prompt_tokens_details": {"cached_tokens": prompt_length // 2}},
        }

    async def chat(self, body: Any) -> Any:
        """Answer a conversation, always with the same reply."""
        await self.ask_engine()
        if self.takes_fault("error"):
            return Response("an error that was asked for", status_code=500)
        if len(str(body["messages"])) > LONGEST_CHAT:
            return Response("the conversation is too long", status_code=400)
        await asyncio.sleep(float(os.environ.get(TOKEN_S, 0)))
        self.served.append({"model": body["model"], "messages": body["messages"]})
        reply = self.config.get("reply", "Score: 7")
        return {"choices": [{"message": {"role": "assistant", "content": reply}}]}

    async def pause(self, body: Any) -> Any:
        """Stop sampling. Requests wait in every mode."""
        self.running.clear()

    async def resume(self, body: Any) -> Any:
        self.running.set()

    async def join(self, body: Any) -> Any:
        """Join a group of the backend "nccl". The backend "files" has no groups."""
        if self.takes_fault("absent"):
            return Response("its workers cannot reach the group", status_code=500)
        if body["init_info"]:
            try:
                await self.group.join(body["init_info"], self.workers)
            except TimeoutError:
                return Response("there is no group", status_code=500)

    async def leave(self, body: Any) -> Any:
        """Leave the group. Refused during an update."""
        if self.updating:
            return Response("an update is going on", status_code=500)
        self.group.leave()

    @property
    def workers(self) -> int:
        return int(self.config.get("workers", 1))

    async def start(self, body: Any) -> Any:
        """Begin an update. Refused during another update, or unless the server is paused."""
        if self.updating or self.running.is_set():
            return Response("an update is going on, or the server is not paused", status_code=500)
        self.updating = True

    async def update(self, body: Any) -> Any:
        """Load weights from verified files, or from a broadcast."""
        info = body["update_info"]
        if "names" in info:
            return await self.receive(info)
        try:
            weights = dict(read_verified(Path(info["folder"]), info["digest"]))
        except (BadWeights, OSError) as error:
            return Response(str(error), status_code=500)
        if not self.takes_fault("deaf"):
            self.w = float(weights["w"])

    async def receive(self, info: Any) -> Any:
        """Load weights that the group sends. An error ends the update, as in vLLM."""
        if self.takes_fault("crash"):
            os._exit(1)
        if self.takes_fault("stuck"):
            await asyncio.Event().wait()
        try:
            weights = await self.group.receive(info)
            if self.takes_fault("refuse"):
                raise EOFError("a weight that does not fit")
        except EOFError as error:
            self.updating = False
            return Response(str(error), status_code=500)
        if not self.takes_fault("deaf"):
            (self.w,) = struct.unpack("<f", weights["w"])

    async def call_workers(self, body: Any) -> Any:
        """Verify files, as each worker does."""
        folder, digest = body["args"]
        try:
            verify(Path(folder), digest)
        except (BadWeights, OSError) as error:
            return {"results": [{"done": True, "error": str(error)}]}
        return {"results": [{"done": True, "error": ""}]}

    async def finish(self, body: Any) -> Any:
        """End an update. Refused without one."""
        if not self.updating:
            return Response("no update is going on", status_code=500)
        self.updating, self.version = False, body["weight_version"] or self.version

    async def weight_info(self, body: Any) -> Any:
        await self.ask_engine()
        return {"weight_version": self.version}

    async def fault(self, body: Any) -> Any:
        """Take an order for faults."""
        self.faults[body["kind"]] = body.get("times", 1)

    async def share(self, body: Any) -> Any:
        """Map shared memory, which stays if the server is killed. Return its name."""
        self.shared = SharedMemory((body or {}).get("name"), create=True, size=4096)
        # Python's resource tracker, a process, would remove it when the server was killed.
        resource_tracker.unregister(self.shared._name, "shared_memory")  # type: ignore[attr-defined]
        return {"name": self.shared.name}

    async def log(self, body: Any) -> Any:
        return self.served

    async def health(self, body: Any) -> Any:
        """Answer, even if the engine's process hangs."""

    async def about(self, body: Any) -> Any:
        return {"version": self.config.get("version", "0.32.0"), "world_size": self.workers}

    async def load_adapter(self, body: Any) -> Any:
        """Add adapters. The only tensor in their file is the weight."""
        from safetensors.torch import load_file

        tensors = load_file(Path(body["lora_path"], "adapter_model.safetensors"))
        (w,) = tensors.values()
        if not self.takes_fault("deaf"):
            self.adapters[body["lora_name"]] = float(w.flatten()[0])
        return Response("Success: added")

    async def unload_adapter(self, body: Any) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            return Response("cannot be found", status_code=404)
        return Response("Success: removed")

    async def models(self, body: Any) -> Any:
        names = [{"id": name, "parent": "policy"} for name in self.adapters]
        return {"data": [{"id": "policy", "parent": None}, *names]}

    async def info(self, body: Any) -> Any:
        """Return the part of vLLM's configuration that a run reads."""
        model = {
            "dtype": "torch.float32",
            "max_model_len": 256,
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "skip_tokenizer_init": True,
            "tokenizer": "stub",
        }
        return {
            "vllm_config": {
                "model_config": {**model, **self.config.get("model_config", {})},
                "weight_transfer_config": {"backend": self.config.get("backend", "files")},
                "lora_config": {"max_lora_rank": 8},
                "parallel_config": {"worker_extension_cls": METHODS},
            }
        }

    async def tokenize(self, body: Any) -> Any:
        """Return ids that no tokenizer has."""
        return {"tokens": [1, 2, 3]}

    def app(self) -> TokenGuard:
        """Return the application, behind the guard of real servers."""
        routes: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "POST /inference/v1/generate": self.generate,
            "POST /v1/chat/completions": self.chat,
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "POST /init_weight_transfer_engine": self.join,
            "POST /shutdown_weight_transfer_engine": self.leave,
            "POST /start_weight_update": self.start,
            "POST /collective_rpc": self.call_workers,
            "POST /update_weights": self.update,
            "POST /finish_weight_update": self.finish,
            "GET /weight_info": self.weight_info,
            "GET /health": self.health,
            "GET /version": self.about,
            "GET /get_world_size": self.about,
            "GET /server_info": self.info,
            "GET /v1/models": self.models,
            "POST /tokenize": self.tokenize,
            "POST /v1/load_lora_adapter": self.load_adapter,
            "POST /v1/unload_lora_adapter": self.unload_adapter,
            "POST /stub/fault": self.fault,
            "GET /stub/log": self.log,
            "POST /stub/share": self.share,
        }
        for path in self.config.get("without", ()):
            routes = {name: answer for name, answer in routes.items() if path not in name}
        paths: dict[str, Any] = {name.partition(" ")[2]: {} for name in routes}

        async def openapi(body: Any) -> Any:
            return {"paths": paths}

        routes["GET /openapi.json"] = openapi
        return TokenGuard(
            Starlette(routes=[_route(name, answer) for name, answer in routes.items()])
        )


def _route(name: str, answer: Callable[[Any], Awaitable[Any]]) -> Route:
    """Return the route of e.g. "POST /pause", whose bodies are JSON both ways."""
    method, _, path = name.partition(" ")

    async def endpoint(request: Request) -> Response:
        text = await request.body()
        value = await answer(await request.json() if text else None)
        return value if isinstance(value, Response) else JSONResponse(value)

    return Route(path, endpoint, methods=[method])


def main() -> None:
    """Serve on the port of the command line until SIGTERM, or until the wrapper has ended."""
    import uvicorn

    end_with_parent()
    port = int(sys.argv[3])
    print(f"stub on port {port}", flush=True)

    async def serve() -> None:
        settings = uvicorn.Config(
            StubServer().app(),
            host=os.environ.get(HOST, "127.0.0.1"),
            port=port,
            log_level="warning",
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=1,
        )
        await uvicorn.Server(settings).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
