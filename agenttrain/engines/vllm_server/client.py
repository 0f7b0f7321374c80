"""`ServerClient`: the calls of one server, of vLLM 0.32's routes.

Data: `/inference/v1/generate` takes and returns token ids. Control: `/pause` to `/resume` replace
the weights. Each call carries the token that the server's guard asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import httpx

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion, Finish

FINISHES = {"stop": Finish.stop, "length": Finish.length}
"""By vLLM's name. An `abort` comes from a server that is dying; others fail the rollout."""
CLAMPED = -9999.0
"""The server's log-probability for NaN and minus infinity."""
PAUSES = {
    WeightSyncMode.drain: ("wait", True),
    WeightSyncMode.abort_resume: ("keep", True),
    WeightSyncMode.in_flight: ("keep", False),
}
"""`mode` and `clear_cache` of /pause. vLLM 0.32 heeds `clear_cache` in every mode."""
NOT_FINITE = "not JSON compliant"
"""Part of vLLM 0.32's answer 400 to a request whose log-probabilities are not finite."""
SHOWN = 400
"""Characters of a server's answer that a message shows."""


class ServerFailed(Exception):
    """A server did not answer, or cannot; another one may."""


class ServerClient:
    """Calls one server; each method raises ServerFailed if the server is at fault."""

    def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxy is between processes of one run
            verify=False,  # plain HTTP: no certificates are read
        )

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, salt: str
    ) -> Completion:
        """Continue `token_ids`; raises EngineError for a request that the server refuses.

        `salt` separates the prefix cache's entries of one policy version from another's.
        """
        parameters = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the stop tokens are named
            "logprobs": 0,
            "detokenize": False,
        }
        answer = await self._generate(token_ids, parameters, request_id=request_id, salt=salt)
        return completion_of(answer)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of every id after the first, at temperature 1; NaN for all of
        them if the server's weights make any of them NaN."""
        parameters = {
            **{"max_tokens": 1, "temperature": 1.0, "detokenize": False},
            "prompt_logprobs": 0,
        }
        try:
            answer = await self._generate(token_ids, parameters, request_id="probe", salt="probe")
        except EngineError as error:
            if NOT_FINITE not in str(error):
                raise
            return [nan] * (len(token_ids) - 1)
        rows = answer["prompt_logprobs"][1:]
        pairs = zip(token_ids[1:], rows, strict=True)
        return [float(row[str(token)]["logprob"]) for token, row in pairs]

    async def _generate(
        self, token_ids: Sequence[int], parameters: Mapping[str, Any], *, request_id: str, salt: str
    ) -> Any:
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": parameters,
            "cache_salt": salt,
        }
        return await self._call("POST", "/inference/v1/generate", body)

    async def weight_version(self) -> str:
        """Return the label of the weights. The answer comes from the engine's process, which
        `/health` does not ask: it says 200 while that process is stopped."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    async def load(
        self, folder: str, digest: str, version: int, mode: WeightSyncMode, *, first: bool
    ) -> None:
        """Replace the weights by those of a folder of files, and sample with them from now on.

        After ServerFailed the server may hold a mixture, or be paused: it has to be killed.
        """
        pause, clear = PAUSES[mode]
        await self._call("POST", f"/pause?mode={pause}&clear_cache={str(clear).lower()}")
        if first:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self._call("POST", "/start_weight_update")
        update = {"folder": folder, "digest": digest}
        await self._call("POST", "/update_weights", {"update_info": update})
        await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        if (label := await self.weight_version()) != str(version):
            raise ServerFailed(f"its weights are labelled {label!r} after an update to {version}")
        await self._call("POST", "/resume")

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body)
        try:
            answer = await self._http.request(method, path, content=content)
        except httpx.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise ServerFailed(f"{path.partition('?')[0]}: {detail}") from error
        if answer.status_code == httpx.codes.OK:
            try:
                return answer.json() if answer.content else None
            except ValueError as error:
                raise ServerFailed(f"{path}: the answer is no JSON") from error
        message = f"{path.partition('?')[0]}: {answer.status_code} {answer.text[:SHOWN]}"
        if path.startswith("/inference") and answer.status_code in (400, 404, 422):
            raise EngineError(f"vLLM refuses a request: {message}")
        raise ServerFailed(message)

    async def aclose(self) -> None:
        """Close the connections; requests in flight fail, and the server aborts them."""
        await self._http.aclose()


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """Return the completion of an answer, e.g. of::

        {"choices": [{"token_ids": [41, 2], "finish_reason": "stop",
                      "logprobs": {"content": [{"token_id": 41, "logprob": -0.25}, …]},
                      "weight_versions": [{"version": "7", "start": 0, "end": 2}]}]}

    Raises ServerFailed for an aborted one, EngineError for one without usable numbers.
    """
    (choice,) = answer["choices"]
    reason = choice["finish_reason"]
    if reason == "abort":
        raise ServerFailed("the request was aborted")
    if reason not in FINISHES:
        raise EngineError(f"vLLM ended a request with {reason!r}")
    token_ids = tuple(choice["token_ids"])
    content = choice["logprobs"]["content"]
    if tuple(one["token_id"] for one in content) != token_ids:
        raise EngineError("vLLM answered with log-probabilities of other tokens than its own")
    logprobs = tuple(float(one["logprob"]) for one in content)
    if any(value <= CLAMPED for value in logprobs):
        raise EngineError(
            "vLLM sampled a token whose log-probability is NaN or minus infinity; check the "
            "weights, and engine.dtype"
        )
    spans = choice["weight_versions"] or []
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish=FINISHES[reason],
        versions=tuple((int(one["version"]), one["end"] - one["start"]) for one in spans),
    )
