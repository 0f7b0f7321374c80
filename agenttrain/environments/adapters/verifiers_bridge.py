"""The child process of `Verifiers`: runs the package's environment, without a model.

It runs under a Python that has verifiers and not agenttrain. Requests and replies are JSON lines::

    {"n": 3, "do": "begin", "episode": "e", "task": 7}   ->   {"n": 3, "value": {"messages": […]}}

or ``{"n": 3, "error": "TaskError: …"}``. verifiers plays the episode itself. Its agent runs in a
harness of ours, which sends every turn to the parent and waits until the parent has sampled it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content
from verifiers.v1.session import RolloutLimits, call_hook, hook_boundary
from verifiers.v1.utils.decorators import discover_decorated

__all__ = ["PolicyHarness"]
HARNESS = "agenttrain_policy"
"""Id under which verifiers loads `PolicyHarness`."""
CHECKED = 100
"""Number of tasks that are checked before a run."""
EPISODE: ContextVar[PolicyEpisode] = ContextVar("episode")
"""Set in the task in which verifiers runs an episode: by it the harness finds our side."""


class Unsupported(Exception):
    """The environment cannot be trained so; the text begins with the argument at fault."""


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """A harness of verifiers, which plays an agent: the parent process, agenttrain, samples it."""

    # Declarations that verifiers reads of every harness.
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *arguments: Any, **_: Any) -> PolicySession:
        """Return the session in which verifiers plays the agent of the running episode.

        `arguments` are passed on to verifiers' own `HarnessSession`.
        """
        session = PolicySession(self, *arguments)
        # Many episodes run at once, each in its own asyncio task. `PolicyEpisode.begin` has set
        # EPISODE for the one that calls this.
        await EPISODE.get().attach(session)
        return session

    async def launch(self, *_: Any) -> Any:
        """Raise NotImplementedError: `session` is used instead, and there is no program."""
        raise NotImplementedError


class PolicySession(vf.HarnessSession):
    """The only session of an episode, through which verifiers asks for the agent's turns.

    verifiers runs in this child process and plays the environment. The parent process, agenttrain,
    samples the agent's turns. `PolicyEpisode` connects the two, and gets both calls.
    """

    async def turn(self, messages: Any = None) -> None:
        """Send the messages to the parent; return once it has sampled the agent's answer."""
        await EPISODE.get().ask_parent(messages)

    async def close(self) -> None:
        """Wait until the parent has sent the finished conversation; verifiers scores it next."""
        await EPISODE.get().end_conversation()


class PolicyEpisode:
    """One rollout: the environment's side of the conversation, and the trace that is scored.

    verifiers plays the episode in an asyncio task of its own. The parent process samples the turns.
    Each side waits for the other::

        verifiers                        parent
                                         begin: starts verifiers' task, waits for an event
        attach
        ask_parent: puts the messages
          in `_events`, waits for
          `_answered`                    gets them as its reply, and samples
                                         call: runs a tool, once for each call of a turn
                                         answer: sets `_answered`, waits for the next event
        ask_parent: again, with the
          user's next messages           …
        end_conversation: puts `over`,
          waits for `_complete`          finish: sets `_complete`, waits for the score
        scores the trace                 gets the reward

    The parent may also call `finish` or `abandon` while verifiers waits in `ask_parent`.
    """

    def __init__(self, environment: vf.Env, seat: str, task: Any) -> None:
        """`seat` is the name of the agent that the policy plays."""
        # The episode in verifiers.
        self._environment, self._task = environment, task
        self._limits = RolloutLimits(max_turns=getattr(environment.config, seat).max_turns)
        self._session: Any = None
        self._work: Any = None
        """The asyncio task in which verifiers plays and scores the episode."""
        # The tools.
        self._stack = AsyncExitStack()
        """Closes the connections to their servers."""
        self._tools: list[vf.Tool] = []
        self._dispatch: dict[str, tuple[str, str]] = {}
        """Tool -> (server, name of the tool there)."""
        self._servers: dict[str, Any] = {}
        # The conversation, in verifiers' form.
        self._conversation: list[Any] = []
        self._prompt_length = 0
        """Number of its messages before the first answer."""
        self._turn = -1
        """Turn of the last call."""
        # Where verifiers and the parent wait for each other.
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """For the parent: ``{"messages": […]}``, or ``{"over": True}``."""
        self._answered: asyncio.Future[None] | None = None
        """Done once the parent has answered the turn for which verifiers waits."""
        self._complete = asyncio.Event()
        """Set once the parent has sent the whole conversation, or abandons the episode."""

    # Methods that verifiers calls.

    async def attach(self, session: PolicySession) -> None:
        """Use this session for the episode, and connect to its tools.

        Raises vf.EnvError for an environment that cannot be trained. Its message is read after the
        environment's name, so that "it" is the environment.
        """
        if self._session is not None:
            raise vf.EnvError("it runs its agent more than once in an episode")
        # Stop conditions are read from `self._task`. An environment may give its agent a task of
        # another class, to which they would not apply.
        if session.trace.task.type != type(self._task).__name__:
            raise vf.EnvError(f"it plays a task of its own ({session.trace.task.type})")
        self._session = session
        servers = {name: {"url": url} for name, url in session.mcp_urls.items()}
        schemas, self._dispatch, self._servers = await connect_mcp(
            {"mcpServers": servers}, self._stack
        )
        self._tools = [vf.Tool(**schema["function"]) for schema in schemas]

    async def ask_parent(self, messages: Any) -> None:
        """Send the prompt, or the user's next messages, to the parent; wait for the answer.

        `_next` hands the parent the messages from `_events`. `_release` sets `_answered` once the
        parent has the answer.

        If a stop condition is met, nothing is sent: verifiers then calls `end_conversation`, whose
        ``{"over": True}`` the parent gets instead. The unsent messages stay in `_conversation`
        until `finish` replaces it.
        """
        new_messages = list(messages or ())
        if not self._conversation:
            new_messages = [*opening_messages(self._session.data), *new_messages]
        plain_messages = [from_verifiers(message) for message in new_messages]
        self._conversation += new_messages
        if self._prompt_length == 0:  # the first turn: these messages are the prompt
            self._prompt_length = len(new_messages)
        if await self._stop_condition():
            return
        self._answered = asyncio.get_running_loop().create_future()
        self._events.put_nowait({"messages": plain_messages})
        await self._answered

    async def end_conversation(self) -> None:
        """Tell the parent that the conversation is over, and wait until it has sent all of it."""
        if not self._complete.is_set():
            self._events.put_nowait({"over": True})
            await self._complete.wait()
        await self._stack.aclose()

    # Methods that the parent calls.

    async def begin(self) -> dict[str, Any]:
        """Start the episode, and return its prompt."""
        EPISODE.set(self)  # the task below inherits it
        # A model is required, but never called: the parent samples the policy.
        model = vf.ModelContext(model="policy", client=vf.EvalClientConfig())
        self._work = asyncio.create_task(self._environment.run_episode(self._task, model))
        event = await self._next()
        if "messages" not in event:
            raise RuntimeError("it ended before the first turn")
        return event

    async def call(self, name: str, arguments: Any, turn: int, call_id: str) -> dict[str, Any]:
        """Run a call of a tool. `done` in the reply is the stop condition that is met, or None."""
        server, tool = self._dispatch[name]
        result = await self._servers[server].run(lambda client: client.call_tool(tool, arguments))
        content = mcp_content_to_chat_content(result.content) if result.content else ""
        if not isinstance(content, str):
            raise TypeError(f"the tool {name} returned an image, and only text is supported")
        tool_call = vf.ToolCall(id=call_id, name=name, arguments=json.dumps(arguments))
        if turn != self._turn:  # the first call of a turn: calls of one turn are one message
            self._conversation.append(vf.AssistantMessage(content="", tool_calls=[]))
        self._turn = turn
        # The turn's message; results of its earlier calls may follow it.
        message = next(m for m in reversed(self._conversation) if m.role == "assistant")
        message.tool_calls.append(tool_call)
        self._conversation.append(vf.ToolMessage(tool_call_id=call_id, content=content, name=name))
        self._record()
        done = await self._stop_condition()
        return {"content": content, "failed": bool(result.is_error), "done": done}

    async def answer(self, content: str) -> dict[str, Any]:
        """Add an answer without a call; return the user's next messages or ``{"over": True}``."""
        self._conversation.append(vf.AssistantMessage(content=content))
        self._record()
        self._release()
        return await self._next()

    async def finish(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Score the finished conversation, `messages`, and return its reward.

        verifiers waits for this, in `ask_parent` or in `end_conversation`. Once released it scores
        its trace, so the trace is complete before.
        """
        self._conversation = [to_verifiers(message) for message in messages]
        trace = self._session.trace
        self._record()  # into the trace
        if self._answered is not None and not self._answered.done():
            # verifiers still waits for an answer in `ask_parent`, but a limit of the rollout, such
            # as its number of turns, has ended the conversation. An earlier stop condition stays.
            trace.stop("max_turns")
        self._complete.set()  # `end_conversation` returns
        self._release()  # `ask_parent` returns, if it waits
        episode = await self._work  # verifiers scores the trace
        raise_for(episode)
        scores = {
            name: None if reward is None else reward.value for name, reward in trace.rewards.items()
        }
        if None in scores.values():
            raise RuntimeError(f"it left rewards without a score: {scores}")
        return {"reward": trace.reward if scores else None}

    async def abandon(self) -> None:
        """End the episode without a score."""
        self._complete.set()
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._work

    async def _next(self) -> dict[str, Any]:
        """Return the environment's next event. Raises RuntimeError if it failed."""
        event = asyncio.ensure_future(self._events.get())
        await asyncio.wait({event, self._work}, return_when=asyncio.FIRST_COMPLETED)
        if event.done():
            return event.result()
        event.cancel()
        raise_for(self._work.result())  # the episode has ended: raise its error, if it has one
        return {"over": True}

    def _release(self) -> None:
        """Let the harness go on: its turn is answered."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    async def _stop_condition(self) -> str | None:
        """Return the name of the stop condition that is met, or None.

        The conditions are those after which verifiers' own loop would end the conversation: its
        limits, then the `@stop` methods of the task.
        """
        trace = self._session.trace
        if trace.stop_condition is None and (limit := self._limits.reached(trace)):
            trace.stop(limit)
        if trace.stop_condition is not None:
            return trace.stop_condition
        for stop in self._task.hooks("stop"):
            if await call_hook(stop, {vf.Trace: trace}):
                trace.stop(stop.__name__)
                break
        return trace.stop_condition

    def _record(self) -> None:
        """Rebuild verifiers' trace from the conversation: each answer becomes a turn of it.

        The trace is not extended, because messages in it change: `call` adds calls to an answer,
        and `finish` replaces the whole conversation.
        """
        trace, messages = self._session.trace, self._conversation
        # Empties the trace. verifiers has no public method for it: `_head_index` finds its nodes.
        trace.nodes.clear()
        trace._head_index.clear()
        for index in range(self._prompt_length, len(messages)):
            message = messages[index]
            if message.role == "assistant":
                response = vf.Response(
                    id=f"turn-{index}",
                    created=0,
                    model="policy",
                    message=message,
                    finish_reason="tool_calls" if message.tool_calls else "stop",
                )
                # Adds the earlier messages that the trace lacks, then the answer.
                prepare_turn(trace, messages[:index], self._tools).commit(response)
        # Adds the messages after the last answer, without an answer to them.
        prepare_turn(trace, messages, self._tools).commit_prompt()


def opening_messages(data: vf.TaskData) -> list[Any]:
    """Return the messages with which a task begins."""
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, vf.UserMessage(content=data.prompt)]
    return [*system, *(data.prompt or ())]


def from_verifiers(message: Any) -> dict[str, Any]:
    """Return a message in the parent's form. Raises TypeError for one that is not text."""
    if message.role not in ("system", "user", "assistant") or not isinstance(message.content, str):
        raise TypeError(f"its {message.role} message is no text, and only text is supported")
    return {"role": message.role, "content": message.content}


def to_verifiers(message: dict[str, Any]) -> Any:
    """Return a message of the parent in verifiers' form."""
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        return vf.ToolMessage(tool_call_id=call_id, content=content, name=message.get("name"))
    if role != "assistant":
        return {"system": vf.SystemMessage, "user": vf.UserMessage}[role](content=content)
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(
            vf.ToolCall(
                id=str(call.get("id") or number), name=call["function"]["name"], arguments=text
            )
        )
    return vf.AssistantMessage(
        content=content,
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
    )


def raise_for(episode: vf.Episode) -> None:
    """Raise the errors of an episode, which verifiers returns as data, if it has any."""
    if episode.ok:
        return
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in errors) or "it did not complete")


class BridgeServer:
    """The loaded environment, and the episodes that run in it.

    `serve` calls `reply` for each request of the parent, several at once in one event loop, and
    `aclose` at the end. The first request is `load`.

    Terms of verifiers: a taskset is a set of tasks with their tools and rewards. An environment
    plays them with one or more agents, and has a seat for each: a field of its configuration. A
    harness is the program that plays an agent. Here `PolicyHarness` plays the only one.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, PolicyEpisode] = {}
        """By the name that requests give as `episode`."""
        self._requests: dict[str, set[asyncio.Future[Any]]] = {}
        """Episode -> its requests, so that `abandon` can cancel those that still wait."""
        # What `load` sets.
        self._tasks: list[Any] = []
        self._environment: Any = None
        self._seat = ""
        """Name of the agent that the policy plays, in the environment's configuration."""
        self._serving = AsyncExitStack()
        """Ends the environment's servers."""

    async def load(self, id: str, args: dict[str, Any], limit: int) -> dict[str, Any]:
        """Load the environment and its first `limit` tasks, and describe the tools.

        `id` names the taskset. `args` is the environment's configuration, whose own ``id`` plays
        the taskset in another environment than its default: ``{"id": "single-agent"}``.
        """
        self._seat = seat = find_seat(id, args)
        agent = agent_settings(id, seat, dict(args.get(seat) or {}))
        taskset = {**(args.get("taskset") or {}), "id": id}
        try:
            config = vf.resolve_env_config({**args, "taskset": taskset, seat: agent})
            environment = vf.load_environment(config)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise Unsupported(f"args={args}: {'; '.join(problems)}") from error
        except Exception as error:
            raise Unsupported(f"args={args}: {type(error).__name__}: {error}") from error
        self._tasks = list(islice(iter(environment.taskset), limit))
        self._check(id, environment, getattr(config, seat))
        tools = await describe(environment)
        self._environment = environment
        return {"tools": tools, "tasks": len(self._tasks)}

    def _check(self, id: str, environment: vf.Env, agent: vf.AgentConfig) -> None:
        """Raise Unsupported for tasks that the policy cannot play.

        The agent's settings stand in `args` under the name of its seat: ``{agent: {runtime: …}}``.
        """
        task_class = type(environment.taskset).task_type()
        if not self._tasks:
            raise Unsupported(f"id={id}: has no tasks")
        # verifiers' runtime "subprocess" runs programs on this machine, in no container.
        if task_class.NEEDS_CONTAINER and agent.runtime.type == "subprocess":
            raise Unsupported(
                f"id={id}: its tasks need a container; set "
                f"args={{{self._seat}: {{runtime: {{type: docker}}}}}}"
            )
        # The first tasks stand for all of a taskset: they are mostly alike, and checks take time.
        for task in self._tasks[:CHECKED]:
            check_task(id, task)

    async def reply(self, request: dict[str, Any]) -> Any:
        """Run a request, and return the value of its reply.

        `do` is ``load``, ``begin``, ``call``, ``answer``, ``finish`` or ``abandon``; the other keys
        are its arguments. Example: ``{"do": "begin", "episode": "s1-t0-0", "task": 3}`` begins an
        episode with task 3.
        """
        do, episode = request.pop("do"), request.pop("episode", "")
        if do == "load":
            value = await self.load(**request)
            # Starts the servers of the environment's tools, which run until `aclose`.
            await self._serving.enter_async_context(self._environment.serving())
            return value
        if do == "abandon":
            return await self._abandon(episode)
        if do == "begin":  # make the episode, whose method `begin` is then called below
            task = self._tasks[request.pop("task")]
            self._episodes[episode] = PolicyEpisode(self._environment, self._seat, task)
        method = getattr(self._episodes[episode], do)  # `begin`, `call`, `answer` or `finish`
        work = asyncio.ensure_future(method(**request))
        # An `abandon` cancels the requests of its episode; those that are done ignore it.
        self._requests.setdefault(episode, set()).add(work)
        value = await work
        if do == "finish":
            self._episodes.pop(episode, None)
            self._requests.pop(episode, None)
        return value

    async def _abandon(self, episode: str) -> None:
        """End an episode without a score. Requests that still wait for it fail."""
        for work in self._requests.pop(episode, ()):
            work.cancel()
        if (policy_episode := self._episodes.pop(episode, None)) is not None:
            await policy_episode.abandon()

    async def aclose(self) -> None:
        """End all episodes, and the servers of the environment."""
        await asyncio.gather(*(self._abandon(episode) for episode in list(self._episodes)))
        await self._serving.aclose()


def check_task(id: str, task: vf.Task) -> None:
    """Raise Unsupported for a task of the taskset `id` that the policy cannot play.

    verifiers calls no model here, because the parent samples the policy. So a judge has no model
    to ask, and a hook gets neither a model's request nor its response.
    """
    if task.plugged_judges():
        raise Unsupported(
            f"id={id}: its tasks have judges, which ask a model of their own; drop them "
            "with args={taskset: {task: {judges: []}}}, and add reward=judge"
        )
    if discover_decorated(task, "intercept"):
        raise Unsupported(f"id={id}: @intercept rewrites requests; use a task without it")
    for stop in task.hooks("stop"):
        # `hook_boundary` returns the type of what the hook reads: a trace, request or response.
        if hook_boundary(stop, allow_trace=True) is not vf.Trace:
            raise Unsupported(
                f"id={id}: @stop {stop.__name__} reads a request or a response; let it "
                "read the trace"
            )
    try:
        for message in opening_messages(task.data):
            from_verifiers(message)  # raises TypeError for one that is not text
    except TypeError as error:
        raise Unsupported(f"id={id}: task {task.data.idx}: {error}") from error


def find_seat(id: str, args: dict[str, Any]) -> str:
    """Return the name of the agent that the policy plays, a field of the environment's settings.

    Raises Unsupported if the environment cannot be imported or has several agents.
    """
    environment_id = args.get("id", "")  # "": the taskset's default environment
    try:
        vf.task_type(id)  # only to import the taskset: its error says what is missing
        cls = vf.env_config_type(id, environment_id)
    except Exception as error:  # of the environment's own code, and of packages it needs
        raise Unsupported(
            f"id={id}: {type(error).__name__}: {error} Install it into this Python, or add its "
            "folder to PYTHONPATH"
        ) from error
    seats = [
        name
        for name, field in cls.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    ]
    if len(seats) != 1:
        raise Unsupported(
            f"id={id}: its environment has the agents {', '.join(seats)}, and the policy takes "
            "one seat; pair the taskset with another: args={id: single-agent}"
        )
    return seats[0]


def agent_settings(id: str, seat: str, agent: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the agent in `seat`, with `PolicyHarness` as its harness.

    A harness is the program that plays an agent. Raises Unsupported if the settings or the taskset
    `id` bring one of their own: it would call a model itself, and not the policy.
    """
    has_harness = "harness" in agent
    # `bash` is verifiers' default, for tasksets that bring no harness of their own.
    if has_harness or vf.default_harness_id(id) != "bash":
        setting = f"args.{seat}.harness={agent['harness']}" if has_harness else f"id={id}"
        raise Unsupported(
            f"{setting}: is a program that calls the model itself, and the policy is sampled here; "
            "leave it out, or run the program with agent=endpoint"
        )
    return {"runtime": {"type": "subprocess"}, **agent, "harness": {"id": HARNESS}}


async def describe(environment: vf.Env) -> list[dict[str, Any]]:
    """Return the schemas of the tools under the names that the model calls."""
    from mcp.server.mcpserver import MCPServer

    taskset = environment.taskset
    kind = type(taskset).task_type()
    schemas = []
    # The tools of the taskset and of its tasks, on servers that are made only to describe them.
    for toolset in [*taskset.toolsets(taskset.config), *kind.toolsets(taskset.config.task)]:
        name = toolset.server_name
        server = MCPServer(name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            function = {
                "name": f"{name}_{tool.name}" if name else tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            schemas.append({"type": "function", "function": function})
    return schemas


async def serve(replies: Any) -> None:
    """Serve requests until one says `end`, or standard input ends with the parent."""
    server = BridgeServer()
    running: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references

    async def answer(request: dict[str, Any]) -> None:
        """Write the reply to a request, or its error, under the request's number."""
        number = request.pop("n")
        try:
            reply = {"n": number, "value": await server.reply(request)}
        except Unsupported as error:
            reply = {"n": number, "error": str(error), "unsupported": True}
        except (Exception, asyncio.CancelledError) as error:
            reply = {"n": number, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    reader = asyncio.StreamReader(limit=2**30)  # a line may hold a whole conversation
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while line := await reader.readline():
        request = json.loads(line)
        if request["do"] == "end":
            break
        task = asyncio.create_task(answer(request))
        running.add(task)
        task.add_done_callback(running.discard)
    with suppress(Exception):
        await asyncio.wait_for(server.aclose(), timeout=10)


def main() -> None:
    """Serve, with standard output kept for replies."""
    # Prints of the environment go to stderr: on stdout they would break a reply. Replies get a copy
    # of the old standard output first, before descriptor 1 becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Imports from the current folder, as with `python -m`: here, and by PYTHONPATH in the processes
    # of tool servers that verifiers starts.
    cwd = os.getcwd()
    sys.path.insert(0, cwd)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (cwd, os.environ.get("PYTHONPATH"))))
    # verifiers imports a harness (what plays an agent) from the module of its id. Ours,
    # `PolicyHarness`, is in this file, which has no importable name: it runs as a script.
    sys.modules[HARNESS] = sys.modules[__name__]
    asyncio.run(serve(replies))
    os._exit(0)  # a thread of the environment's must not keep the process


if __name__ == "__main__":
    main()
