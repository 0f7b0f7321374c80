"""`agenttrain play`: a conversation with an agent, in its training's loop, template and limits.

A line that is typed, or read from a pipe, is a message of the user. The agent works on a row of
the run's data, because tools and environments read the row's columns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from agenttrain.engines.base import EngineDead
from agenttrain.engines.registry import spec_of
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.saved import first_model, run_of
from agenttrain.tracking.console import one_line, printable
from agenttrain.tracking.pictures import blocks, decoded, shown_text
from agenttrain.types import (
    AgenttrainError,
    ConfigError,
    Message,
    Origin,
    Rollout,
    StopReason,
    Task,
)
from agenttrain.utils.content import images_in
from agenttrain.utils.garbage import no_garbage_collection
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.seeds import derive_seed

if TYPE_CHECKING:
    from agenttrain.engines.base import Engine
    from agenttrain.rollout.conversation import Conversation
    from agenttrain.runs.setup import Components

STYLES = {
    Origin.prompt: "dim",
    Origin.sampled: "green",
    Origin.template: "yellow",
    Origin.tool: "cyan",
}
COMMANDS = {
    "/ask": "send the row's own question",
    "/row": "N: another row of the data, whose columns the tools read",
    "/reset": "begin a new conversation",
    "/tokens": "every token of the conversation, coloured by its origin",
    "/help": "these commands",
    "/quit": "end (Ctrl-D too)",
}


def play(config: RunConfig, args: Namespace, folder: Path | None) -> int:
    """Talk to the agent until the input ends; return the exit code. Raises ConfigError.

    `folder`: the run of `run=`; None for a model without a run.
    """
    # An engine with a copy of the weights of its own (vLLM) takes long to start: `sampling_engine`
    # takes engine=transformers in its place, which has no grammars for structured calls.
    is_replaced = spec_of(config.engine).own_weights
    if is_replaced and config.rollout.structured_calls:
        config = replace(config, rollout=replace(config.rollout, structured_calls=False))
    console = Console(highlight=False, soft_wrap=True)
    with asyncio.Runner() as runner:
        session = Session(console, config, args, folder)
        try:
            # `open` imports torch and loads the model: collections meanwhile would only cost time.
            with no_garbage_collection():
                runner.run(session.open())
            for line in _input_lines(console):
                try:  # an error ends the conversation, not the program
                    if not runner.run(session.handle(line)):
                        break
                except KeyboardInterrupt:
                    runner.run(session.reset())
                    text = "interrupted; the next message begins a new conversation"
                    session.print(text, "yellow")
                except EngineDead:  # no further message can be answered
                    raise
                except (AgenttrainError, OSError, ValueError) as error:
                    runner.run(session.reset())
                    session.print(f"{error}; the next message begins a new conversation", "red")
        except (AgenttrainError, OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        finally:
            runner.run(session.close())
    return 0


def _input_lines(console: Console) -> Iterator[str]:
    """Yield the lines of the input; a prompt is shown if a person types them."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            console.print(Text.assemble(("you> ", "bold"), line.rstrip("\n")))
            yield line
        return
    import readline  # noqa: F401  # input() then edits lines and has a history

    while True:
        try:
            yield input("you> ")
        except EOFError:
            console.print()
            return


class Player:
    """One model that answers, with its conversation.

    `Session` calls `ask` for each message, and `reset` before a new conversation. Tokens and tool
    results are printed while the model answers.
    """

    def __init__(self, name: str, components: Components, engine: Engine, console: Console) -> None:
        from agenttrain.chat.streaming import TextStream
        from agenttrain.rollout.request import RolloutContext

        self.name = name
        self.components = components
        self.engine = engine
        self.console = console
        self.conversation: Conversation | None = None
        self.context = RolloutContext(
            engine=engine,
            chat=components.chat,
            toolbox=components.toolbox,
            environments=components.environments,
            machines=components.machines,
            limits=components.config.rollout,
            on_messages=self._show,
        )
        self._new_stream = partial(TextStream, components.chat.decode)
        self._stream = self._new_stream()
        """Turns the tokens of the answer into text."""
        self._at_line_start = True
        """True if the cursor is at the beginning of a line."""

    async def ask(self, task: Task, text: str | None, number: int) -> None:
        """Let the model answer a message, in the conversation that goes on or in a new one.

        While a conversation goes on, `text` is the message, and the others are not read. Otherwise
        conversation `number` begins with `task`: its last message is answered, and `text` is not
        read.
        """
        from agenttrain.engines.base import Streaming
        from agenttrain.rollout.config import RolloutRequest
        from agenttrain.rollout.conversation import Conversation

        config = self.components.config
        if self.conversation is None:
            # Tools, which the players share, tell rollouts apart by their ids. A name is `agent`,
            # `before training` or `after training`.
            first_word = self.name.partition(" ")[0]
            session = f"play-{number}-{first_word}"
            seed = derive_seed(config.seed, "play", number)
            sampling = config.eval.sampling(seed)
            if isinstance(self.engine, Streaming):
                self.engine.watch(session, self._show_token)
            request = RolloutRequest(
                task=task, sampling=sampling, rollout_id=session, group_seed=seed
            )
            self.conversation = Conversation(self.context, request)
            text = None  # the first answer is to the task's last message
        try:
            await self.conversation.send(text)
        except asyncio.CancelledError:
            self._end_line()
            self.conversation = None  # `send` has ended it
            raise
        self._end_line()

    @property
    def stop_reason(self) -> StopReason | None:
        """Reason why the conversation has ended; None while it goes on, or without one."""
        return None if self.conversation is None else self.conversation.stop_reason

    async def reset(self) -> None:
        """Drop the conversation."""
        if self.conversation is not None:
            await self.conversation.aclose()
        self.conversation = None

    def tokens(self) -> Text:
        """Return every token of the conversation in the colour of its origin."""
        text = Text()
        rollout = None if self.conversation is None else self.conversation.rollout
        for trajectory in rollout.trajectories if rollout is not None else ():
            for span in trajectory.spans:
                piece = decoded(self.components.chat.decode, span.token_ids, span.images)
                text.append(printable(piece), STYLES[span.origin])
            counts = {
                origin: sum(len(s.token_ids) for s in trajectory.spans if s.origin is origin)
                for origin in STYLES
            }
            if not text.plain.endswith("\n"):
                text.append("\n")
            for origin, count in counts.items():
                text.append(f"{origin} {count}  ", f"bold {STYLES[origin]}")
        return text if text.plain else Text("nothing has been said yet", "dim")

    def _show_token(self, token_id: int) -> None:
        if token_id not in self.components.chat.stop_token_ids:
            self._write(self._stream.push(token_id), STYLES[Origin.sampled])

    def _show(self, rollout: Rollout, messages: Sequence[Message]) -> None:
        """Print the messages that the rollout has just gained."""
        from agenttrain.engines.base import Streaming

        for message in messages:
            if message["role"] == "assistant":
                # A streaming engine has called `_show_token` for each token already.
                if not isinstance(self.engine, Streaming):
                    *_, turn = rollout.trajectories[-1].sampled_spans()  # the newest one
                    for token_id in turn.token_ids:
                        self._show_token(token_id)
                self._write(self._stream.flush(), STYLES[Origin.sampled])
                self._stream = self._new_stream()
                for call in message.get("tool_calls", ()):
                    if problem := call["function"].get("malformed"):
                        self._print_line("✗ ", problem, "red")
            elif message["role"] == "tool":
                text = shown_text(message["content"])
                self._print_line(f"{message['name'] or '(no name)'} → ", text, "cyan")
                show_images(self.console, [message])

    def _print_line(self, label: str, text: str, style: str) -> None:
        self._end_line()
        self.console.print(Text.assemble((label, f"bold {style}"), (printable(text), style)))

    def _write(self, text: str, style: str) -> None:
        if text:
            self.console.print(Text(printable(text), style), end="")
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self.console.print()
        self._at_line_start = True


class Session:
    """A session of `play`: one model or, with `step=0`, also the model before training.

    `open` comes first, then `handle` for each line of the input, and `close` at the end.
    """

    def __init__(
        self, console: Console, config: RunConfig, args: Namespace, folder: Path | None
    ) -> None:
        self.console = console
        self.config = config
        self.folder = folder
        self.compares = args.step == "0"
        """True: the model before training answers too."""
        self.row = args.row
        """Number of the row whose question `/ask` sends."""
        self.players: list[Player] = []
        """The models that answer, one or two; filled by `open`."""
        self._components: Components | None = None
        """Set by `open`."""
        self._sent_messages = 0
        """A conversation has the number of the message that begins it, from 1."""

    def print(self, text: str, style: str = "dim") -> None:
        """Print a line of the program's own."""
        self.console.print(Text(text, style))

    async def open(self) -> None:
        """Load tools, data and models, and print what there is to talk to."""
        from agenttrain.runs.sampling import sampling_engine, verify_model
        from agenttrain.runs.setup import Components

        config = self.config
        verify_model(config)
        components = self._components = Components(config, "play")
        # The certificate is the check of the chat template. A run has passed it before training.
        if self.folder is None:
            components.certificate.raise_if_refused()
        self.players.append(Player("agent", components, sampling_engine(config), self.console))
        if self.compares:
            assert self.folder is not None
            # The model that the run's training began with.
            path, revision, init = first_model(run_of(self.folder))
            model = replace(config.model, path=path, revision=revision, init=init)
            untrained = replace(config, model=model)
            tools = (components.toolbox, components.environments)  # both models call the same ones
            untrained_components = Components(untrained, "play", tools=tools)
            engine = sampling_engine(untrained)
            self.players[0].name = "after training"
            self.players.append(
                Player("before training", untrained_components, engine, self.console)
            )
        tool_names = [*components.toolbox.names, *components.environments.tool_names]
        self.print(f"model  {config.model.path}")
        self.print(f"tools  {', '.join(tool_names) or 'none'}")
        self._print_row()
        self.print("a line is a message; " + "  ".join(COMMANDS))

    async def handle(self, line: str) -> bool:
        """Send a message or run a /command; return False if it ends the program."""
        command, _, argument = line.strip().partition(" ")
        if not command:
            return True
        if not command.startswith("/"):
            await self._say(line.strip())
        elif command == "/quit":
            return False
        elif command == "/help":
            for name, meaning in COMMANDS.items():
                self.print(f"{name:<8} {meaning}")
        elif command == "/tokens":
            for player in self.players:
                self._print_head(player)
                self.console.print(player.tokens())
        elif command == "/ask":
            await self.reset()
            await self._say(None)
        elif command == "/reset":
            await self.reset()
            self.print("a new conversation")
        elif command == "/row" and argument.isdecimal():
            previous_row, self.row = self.row, int(argument)
            try:
                self._task()  # raises if there is no such row
            except ConfigError:
                self.row = previous_row
                raise
            await self.reset()
            self._print_row()
        else:
            hint = did_you_mean(command, COMMANDS)
            self.print(f"{line.strip()}: no such command{hint}; /help lists them", "yellow")
        return True

    async def close(self) -> None:
        """End the conversations, and close tools and engines."""
        await self.reset()
        for player in self.players:
            await player.engine.aclose()
        if self._components is not None:
            await self._components.aclose()

    async def reset(self) -> None:
        """End all conversations; the next message begins new ones."""
        for player in self.players:
            await player.reset()

    async def _say(self, text: str | None) -> None:
        """Send a message to every player in turn; None sends the row's own question."""
        task = self._task()
        if text is not None:
            # The typed message takes the place of the row's question, after its system message.
            system = [m for m in task.messages[:1] if m["role"] == "system"]
            task = replace(task, messages=(*system, {"role": "user", "content": text}))
        self._sent_messages += 1
        for player in self.players:
            if player.stop_reason is not None:
                await player.reset()
            self._print_head(player)
            await player.ask(task, text, self._sent_messages)
            if (reason := player.stop_reason) is not None:
                assert player.conversation is not None
                rollout = player.conversation.rollout
                error = f": {rollout.error}" if rollout is not None and rollout.error else ""
                self.print(f"({reason}{error}; the next message begins a new conversation)")

    def _print_head(self, player: Player) -> None:
        if len(self.players) > 1:
            self.console.print(Text(f"── {player.name}", "bold magenta"))

    def _task(self) -> Task:
        """Return the task of the row, without a demonstration's answers. Raises ConfigError."""
        assert self._components is not None
        # The last split is data.test, or data.train if there are no test rows.
        splits = self._components.tasks
        key, source = list(splits.by_key.items())[-1]
        if self.row >= len(source):
            raise ConfigError(f"row={self.row}: {key} has {len(source)} rows, from 0")
        task = source.row(self.row)
        roles = [message["role"] for message in task.messages]
        # A demonstration ends with an answer: it is cut before its first answer. A row that ends
        # with a question keeps its answers, the history of that question.
        ends_with_question = roles[-1:] == ["user"]
        if not ends_with_question and "assistant" in roles:
            task = replace(task, messages=task.messages[: roles.index("assistant")])
        return replace(task, user_turns=())  # later turns are typed

    def _print_row(self) -> None:
        task = self._task()
        question = next((m["content"] for m in reversed(task.messages) if m["role"] == "user"), "")
        columns = json.dumps(task.columns, ensure_ascii=False, default=str)
        self.print(f"row    {self.row}: {one_line(shown_text(question), 300)}")
        show_images(self.console, task.messages)
        self.print(f"       {one_line(columns, 300)}")


def show_images(console: Console, messages: Sequence[Message]) -> None:
    """Print the images of messages in a terminal; elsewhere their size in the text has to do."""
    for image in images_in(messages) if console.is_terminal else ():
        console.print(blocks(image), end="")
