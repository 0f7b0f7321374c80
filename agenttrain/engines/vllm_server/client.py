"""`ServerClient`: calls of one server, over the routes of vLLM 0.32.

`/inference/v1/generate` takes and returns token ids. The routes from `/pause` to `/resume` replace
the weights. Each call carries the token that the server's guard asks for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import nan
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.routed_experts import read_encoded_routes
from agenttrain.engines.vllm_server.files_transport import VERIFY
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion, Finish

if TYPE_CHECKING:
    import aiohttp

FINISHES = {"stop": Finish.stop, "length": Finish.length}
"""By vLLM's name. An `abort` comes from a server that is dying. Others fail the rollout."""
IDLE_S = 3.0
"""Seconds for which an idle connection is kept. vLLM closes it after 5."""
CLAMPED = -9999.0
"""The server's log-probability for NaN and minus infinity."""
PAUSES = {
    WeightSyncMode.drain: ("wait", True),
    WeightSyncMode.abort_resume: ("keep", True),
    WeightSyncMode.in_flight: ("keep", False),
}
"""`mode` and `clear_cache` of /pause. vLLM 0.32 clears the cache in every mode if told so."""
NOT_FINITE = "not JSON compliant"
"""Part of vLLM 0.32's answer 400 to a request whose log-probabilities are not finite."""
POLL_S = 0.02
"""Seconds between two questions whether files have been verified."""
SHOWN = 400
"""Most characters of a server's answer in an error message."""
INFO, WORLD_SIZE = "/server_info", "/get_world_size"
CHAT = "/v1/chat/completions"
REFUSABLE = ("/inference", CHAT)
"""Prefixes of paths at which an answer 400 or 422 is the request's fault, not the server's."""


class ServerFailed(Exception):
    """A server did not answer as it should. Another one may. `status`: its HTTP status, if any."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself."""

    version: str
    """Version of vLLM."""
    paths: frozenset[str]
    """Its routes."""
    config: Mapping[str, Any]
    """vLLM's configuration. Empty if the server does not show it."""
    world_size: int
    """Number of its workers."""


class ServerClient:
    """Calls one server, in one event loop. Methods raise ServerFailed if the server is at fault.

    New weights come in one of three ways. `load` has the server read all weights from files. For a
    broadcast by NCCL, `FanOut` calls `pause`, `join`, `start_update`, `update_weights` and
    `finish_update` in this order. Adapters come by `load_adapter`, without a pause.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float, keep: bool = True) -> None:
        """With `keep`, connections are kept open and used again.

        Without it each call has a connection of its own: after an answer 500 vLLM closes the
        connection, on which the next call would fail.
        """
        self.prompt_tokens = self.cached_tokens = 0
        """Prompt tokens so far, and those of them that were in the server's prefix cache."""
        self.paused_s = 0.0
        """Seconds for which the last update paused the server."""
        self._paused_at = 0.0
        """Time at which the last `pause` began."""
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        """Headers of every request."""
        self._keep = keep
        self._timeout_s = timeout_s
        # aiohttp's CPU time per request does not grow with the number of connections. httpx takes
        # 2.5 ms per request with 64 of them. The session is made later, in the event loop it
        # belongs to.
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session: str,
        salt: str,
        adapter: int | None = None,
        record_routes: bool = False,
    ) -> Completion:
        """Continue `token_ids`. Raises EngineError for a request that the server refuses.

        `salt` separates the prefix cache's entries of one policy version from another's. `session`
        lets a router send a rollout's turns to one server. `adapter`: the version of the adapters
        to sample with. None: sample with the model's weights. `record_routes`: the server returns
        experts, which the completion has unless `sampling` wants none.
        """
        parameters = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # stop_token_ids names the end-of-turn tokens that count
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        if record_routes:  # the last prompt token is the first that is sampled from
            parameters["routed_experts_prompt_start"] = len(token_ids) - 1
        if sampling.grammar is not None:
            parameters["structured_outputs"] = {"structural_tag": sampling.grammar}
        answer = await self._generate(
            token_ids,
            parameters,
            request_id=request_id,
            session=session,
            salt=salt,
            adapter=adapter,
        )
        completion = completion_of(answer, adapter, record_routes=record_routes and sampling.routes)
        self.prompt_tokens += len(token_ids)
        # Any of these three keys may be missing or null.
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens += details.get("cached_tokens") or 0
        return completion

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        adapter: int | None = None,
        request_id: str = "probe",
    ) -> list[float]:
        """Return the log-probability of every id after the first, at temperature 1.

        All are NaN if the server's weights make any of them NaN. With an `adapter` no other request
        may be in flight: in a batch with other requests vLLM 0.32 applies the adapters of the
        language-model head to the wrong rows, and dies.
        """
        parameters = {
            "max_tokens": 1,  # the least that vLLM accepts
            "temperature": 1.0,
            "prompt_logprobs": 0,  # of the prompt's own tokens alone
            "detokenize": False,
        }
        try:
            answer = await self._generate(
                token_ids,
                parameters,
                request_id=request_id,
                session=request_id,
                salt=salt,
                adapter=adapter,
            )
        except EngineError as error:
            # JSON has no NaN, so vLLM answers with an error in place of one.
            if NOT_FINITE not in str(error):
                raise
            return [nan] * (len(token_ids) - 1)
        # The first token has no log-probability: nothing comes before it.
        pairs = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return [float(candidates[str(token)]["logprob"]) for token, candidates in pairs]

    async def _generate(
        self,
        token_ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        request_id: str,
        session: str,
        salt: str,
        adapter: int | None,
    ) -> Any:
        """Return the server's answer to a request for tokens or scores."""
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": parameters,
            "cache_salt": salt,
        }
        if adapter is not None:
            body["model"] = adapter_name(adapter)
        # Quoted, because a header takes only ASCII without line breaks.
        headers = {"X-Session-ID": quote(session, safe="/")}
        return await self._call("POST", "/inference/v1/generate", body, headers=headers)

    async def chat(self, body: Mapping[str, Any]) -> Any:
        """Return the answer of chat completions. Raises EngineError for a refused request."""
        return await self._call("POST", CHAT, body)

    async def weight_version(self) -> str:
        """Return the weights' label. `/health` would answer for a stopped engine too."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    async def facts(self) -> ServerFacts:
        """Return the server's own description of itself."""
        paths = (await self._call("GET", "/openapi.json"))["paths"]
        version = (await self._call("GET", "/version"))["version"]
        config: Mapping[str, Any] = {}
        world_size = 1
        # A server that somebody else started may lack these two routes.
        if INFO in paths:
            config = (await self._call("GET", f"{INFO}?config_format=json"))["vllm_config"]
        if WORLD_SIZE in paths:
            world_size = int((await self._call("GET", WORLD_SIZE))["world_size"])
        return ServerFacts(
            version=str(version), paths=frozenset(paths), config=config, world_size=world_size
        )

    async def token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer."""
        body = {"prompt": text, "add_special_tokens": False}
        return list((await self._call("POST", "/tokenize", body))["tokens"])

    async def load(
        self, folder: str, digest: str, version: int, mode: WeightSyncMode, *, first: bool
    ) -> None:
        """Replace the weights by those of a folder of files, and sample with them from now on.

        `digest` is that of the folder's manifest. `first`: these are the first weights since the
        server's start. The files are verified before the server is paused. After ServerFailed the
        server may be paused, or hold a mixture of weights: kill it.
        """
        await self._verify(folder, digest)
        await self.pause(mode)
        if first:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self.start_update()
        await self.update_weights({"folder": folder, "digest": digest})
        await self.finish_update(version)

    async def pause(self, mode: WeightSyncMode, *, close: bool = False) -> None:
        """Have requests in flight end or wait, as `mode` says.

        With `close`, also end the update that the last broadcast has left unfinished.
        """
        pause_mode, clear_cache = PAUSES[mode]
        self._paused_at = time.monotonic()
        flag = "true" if clear_cache else "false"
        await self._call("POST", f"/pause?mode={pause_mode}&clear_cache={flag}")
        if close:
            await self._close_model()

    async def _close_model(self) -> None:
        """End an update that has failed, so that the model is not open for weights any longer."""
        try:
            await self.end_update()
        except ServerFailed:
            # `update_weights` itself has failed. vLLM then ends the update, which cannot be ended
            # twice, but leaves the model open. An empty update closes it.
            await self.start_update()
            await self.end_update()

    async def join(self, info: Mapping[str, Any]) -> None:
        """Have the workers leave their group, if any, and join the one that `info` describes."""
        await self._call("POST", "/shutdown_weight_transfer_engine")
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": info})

    async def start_update(self) -> None:
        """Open the model for new weights."""
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Have the workers take the weights that `info` describes."""
        await self._call("POST", "/update_weights", {"update_info": info})

    async def end_update(self, version: int | None = None) -> None:
        """Close the model, and label its weights with the version if there is one."""
        label = None if version is None else str(version)
        await self._call("POST", "/finish_weight_update", {"weight_version": label})

    async def finish_update(self, version: int) -> None:
        """Close the model with new weights, check their label, and resume sampling."""
        await self.end_update(version)
        if (label := await self.weight_version()) != str(version):
            raise ServerFailed(f"its weights are labelled {label!r} after an update to {version}")
        await self._call("POST", "/resume")
        self.paused_s = time.monotonic() - self._paused_at

    async def _verify(self, folder: str, digest: str) -> None:
        """Have every worker verify files. Raises ServerFailed for damaged ones.

        The first call starts the verification, and the same call again asks how far it is.
        """
        body = {"method": VERIFY, "args": [folder, digest]}
        while True:
            results = (await self._call("POST", "/collective_rpc", body))["results"]
            if errors := [result["error"] for result in results if result["error"]]:
                raise ServerFailed(f"the files of the weights: {errors[0]}")
            if all(result["done"] for result in results):
                return
            await asyncio.sleep(POLL_S)

    async def load_adapter(self, version: int, folder: str) -> None:
        """Add the adapters of a folder under the name of their version, without a pause."""
        body = {"lora_name": adapter_name(version), "lora_path": folder, "load_inplace": True}
        await self._call("POST", "/v1/load_lora_adapter", body, is_json=False)

    async def unload_adapter(self, version: int) -> None:
        """Remove adapters. Requests that name them fail from now on."""
        body = {"lora_name": adapter_name(version)}
        await self._call("POST", "/v1/unload_lora_adapter", body, is_json=False)

    async def adapters(self) -> set[str]:
        """Return the names of the adapters that the server has."""
        models = (await self._call("GET", "/v1/models"))["data"]
        return {str(model["id"]) for model in models if model.get("parent") is not None}

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        is_json: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of a server's answer: None if it is empty, or with `is_json=False`.

        Raises EngineError if the request itself is at fault, else ServerFailed.
        """
        import aiohttp  # takes a tenth of a second, which commands without servers need not wait

        route = path.partition("?")[0]
        if self._closed:
            raise ServerFailed(f"{route}: the client was closed")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # as many connections as there are requests
                    # aiohttp refuses a timeout for connections that are closed at once.
                    keepalive_timeout=IDLE_S if self._keep else None,
                    force_close=not self._keep,
                ),
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        data = None if body is None else json.dumps(body)
        url = f"{self.url.rstrip('/')}{path}"
        try:
            async with self._http.request(method, url, data=data, headers=headers) as answer:
                content = await answer.read()
        except TimeoutError as error:
            limit = f"request_s={self._timeout_s:g} s"
            raise ServerFailed(f"{route}: no answer within {limit}") from error
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__  # some errors have no text
            raise ServerFailed(f"{route}: {text}") from error
        if answer.status == HTTPStatus.OK:
            try:
                return json.loads(content) if content and is_json else None
            except ValueError as error:
                raise ServerFailed(f"{path}: the answer is no JSON") from error
        message = f"{route}: {answer.status} {content.decode('utf-8', 'replace')[:SHOWN]}"
        # On these routes such an answer means that any server would refuse the request.
        if path.startswith(REFUSABLE) and answer.status in (400, 422):
            raise EngineError(f"vLLM refuses a request: {message}")
        raise ServerFailed(message, status=answer.status)

    async def aclose(self) -> None:
        """Close the connections. Requests in flight fail, and the server aborts them."""
        self._closed = True
        if self._http is not None:
            await self._http.close()


def adapter_name(version: int) -> str:
    """Return a server's name for the adapters of a version: ``policy-v7``."""
    return f"policy-v{version}"


def completion_of(
    answer: Mapping[str, Any], adapter: int | None = None, *, record_routes: bool = False
) -> Completion:
    """Return the completion of an answer, e.g. of::

        {"choices": [{"token_ids": [41, 2], "finish_reason": "stop",
                      "logprobs": {"content": [{"token_id": 41, "logprob": -0.25}, …]},
                      "weight_versions": [{"version": "7", "start": 0, "end": 2}]}]}

    A server that returns experts has them in `routed_experts`, as the base64 text of a .npy file,
    which is only read to `record_routes`.

    With an `adapter` the answer has to name it, and its version counts: the label in the answer is
    that of the base weights. Raises ServerFailed if the request was aborted or sampled with other
    weights than the run's, and EngineError for unusable log-probabilities.
    """
    (choice,) = answer["choices"]
    reason = choice["finish_reason"]
    if reason == "abort":
        raise ServerFailed("the request was aborted")
    if reason not in FINISHES:
        raise EngineError(f"vLLM ended a request with {reason!r}")
    token_ids = tuple(choice["token_ids"])
    content = choice["logprobs"]["content"]
    if tuple(entry["token_id"] for entry in content) != token_ids:
        raise EngineError("vLLM answered with log-probabilities of other tokens than its own")
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    if any(logprob <= CLAMPED for logprob in logprobs):
        raise EngineError(
            "vLLM sampled a token whose log-probability is NaN or minus infinity; check the "
            "weights, and engine.dtype"
        )
    if adapter is not None:
        if answer["model"] != adapter_name(adapter):
            raise ServerFailed(f"it sampled with {answer['model']}, not {adapter_name(adapter)}")
        spans = [{"version": adapter, "start": 0, "end": len(token_ids)}]
    else:
        spans = choice["weight_versions"] or []
    labels = [str(span["version"]) for span in spans]
    if foreign := [label for label in labels if not label.isdecimal()]:
        # A server that was started again has the label "default" until it gets the run's weights.
        raise ServerFailed(f"it sampled with weights that are labelled {foreign[0]!r}")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish=FINISHES[reason],
        versions=tuple(
            (int(label), span["end"] - span["start"])
            for label, span in zip(labels, spans, strict=True)
        ),
        routes=(
            read_encoded_routes(choice.get("routed_experts"), len(token_ids))
            if record_routes
            else None
        ),
    )
