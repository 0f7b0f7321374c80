"""The agents of a run: one is started for each rollout, and its requests become the rollout.

agents = Agents(settings, chat, folder)
rollout = await agents.attempt(RolloutRequest(task=task, …), engine, limits)
await agents.aclose()
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from agenttrain.agents.app import ON_RESET, OpenRollout, build_app
from agenttrain.agents.attempt import EndpointRollout, ServedPolicy
from agenttrain.agents.certified import CertifiedTools
from agenttrain.agents.command_agent import CommandAgent, environment_of
from agenttrain.agents.config import AgentConfig, OnFailure, OnForm, Sandbox, Served
from agenttrain.agents.contained import ContainedAgent
from agenttrain.agents.output import DividedOutput
from agenttrain.agents.restarts import Restart
from agenttrain.agents.sandbox import check_sandbox, sandbox_command
from agenttrain.agents.task import AgentFailed, AgentTask, agent_reward
from agenttrain.agents.transport import EndpointTransport
from agenttrain.agents.workers import WorkerAgent
from agenttrain.chat.chat import Chat
from agenttrain.chat.grammar import ANY_FORM, AnswerForm, grammar_problem
from agenttrain.chat.wire.http import BoundedHead
from agenttrain.chat.wire.normal import Question
from agenttrain.chat.wire.openai import RequestError
from agenttrain.engines.base import Engine
from agenttrain.engines.registry import names_with
from agenttrain.rewards.function import copy_task
from agenttrain.rollout.config import OnToolFailure, RolloutConfig, RolloutRequest
from agenttrain.runtimes.base import Listens
from agenttrain.runtimes.machines import Machines
from agenttrain.tools.arguments import ArgumentSchema
from agenttrain.types import Rollout, RolloutMachine, StopReason, ToolUnavailable
from agenttrain.utils.files import write_atomically
from agenttrain.utils.locate import locate
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.temporary import TemporaryFolder
from agenttrain.utils.threads import attempt_async

GRACE_S = 5.0
"""Seconds that an agent has to end by itself once its rollout is over."""
KEEP_ALIVE_S = 600
"""Seconds that an idle connection stays open: clients that outlive an update of the policy may use
it again."""
MOST_FORMS = 256
"""Tools and forms of requests whose check is remembered."""
_FormKey = tuple[str, str | None, bool]
"""A request's tools and the JSON schema that its answer must fit, both as JSON, and True if the
engine samples under grammars."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine, mapped to one by which it can be reached."""


class OutsideAgent(Protocol):
    """Attempts the rollouts of a run: by a function, a process for each, or workers.

    `Agents` calls `attempt` for each rollout, many at once in its event loop, and `aclose` at last.
    """

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Attempt a task. Return the agent's reward, if any. Raises AgentFailed."""

    async def aclose(self) -> None:
        """End processes and the like that are left."""


class FunctionAgent:
    """An async function of the user's, `agent._target_`; it runs in the event loop of the run."""

    def __init__(self, function: Callable[[AgentTask], Awaitable[Any]]) -> None:
        self._function = function
        self._output = DividedOutput()

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Await the function, and return the reward that it returns, if any.

        Raises AgentFailed for an exception of the function, except the one by which it finds that
        the rollout's machine is lost: that is raised as it is.
        """

        async def call() -> Any:  # so that an error of the call itself is caught too
            return await self._function(assignment)

        with self._output.redirect(log):
            outcome = await attempt_async(call())
        if (error := outcome.error) is not None:
            if (unavailable := unavailable_in(error)) is not None:  # the rollout's machine is lost
                raise unavailable
            raise AgentFailed(f"raised {type(error).__name__}: {error}") from error
        result = outcome.value
        return agent_reward(result.get("reward") if isinstance(result, dict) else result)

    async def aclose(self) -> None:
        self._output.restore()


def unavailable_in(error: BaseException) -> ToolUnavailable | None:
    """Return the failure of the infrastructure that an error is, holds or was raised from."""
    if isinstance(error, ToolUnavailable):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    causes = (*inner, error.__cause__) if error.__cause__ is not None else inner
    return next((failure for cause in causes if (failure := unavailable_in(cause))), None)


class ExternalAgent:
    """Agents that somebody else starts. Each rollout in flight has a file with its address."""

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Publish the rollout, and wait for its end."""
        path = log.with_suffix(".json")
        # It holds the rollout's key, which other users must not read.
        write_atomically(path, assignment.line() + "\n", mode=0o600)
        try:
            await asyncio.Event().wait()  # until this is cancelled, when the rollout is over
        finally:
            path.unlink(missing_ok=True)
        return None

    async def aclose(self) -> None:
        """Nothing is kept between rollouts."""


class EndpointProtocol(BoundedHead):
    """uvicorn's HTTP, which also reports that a client has reset its connection.

    A client that goes away before it has read all of an answer resets the connection. The answer is
    then lost, although all of it was written.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a reset to the last request of the connection.

        `AnswerResponse` puts the function to call, if any, into the request's scope.
        """
        super().connection_lost(exc)
        was_reset = exc is not None  # else it was closed in order
        last_request = self.cycle  # None if there was no request
        if was_reset and last_request is not None:
            on_reset = last_request.scope.get(ON_RESET)
            if on_reset is not None:
                on_reset()


class LoopServer(uvicorn.Server):
    """uvicorn on the run's event loop, which leaves the run's signals alone."""

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Serve on one more socket, which the caller closes."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            partial(
                EndpointProtocol,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            ),
            sock=listener,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


class Agents:
    """The endpoint of a run, an HTTP server, and the agents that use it.

    The process that makes the rollouts has one, in its event loop. Call `attempt` for each rollout,
    many at once, and `aclose` at last. The first attempt starts the endpoint.

    An attempt gives the rollout an address in the endpoint (`_open_rollout`) and a container if
    there are `machines`, runs the agent (`_run_agent`), and decides why the rollout ended
    (`_stop_reason`). Meanwhile `EndpointRollout` answers the agent's requests.
    """

    def __init__(
        self,
        settings: AgentConfig,
        chat: Chat,
        folder: Path,
        *,
        lockstep: bool = False,
        machines: Machines | None = None,
        on_request: Callable[[str, Question], None] | None = None,
        on_restart: Callable[[Restart, str, str], None] | None = None,
    ) -> None:
        """`folder` gets the agents' output.

        With `lockstep` a run repeats bit for bit: the requests of a rollout are answered one after
        the other. With `machines` each rollout has a container, in which `command` runs.

        `on_request` is called before each turn is sampled, with the engine's session and the
        request. `on_restart` is called if a client has rewritten its conversation, with the kind,
        the rollout's id and the first difference. None: the first of each kind is a warning.

        Raises ValueError for a function that does not exist.
        """
        self.settings, self.chat = settings, chat
        self._on_request = on_request or (lambda session, question: None)
        self._on_restart = on_restart or self._warn_of_restart
        self.folder, self.lockstep = folder, lockstep
        self._machines = machines
        self._agent = make_agent(settings, folder, self._command, machines)
        self._attempt_slots = asyncio.Semaphore(settings.concurrency)
        self._open: dict[str, OpenRollout] = {}
        """Rollouts that requests may still reach, by the name in their address."""
        self._app = build_app(self._open.get)
        self._form_problems: OrderedDict[_FormKey, tuple[str, str] | None] = OrderedDict()
        """Results of `form_problem`: the parameter of the request at fault, and what is wrong with
        it. None: the tools and the form of the answer are possible."""
        self._certified = CertifiedTools(chat)
        self._warned_of: set[Restart] = set()
        self._socket_folder: TemporaryFolder | None = None
        """Folder of the socket by which sandboxes reach the endpoint."""
        self._server: LoopServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._endpoint_lock = asyncio.Lock()
        """Held while the endpoint starts: only the first attempt starts it."""
        self._certifying_lock = asyncio.Lock()
        """Held while a request's tools and form are checked in a thread, one request at a time."""
        self.address = ""
        """Address of the endpoint, e.g. ``http://127.0.0.1:4711``."""
        policy_names = [name for name, kind in settings.models.items() if kind is Served.policy]
        self._model = next((name for name in policy_names if name != "*"), "policy")
        """Name under which agents are told to ask for the policy."""

    async def attempt(
        self,
        request: RolloutRequest,
        engine: Engine,
        limits: RolloutConfig,
        parsed: Callable[..., None] | None = None,
    ) -> Rollout:
        """Let an agent attempt a task, and return the rollout. Raises EngineDead.

        `parsed` is called with each parsed turn, as `ParsedTurns.record`.
        """
        async with self._attempt_slots:
            await self._start_endpoint()
            entry = self._open_rollout(request, engine, limits, parsed)
            endpoint_rollout = entry.rollout  # the agent's requests, which make the `Rollout`
            rollout = endpoint_rollout.rollout
            start = time.perf_counter()
            try:
                async with self._running_machine(request) as machine:
                    failure, reward = await self._run_agent(entry, machine)
                    await self._close(entry)  # nothing of it is open while it is graded
                    if endpoint_rollout.failure is not None:
                        raise endpoint_rollout.failure
                    # A reward sent to the endpoint goes before the one printed or returned.
                    reward = reward if endpoint_rollout.reward is None else endpoint_rollout.reward
                    self._set_stop_reason(endpoint_rollout, failure)
                    if reward is not None:
                        rollout.environment_reward = reward
                    if machine is not None and rollout.stop_reason is not StopReason.error:
                        assert self._machines is not None
                        await self._machines.grade(rollout)
            except ToolUnavailable as error:  # its container: no fault of the agent
                if limits.on_tool_failure is OnToolFailure.error:
                    raise
                rollout.stop_reason, rollout.error = StopReason.error, hide_secrets(str(error))
            finally:
                await self._close(entry)  # does nothing if it was closed above
            rollout.seconds = time.perf_counter() - start
            return rollout

    def _open_rollout(
        self,
        request: RolloutRequest,
        engine: Engine,
        limits: RolloutConfig,
        parsed: Callable[..., None] | None,
    ) -> OpenRollout:
        """Give a rollout its address in the endpoint. The arguments are those of `attempt`."""
        policy = ServedPolicy(
            engine=engine,
            chat=self.chat,
            limits=limits,
            lockstep=self.lockstep,
            check=partial(self._form_error, structured=limits.structured_calls),
            parsed=parsed,
            on_restart=self._on_restart,
            on_request=self._on_request,
        )
        endpoint_rollout = EndpointRollout(request, policy, self.settings)
        entry = OpenRollout(rollout=endpoint_rollout)
        # In lockstep a run has to repeat bit for bit. Without this, an equal request would be
        # sampled anew if it came before the answer of the first was written, which is chance.
        entry.replays.joins_in_flight = self.lockstep
        if isinstance(self._agent, ExternalAgent):
            # Somebody else's process: only its connection shows that it has ended.
            text = "the client went away before its answer was complete, and did not come back"
            entry.on_lost = lambda: endpoint_rollout.end(StopReason.error, text)
        self._open[entry.name] = entry
        return entry

    async def _close(self, entry: OpenRollout) -> None:
        """Remove a rollout from the endpoint, and complete it; the second time, do nothing."""
        if self._open.pop(entry.name, None) is not None:
            entry.rollout.over.set()
            await entry.replays.aclose()
            await entry.rollout.close()

    async def aclose(self) -> None:
        """End the agents that are left, and the endpoint."""
        await self._agent.aclose()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None
        if self._socket_folder is not None:
            self._socket_folder.remove()

    def _command(self) -> list[str]:
        """Return the command of a process, inside a sandbox if `agent.sandbox` asks for one."""
        command: list[str] = self.settings.command
        if self._socket_folder is None:
            return command
        port = int(self.address.rpartition(":")[2])
        socket_path = self._socket_folder.path / "endpoint"
        return [*sandbox_command(self.settings, socket=socket_path, port=port), *command]

    @asynccontextmanager
    async def _running_machine(
        self, request: RolloutRequest
    ) -> AsyncIterator[RolloutMachine | None]:
        """Start a rollout's container, in which the endpoint is on 127.0.0.1, and end it."""
        machines = self._machines
        if machines is None:
            yield None
            return
        machine = await machines.start(request.rollout_id, request.task)
        server_in_container = None
        try:
            if self._server is not None and isinstance(machine, Listens):
                port = int(self.address.rpartition(":")[2])
                server_in_container = await self._server.listen(machine.listener(port))
            yield machine
        finally:
            if server_in_container is not None:
                server_in_container.close()
            await machines.release(request.rollout_id)

    async def _run_agent(
        self, entry: OpenRollout, machine: RolloutMachine | None
    ) -> tuple[str | None, float | None]:
        """Run a rollout's agent until it ends or has no more time. Return (failure, reward).

        Both are None if there is none. Most agents end by themselves, which ends the rollout. But
        the rollout may be over first (`EndpointRollout.over`): the agent has called /finish, or a
        limit was reached. The agent then has GRACE_S to end.
        """
        endpoint_rollout, url = entry.rollout, f"{self.address}/{entry.name}"
        assignment = AgentTask(
            rollout_id=endpoint_rollout.request.rollout_id,
            task=copy_task(endpoint_rollout.request.task),
            url=url,
            api_key=entry.key,
            model=self._model,
            has_frozen=Served.frozen in self.settings.models.values(),
            machine=machine,
            transport=lambda: EndpointTransport(self._app, url, entry.key),
        )
        key, limit_s, is_tasks_limit = "agent.timeout_s", self.settings.timeout_s, False
        task_s = None if self._machines is None else self._machines.limit_s(assignment.task)
        if task_s is not None and task_s <= limit_s:
            # The limit in the task's own settings, which a task of a container may have.
            key, limit_s, is_tasks_limit = "agent.timeout_sec of the task", task_s, True
        log = self.folder / endpoint_rollout.request.rollout_id
        log.parent.mkdir(parents=True, exist_ok=True)
        agent = asyncio.ensure_future(self._agent.attempt(assignment, log))
        over = asyncio.ensure_future(endpoint_rollout.over.wait())
        try:
            await asyncio.wait(
                (agent, over),
                timeout=limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not agent.done() and not over.done():
                timeout = f"{key}={limit_s:g} passed"
                if not is_tasks_limit:
                    return timeout, None
                # No failure of the agent: the rollout is graded.
                endpoint_rollout.end(StopReason.timeout, timeout)
                return None, None
            # `ExternalAgent.attempt` waits to be cancelled: it would never end in the grace time.
            if not agent.done() and not isinstance(self._agent, ExternalAgent):
                await asyncio.wait((agent,), timeout=GRACE_S)
            if agent.done():
                return None, agent.result()
            return None, None  # an agent that goes on after its rollout has not failed
        except AgentFailed as error:
            return hide_secrets(f"the agent {error}"), None
        finally:
            for task in (agent, over):
                task.cancel()
            await asyncio.wait((agent, over))

    def _set_stop_reason(self, endpoint_rollout: EndpointRollout, failure: str | None) -> None:
        """Set why the rollout ended, and its error, if any. `failure` is the agent's."""
        rollout = endpoint_rollout.rollout
        rollout.stop_reason, rollout.error = self._stop_reason(endpoint_rollout, failure)
        # With on_failure=zero a failed agent has the reward 0, and its turns are trained. An error
        # of the engine, which has set `ended`, is no failure of the agent.
        gives_zero = self.settings.on_failure is OnFailure.zero and rollout.turns > 0
        is_agents = endpoint_rollout.ended is None
        if gives_zero and is_agents and rollout.stop_reason is StopReason.error:
            rollout.stop_reason = StopReason.agent_failed

    def _stop_reason(
        self, endpoint_rollout: EndpointRollout, failure: str | None
    ) -> tuple[StopReason, str | None]:
        """Return why the rollout ended, and its error, if any. `failure` is the agent's.

        It is the first of these that applies: a limit or an engine's error, the error of the last
        request if the agent gave up on it, the agent's failure, no turn at all, the agent's own
        end.
        """
        end, has_turns = endpoint_rollout.ended, endpoint_rollout.rollout.turns > 0
        has_finished = end is not None and end.stop_reason is StopReason.completed  # by /finish
        if end is not None and not has_finished:
            reason, text = end
            if reason is StopReason.timeout and not has_turns:
                reason = StopReason.error  # there is nothing to grade or to train
            if reason is StopReason.error:
                return reason, text
            # After a limit its next request gets an error, on which an agent may fail.
            return reason, None if failure is None else f"{text}, and {failure}"
        # An agent that calls /finish after a refused request, and does not fail, has ended as it
        # wanted to: the refusal is not why.
        ended_as_planned = has_finished and failure is None
        if endpoint_rollout.refused is not None and not ended_as_planned:
            reason, text = endpoint_rollout.refused
            is_error = reason is StopReason.error or not has_turns
            return reason, text if is_error else None
        if failure is not None:
            return StopReason.error, failure
        if not has_turns:
            return StopReason.error, self._no_turn_error(endpoint_rollout)
        return (StopReason.max_tokens if endpoint_rollout.is_cut else StopReason.completed), None

    def _no_turn_error(self, endpoint_rollout: EndpointRollout) -> str:
        """Return why a rollout whose agent has ended by itself has nothing to train."""
        names = endpoint_rollout.untrained.models
        if names:
            model_names = ", ".join(map(str, dict.fromkeys(names)))
            count = endpoint_rollout.counts["agent/requests"]
            return (
                f"the agent ended without a turn to train: {count} requests, all for models that "
                f"are frozen: {model_names}; set agent.models={{{names[0]}: policy}}"
            )
        is_external = isinstance(self._agent, ExternalAgent)
        hint = "" if is_external else "; the run's agents/ has its output"
        return f"the agent ended without a turn{hint}"

    async def _start_endpoint(self) -> None:
        """Start the endpoint, if it is not running."""
        async with self._endpoint_lock:
            if self._server is not None:
                return
            host = self.settings.host
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, self.settings.port), family=family, backlog=2048)
            config = uvicorn.Config(
                self._app,
                http=EndpointProtocol,
                ws="none",
                log_level="warning",
                access_log=False,
                proxy_headers=False,  # nothing here asks for the client's address
                server_header=False,
                date_header=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
            self._server = LoopServer(config)
            listeners = [listener]
            if self.settings.sandbox is Sandbox.bwrap:
                self._socket_folder = TemporaryFolder()
                listeners.append(socket.socket(socket.AF_UNIX))
                listeners[-1].bind(str(self._socket_folder.path / "endpoint"))
                # Sandboxes may have another user. The folder lets nobody else in.
                (self._socket_folder.path / "endpoint").chmod(0o666)
                listeners[-1].listen(2048)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=listeners))
            # `_serving` is done without `started` if the server cannot start.
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.001)
            # A client cannot connect to "any address", 0.0.0.0: it is given the loopback address.
            client_host = ANY_ADDRESS.get(host, host)
            client_host = f"[{client_host}]" if ":" in client_host else client_host
            self.address = f"http://{client_host}:{listener.getsockname()[1]}"
            if isinstance(self._agent, ExternalAgent):
                print(
                    f"agents         {self.address}: start one for each file "
                    f"{self.folder}/*.json, which has its base_url, api_key and task",
                    flush=True,
                )

    async def _form_error(self, question: Question, *, structured: bool) -> RequestError | None:
        """Return the error of a request's tools or of the answer's form, or None.

        `structured` says that the engine samples under grammars, which can enforce a form.

        Certifying many tools takes tenths of a second, so a thread does it, once for each set.
        """
        form = question.form
        if not question.schemas and form == ANY_FORM:
            return None
        if form != ANY_FORM and not structured and self.settings.on_form is OnForm.refuse:
            return no_grammar_error(form)
        key = (question.schemas_json, form.schema, structured)
        if key not in self._form_problems:
            async with self._certifying_lock:
                if key not in self._form_problems:  # another request may have done it meanwhile
                    problem = await asyncio.to_thread(
                        form_problem, self._certified, question, structured
                    )
                    self._form_problems[key] = problem
        # The least recently used results are dropped: an agent may invent tools for each request.
        self._form_problems.move_to_end(key)
        while len(self._form_problems) > MOST_FORMS:
            self._form_problems.popitem(last=False)
        problem = self._form_problems[key]
        if problem is None:
            return None
        param, text = problem
        return RequestError(f"{param}: {text}", param=param)

    def _warn_of_restart(self, kind: Restart, rollout_id: str, difference: str) -> None:
        """Warn once of each kind of restart: the client has rewritten its history."""
        if kind in self._warned_of:
            return
        self._warned_of.add(kind)
        warnings.warn(
            f"agent/restarts/{kind}: rollout {rollout_id} does not continue its conversation, so "
            f"that a trajectory begins; {difference}",
            RuntimeWarning,
            stacklevel=2,
        )


def no_grammar_error(form: AnswerForm) -> RequestError:
    """Return the error of a request for JSON or a call that needs a grammar, where none is used.

    `correction.level=token` is among the remedies because a grammar makes the engine sample from
    other probabilities than the policy's, which that setting corrects for each token.
    """
    if form.call:
        param, fields, demand = "tool_choice", "tool_choice", "a call"
    else:
        # OpenAI's error names one field. The text names also that of Anthropic's API.
        param, demand = "response_format", "JSON"
        fields = "response_format or output_config.format"
    return RequestError(
        f"{fields}: demands {demand}, which needs a grammar; leave it out, set agent.on_form=ask, "
        "which answers without forcing it and counts that, or set "
        f"{names_with(grammars=True)} and rollout.structured_calls=true, and "
        "algorithm.correction.level=token, which weighs what the grammar rules out",
        param=param,
        code="unsupported_value",
    )


def form_problem(
    certified: CertifiedTools, question: Question, structured: bool
) -> tuple[str, str] | None:
    """Return the first parameter of a request that cannot be honoured, and why; None: all can be.

    It is "tools" or "response_format". `structured` says that the engine samples under grammars.
    Then the parameters of each tool, and the schema of the answer, must have a grammar too.
    """
    chat = certified.chat
    if question.schemas and (problem := tools_problem(certified, question.schemas)):
        return "tools", problem
    if not structured:
        return None
    if question.form.schema is not None:
        try:
            ArgumentSchema(json.loads(question.form.schema))  # raises for an invalid schema
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return "response_format", str(error)
        # Without the form's `call` and `tool`: `Agents` keeps the result for all requests with this
        # schema, whichever call they demand.
        form = AnswerForm(schema=question.form.schema)
        if problem := grammar_problem(chat.grammar([], form=form)):
            return "response_format", f"no grammar can be made of its schema: {problem}"
    for schema in question.schemas:
        if problem := grammar_problem(chat.grammar([schema])):
            name = schema["function"]["name"]
            return "tools", f"no grammar can be made of the parameters of {name}: {problem}"
    return None


def tools_problem(certified: CertifiedTools, schemas: Sequence[dict[str, Any]]) -> str | None:
    """Return why the model cannot be shown these tools, or None if it can."""
    names = [schema["function"]["name"] for schema in schemas]
    for index, schema in enumerate(schemas):
        try:
            ArgumentSchema(schema["function"]["parameters"])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return f"{names[index]}: its parameters are {error}"
    if len(set(names)) < len(names):
        return f"{names} name a tool twice"
    return certified.problem(schemas)


def make_agent(
    settings: AgentConfig,
    folder: Path,
    command: Callable[[], Sequence[str]] = tuple,
    machines: Machines | None = None,
) -> OutsideAgent:
    """Return the agent that the settings describe. Raises ValueError.

    `command` returns the command of each new process, with its sandbox.
    """
    if settings._target_ is not None:
        function = locate(settings._target_, key="agent._target_")
        if not asyncio.iscoroutinefunction(function):
            raise ValueError(
                f"agent._target_={settings._target_}: is no async function; write `async def "
                "solve(agent)`, or start a program with agent.command=[…]"
            )
        return FunctionAgent(function)
    if not settings.command:
        return ExternalAgent()
    if machines is not None:
        return ContainedAgent(
            settings.command,
            machines.machine_of,
            # The variables of `agent.env` alone: PATH, HOME and the like are the container's.
            env={name: os.environ[name] for name in settings.env if name in os.environ},
            timeout_s=settings.timeout_s,
            exit_code=settings.exit_code_reward,
        )
    if settings.sandbox is Sandbox.bwrap:
        check_sandbox(settings)
    env = environment_of(settings.env)
    if settings.reuse:
        return WorkerAgent(command, env, folder, at_once=settings.per_process)
    return CommandAgent(command, env, exit_code=settings.exit_code_reward)
