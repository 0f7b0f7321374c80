"""`OpenEnv`: an environment behind an OpenEnv server, one session of it for each rollout.

    environment=openenv environment.openenv.url=http://127.0.0.1:8000

Only its wire format is used, over a WebSocket, so that the server's packages live in an environment
of their own. A server that is gone, hangs or has no free session ends a rollout as `error`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from agenttrain.environments.adapters.observations import observation_text
from agenttrain.types import Rollout, ToolFailure, ToolUnavailable, TurnReward
from agenttrain.utils.chat_api import with_path
from agenttrain.utils.data_fields import Data
from agenttrain.utils.redaction import hide_secrets, is_web_address
from agenttrain.utils.text_templates import TextTemplate

REWARDS = ("episode", "turns")
HIDDEN_FIELDS = ("metadata",)
"""Fields of actions and observations that the model does not see."""
BETWEEN_TRIES_S = 0.2
LARGEST_MESSAGE = 64 * 2**20


class OpenEnv:
    """A session of an OpenEnv server. The model's tool `step` takes the fields of an action.

    `reset` holds arguments of each reset. Further arguments are the columns of the row that
    `columns` names, and a `seed`: the row's, or one that the rollouts of a task share. `prompt` is
    a text with columns of the row and `observation`. `rewards` is `episode` (the sum of the steps'
    rewards is the environment's reward) or `turns` (each reward goes to its turn, for the reward
    function `turn_rewards`).

    `session_timeout_s` limits the wait for a free session, `reply_timeout_s` that for each reply. A
    server that answers no ping for `ping_s` counts as gone.
    """

    def __init__(
        self,
        *,
        url: str,
        reset: Data[Mapping[str, Any] | None] = None,
        columns: Data[Sequence[str]] = (),
        prompt: Data[str] = "{{ observation }}",
        rewards: Data[str] = "episode",
        session_timeout_s: Data[float] = 45.0,
        reply_timeout_s: Data[float] = 60.0,
        ping_s: Data[float] = 20.0,
    ) -> None:
        # The settings.
        self._url, self._reset, self._columns = url, dict(reset or {}), columns
        self._public_url = hide_secrets(url)  # for messages
        self._prompt, self._by_turn = TextTemplate(prompt, "prompt"), rewards == "turns"
        self._session_timeout_s, self._reply_timeout_s = session_timeout_s, reply_timeout_s
        self._ping_s = ping_s
        # The connection, which the stack closes.
        self._socket: Any = None
        self._connected = ExitStack()
        # The episode: its last observation, the sum of its rewards, True once it is over.
        self._observation: Any = None
        self._return, self.done = 0.0, False

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Raise ValueError for arguments that cannot work, without reaching a server."""
        url = arguments.get("url")
        if not is_web_address(url):
            raise ValueError(
                f"url={hide_secrets(str(url))}: must be the address of an OpenEnv server, e.g. http://127.0.0.1:8000"
            )
        rewards = arguments.get("rewards", REWARDS[0])
        if rewards not in REWARDS:
            raise ValueError(f"rewards={rewards}: must be {' or '.join(REWARDS)}")
        for name in ("session_timeout_s", "reply_timeout_s", "ping_s"):
            value = arguments.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}={value}: must be a number of seconds above 0")
        TextTemplate(arguments.get("prompt", ""), "prompt")
        try:
            import websockets.sync.client  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"url={hide_secrets(str(url))}: needs the package websockets ({error}); "
                "pip install 'agenttrain[openenv]'"
            ) from error

    @classmethod
    def tools(cls, **arguments: Any) -> list[dict[str, Any]]:
        """Return the schema of `step`, as the server describes its actions. Raises ValueError."""
        cls.check(**arguments)
        url = hide_secrets(arguments["url"])
        try:
            response = httpx.get(
                with_path(arguments["url"], "/schema"),
                timeout=arguments.get("reply_timeout_s", 60.0),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"url={url}: no server answers ({type(error).__name__}: "
                f"{hide_secrets(str(error))}); start it first"
            ) from error
        try:
            action = response.json()["action"]
            properties = action["properties"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"url={url}: is no OpenEnv server: /schema answers {response.status_code} "
                f"{hide_secrets(response.text[:200])!r}"
            ) from error
        fields = {name: part for name, part in properties.items() if name not in HIDDEN_FIELDS}
        parameters = {
            "type": "object",
            "properties": fields,
            "required": [name for name in action.get("required", ()) if name in fields],
        }
        if "$defs" in action:
            parameters["$defs"] = action["$defs"]
        description = str(action.get("description") or "Take one step in the environment.")
        function = {"name": "step", "description": description, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, row: Mapping[str, Any], group_seed: int) -> str:
        """Open a session, begin an episode, and return the prompt."""
        absent = [name for name in self._columns if name not in row]
        if absent:
            raise ValueError(f"columns=[{', '.join(absent)}]: the row has no such column")
        columns = {name: row[name] for name in self._columns}
        seed = row.get("seed", group_seed)
        if isinstance(seed, int):
            seed %= 2**31  # many environments take no larger one
        data = {"seed": seed, **self._reset, **columns}
        reply = self._open({"type": "reset", "data": data})
        self._return = 0.0
        self._read(reply)
        return self._prompt.fill({**row, "observation": observation_text(self._observation)})

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | TurnReward:
        """Take the step that a call of `step` asks for."""
        reward = self._read(self._ask({"type": "step", "data": dict(arguments)}))
        self._return += reward
        text = observation_text(self._observation)
        if self.done:
            text = f"{text}\nThe episode is over."
        return TurnReward(reward, text) if self._by_turn else text

    def state(self) -> str:
        """Return the observation, which is all that the model sees."""
        return observation_text(self._observation)

    def reward(self, rollout: Rollout) -> float | None:
        """Return the sum of the episode's rewards, or None if the turns have them."""
        return None if self._by_turn else self._return

    def close(self) -> None:
        """End the session: the server frees it when the connection closes."""
        self._connected.close()

    def _open(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for a free session, open it, and return the reply to its first message.

        A server without a free session accepts the connection and refuses the message. To wait
        therefore means to connect and send again.
        """
        from websockets.exceptions import InvalidHandshake, InvalidURI
        from websockets.sync.client import connect

        # http -> ws, https -> wss
        address = "ws" + with_path(self._url, "/ws").removeprefix("http")
        public_address = hide_secrets(address)
        deadline = time.monotonic() + self._session_timeout_s
        while True:
            remaining_s = max(deadline - time.monotonic(), BETWEEN_TRIES_S)
            try:
                connection = connect(
                    address,
                    open_timeout=remaining_s,
                    ping_interval=self._ping_s,
                    ping_timeout=self._ping_s,
                    close_timeout=5.0,
                    max_size=LARGEST_MESSAGE,
                )
                self._socket = self._connected.enter_context(connection)
            except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
                raise ToolUnavailable(
                    f"{public_address}: cannot be reached: {type(error).__name__}: "
                    f"{hide_secrets(str(error))}"
                ) from error
            try:
                return self._ask(message)
            except _NoSession as error:
                self._connected.close()
                if time.monotonic() >= deadline:
                    raise ToolUnavailable(
                        f"{public_address}: {error}, for "
                        f"session_timeout_s={self._session_timeout_s:g}; keep fewer rollouts in "
                        "flight (rollout.deterministic=false rollout.concurrency=<its capacity>), "
                        "or raise the server's max_concurrent_envs"
                    ) from error
                time.sleep(BETWEEN_TRIES_S)

    def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the reply's data. Raises ToolFailure, ToolUnavailable."""
        from websockets.exceptions import ConnectionClosed

        try:
            # A server that closed the connection may have sent the reason before: `recv` reads it.
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps(message))
            reply = json.loads(self._socket.recv(timeout=self._reply_timeout_s))
            kind, data = reply["type"], reply["data"]
        except (ConnectionClosed, TimeoutError, OSError, ValueError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ToolUnavailable(
                f"{self._public_url}: no reply to {message['type']}: {reason}"
            ) from error
        if kind != "error":
            return dict(data)
        code, text = data.get("code"), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            raise _NoSession(text)
        if code == "VALIDATION_ERROR" and message["type"] == "step":
            problems = (
                f"{'.'.join(map(str, problem.get('loc', ())))}: {problem.get('msg')}"
                for problem in data.get("errors") or [{"msg": text}]
            )
            raise ToolFailure("; ".join(problems))
        raise ToolUnavailable(f"{self._public_url}: {message['type']} failed: {code}: {text}")

    def _read(self, data: Mapping[str, Any]) -> float:
        """Store the observation and `done` of a reply; return its reward."""
        fields = data.get("observation") or {}
        self._observation = {k: part for k, part in fields.items() if k not in HIDDEN_FIELDS}
        self.done = bool(data.get("done"))
        return float(data.get("reward") or 0.0)


class _NoSession(Exception):
    """All sessions of the server are in use."""
