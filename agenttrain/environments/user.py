"""A simulated user: what it says to an answer of the model, in rollouts of several turns.

`LlmUser` is a language model; any callable like `UserFunction` can take its place:

    user:
      _target_: my_pkg.impatient_user
      patience: 3
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

from agenttrain.environments.config import UserSettings
from agenttrain.environments.environment import NO_ALARM, TookTooLong, limit_time, unwrap
from agenttrain.types import Message, Task, ToolUnavailable
from agenttrain.utils.alarms import warn_of_alarm
from agenttrain.utils.chat_api import ChatApi, ChatBackend, ChatUnavailable, Transient
from agenttrain.utils.data_fields import Data, DataWhere
from agenttrain.utils.locate import about_argument, locate_section
from agenttrain.utils.redaction import hide_in_settings, hide_secrets
from agenttrain.utils.role_names import is_role
from agenttrain.utils.sections import split_section
from agenttrain.utils.seeds import derive_seed
from agenttrain.utils.text_templates import TextTemplate
from agenttrain.utils.threads import DaemonThreads, blocks


class UserFunction(Protocol):
    """Target of `user._target_`: a sync or async function, or a class whose instances are called.

    `spoken` holds the messages of the user and the answers that the user has heard, in order. The
    function returns the user's next message, or None to end the conversation. The same arguments,
    the `seed` of this reply included, should give the same reply, so that a run can be repeated.
    """

    def __call__(self, task: Task, spoken: Sequence[Message], seed: int) -> Any: ...


class SimulatedUser:
    """The simulated user of all rollouts of a run. A failure ends the rollout as `error`."""

    def __init__(self, function: UserFunction, settings: UserSettings | None = None) -> None:
        self.function, self.settings = function, settings or UserSettings()
        self.columns: tuple[str, ...] = tuple(getattr(function, "columns", ()))
        """Columns that every row must have."""
        self._slots = asyncio.Semaphore(self.settings.concurrency)
        self._threads = DaemonThreads()

    async def reply(
        self, task: Task, spoken: Sequence[Message], *, replies: int, seed: int
    ) -> str | None:
        """Return the user's next message, or None to end the conversation.

        `replies` is the number of replies that the user has given, of which `user.max_turns` is the
        limit. Raises ToolUnavailable if the function fails or takes too long.
        """
        if replies >= self.settings.max_turns:
            return None
        async with self._slots:
            try:
                text = await limit_time(self._ask(task, spoken, seed), self.settings.timeout_s)
            except TookTooLong as error:
                limit = f"user.timeout_s={self.settings.timeout_s:g}"
                raise ToolUnavailable(f"user: {error}; {limit} is the limit") from error
            except Exception as error:
                text = hide_secrets(f"user: {type(error).__name__}: {error}")
                raise ToolUnavailable(text) from error
        if not isinstance(text, str | None):
            raise ToolUnavailable(
                f"user: it gave a {type(text).__name__}; a text is what the user says, None ends "
                "the conversation"
            )
        return text

    async def _ask(self, task: Task, spoken: Sequence[Message], seed: int) -> Any:
        """Call the function, in a thread if it blocks; its errors are raised."""
        messages = [dict(message) for message in spoken]  # copies, which the function may change
        if not blocks(self.function):
            return await self.function(task, messages, seed)
        outcome = await self._threads.run(lambda: self.function(task, messages, seed), label="user")
        if outcome.alarm:  # it called signal.alarm, which only works in the main thread
            warn_of_alarm("user", NO_ALARM)
        reply = unwrap(outcome)
        # A function that is not declared async may still return a coroutine, as a lambda does.
        return await reply if inspect.isawaitable(reply) else reply


class Dialogue:
    """Messages that the user of one rollout has sent and received since the prompt.

    The rollout loop records them: `hear` for an answer of the model, `say` for each message in the
    user's name. `reply` asks the simulated user and records nothing, so its text goes to `say` too.
    """

    def __init__(self, user: SimulatedUser | None, seed: int) -> None:
        """`seed` is the rollout's; the seed of each reply is derived from it."""
        self._user, self._seed = user, seed
        self._messages: list[Message] = []
        """What was heard and said, in order."""
        self._replies = 0
        """Times that the simulated user was asked: it has a limit."""
        self.user_messages = 0
        """Number of messages passed to `say`: the simulated user's, and texts of the environment or
        a tool. Seeds are derived from it."""

    def hear(self, answer: str) -> None:
        """Record an answer of the model."""
        self._messages.append({"role": "assistant", "content": answer})

    def say(self, text: str) -> None:
        """Record a message of the user, also one that the environment or a tool wrote."""
        self._messages.append({"role": "user", "content": text})
        self.user_messages += 1

    async def reply(self, task: Task) -> str | None:
        """Return the simulated user's reply to the last answer, or None if there is none.

        The caller records the reply with `say`. Raises ToolUnavailable if the user fails.
        """
        if self._user is None:
            return None
        prompt = [m for m in task.messages if m["role"] in ("user", "assistant")]
        # `say` raises `user_messages` before the next reply, which so gets another seed.
        seed = derive_seed(self._seed, "user", self.user_messages)
        spoken = [*prompt, *self._messages]
        text = await self._user.reply(task, spoken, replies=self._replies, seed=seed)
        self._replies += 1
        return text


class LlmUser:
    """A language model that plays the user, over the chat API of OpenAI, vLLM and others.

    `prompt` says who the user is and what they want, with columns of the row: ``{{ wish }}``. It is
    the system message. Then comes `greeting` (null: none) as the agent's first message, because
    many chat templates must begin with a user, and then the conversation with both roles exchanged.
    The model sees the agent's answers, but neither its calls nor their results. A reply with the
    text `stop` ends the conversation.

    If `seeded`, every request has the parameter `seed`, another one for each reply, so that a
    server that supports it repeats its replies. The other settings are those of
    `agenttrain.utils.chat_api.ChatApi`.
    """

    def __init__(
        self,
        *,
        # Data only as `role:<name>`, a server of the run's own: any other url is connected to.
        url: Annotated[str | ChatBackend, DataWhere(is_role)],
        model: Data[str | None] = None,
        prompt: Data[str],
        stop: Data[str] = "###STOP###",
        greeting: Data[str | None] = "Hi! How can I help you?",
        seeded: Data[bool] = True,
        api_key_env: str | None = None,
        retries: Data[int] = 4,
        backoff_s: Data[float] = 1.0,
        request_timeout_s: Data[float] = 120.0,
        temperature: Data[float] = 1.0,
        max_tokens: Data[int] = 512,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`Data[…]` marks settings that are only data: nothing is imported or reached by them.

        `seeded`: each request has a seed. Raises ValueError that begins with the argument.
        """
        self._prompt = TextTemplate(prompt, "prompt")
        if not isinstance(stop, str) or not stop.strip():
            raise ValueError(f"stop={stop}: must be a text that ends the conversation")
        self._stop, self._greeting, self._seeded = stop, greeting, seeded
        self._api = ChatApi(
            url=url,
            model=model,
            api_key_env=api_key_env,
            retries=retries,
            backoff_s=backoff_s,
            request_timeout_s=request_timeout_s,
            temperature=temperature,
            max_tokens=max_tokens,
            extra=extra,
        )
        # `stop` in the prompt is the stop text, not a column.
        self.columns = tuple(name for name in self._prompt.fields if name != "stop")

    def __call__(self, task: Task, spoken: Sequence[Message], seed: int) -> str | None:
        """Return the model's reply, or None if it has the stop text. Raises ToolUnavailable."""
        roles = {"user": "assistant", "assistant": "user"}  # the model answers as the user
        persona = self._prompt.fill({**task.columns, "stop": self._stop})
        messages = [{"role": "system", "content": persona}]
        if self._greeting is not None:
            messages.append({"role": "user", "content": self._greeting})
        messages += [{"role": roles[m["role"]], "content": m["content"]} for m in spoken]
        seeds = {"seed": seed % 2**31} if self._seeded else {}
        try:
            text = self._api.ask(messages, _not_empty, **seeds)
        except ChatUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        return None if self._stop in text else text


def _not_empty(text: str) -> str:
    """Return the stripped reply; raise Transient if it is empty, so that it is asked for again."""
    if not text.strip():
        raise Transient("the reply is empty")
    return text.strip()


def build_user(section: Mapping[str, Any]) -> SimulatedUser | None:
    """Build the user of a `user:` section; return None if the section is empty.

    Raises ValueError with key, value and remedy.
    """
    if not section:
        return None
    located = locate_section(section, key="user")
    settings, bound = split_section(UserSettings, located.bound, "user")
    function = located.target
    try:
        if inspect.isclass(function):
            function = function(**bound)
        elif bound:
            inspect.signature(function).bind(None, (), 0, **bound)  # (task, spoken, seed)
            function = partial(function, **bound)
    except TypeError as error:
        raise ValueError(f"{located.where} with {hide_in_settings(bound)}: {error}") from error
    except ValueError as error:
        raise ValueError(about_argument(error, "user", bound)) from error
    if not callable(function):
        raise ValueError(
            f"{located.where}: cannot be called; it must take (task, spoken, seed) and return what "
            "the user says"
        )
    return SimulatedUser(function, settings)
