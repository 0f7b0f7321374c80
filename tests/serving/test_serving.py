"""The HTTP front over scripted engines: shapes, exact ids, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import parts
import pytest
import tiny
import uvicorn

from agenttrain.chat.wire.openai import CompletionWriter, completion_body, read_served
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.serving.answers import Answering, ChatServer
from agenttrain.serving.app import build_app, listen
from agenttrain.types import Completion, Finish

TOOLS = parts.toolbox().schemas()
ASK = [{"role": "user", "content": "what is 3 + 4?"}]


class Served:
    """A server in a thread, its engine and clients."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.server = ChatServer(engine=engine, chat=parts.chat(), model="agent")
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        config = uvicorn.Config(build_app(self.server), log_level="warning")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [listener]})
        self.thread.start()
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def ask(self, messages: Sequence[Any], **fields: Any) -> Any:
        create = self.client.chat.completions.create
        return create(model="agent", messages=list(messages), **fields)

    def post(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/chat/completions", json=fields, timeout=30)

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


Script = Callable[[Sequence[int], str, int], Any]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers = []

    def start(*answers: str, engine: ScriptedEngine | None = None) -> Served:
        count = iter(answers)
        script: Script = lambda ids, session, turn: parts.ids(next(count))  # noqa: E731
        servers.append(Served(engine or ScriptedEngine(script, max_context=400)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_an_answer_in_openais_shape(serve) -> None:
    served = serve("It is 7.<|im_end|>")
    answer = served.ask(ASK, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "It is 7.")
    assert choice.finish_reason == "stop"
    prompt = parts.chat().prompt_ids(ASK, [])
    assert answer.prompt_token_ids == prompt
    assert tuple(choice.token_ids) == parts.ids("It is 7.<|im_end|>")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert [model.id for model in served.client.models.list()] == ["agent"]


def test_a_conversation_with_calls_continues_the_sampled_ids(serve) -> None:
    # Spacing and key order of the call are the model's: rendered again, they would differ.
    first = '<tool_call>\n{"arguments":   {"b": 4, "a": 3}, "name": "add"}\n</tool_call><|im_end|>'
    served = serve(first, "It is 7.<|im_end|>", "Yes.<|im_end|>")
    answer = served.ask(ASK, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
    history = [*ASK, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    second = served.ask(history, tools=TOOLS)
    history += [second.choices[0].message, {"role": "user", "content": "sure?"}]
    served.ask(history, tools=TOOLS)
    sent = [request.token_ids for request in served.engine.sent]
    decode = tiny.tokenizer().decode
    assert sent[1][: len(sent[0])] == sent[0]
    assert decode(sent[1][len(sent[0]) :]) == (
        f"{first}\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert decode(sent[2][len(sent[1]) :]) == (
        "It is 7.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.usage.prompt_tokens_details.cached_tokens == len(sent[0]) + len(parts.ids(first))
    assert len({request.session for request in served.engine.sent}) == 1


@pytest.mark.parametrize("refers", [False, True])
def test_a_conversation_of_responses_continues_the_sampled_ids(serve, refers: bool) -> None:
    first = '<tool_call>\n{"arguments":   {"b": 4, "a": 3}, "name": "add"}\n</tool_call><|im_end|>'
    served = serve(first, "It is 7.<|im_end|>")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    create = served.client.responses.create
    (call,) = create(model="agent", input=ASK, tools=tools).output
    item = {"type": "item_reference", "id": call.id} if refers else call.to_dict()
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    second = create(model="agent", input=[*ASK, item, output], tools=tools, temperature=0.5)
    assert second.output_text == "It is 7."
    sent = [request.token_ids for request in served.engine.sent]
    assert second.usage.input_tokens_details.cached_tokens == len(sent[0]) + len(parts.ids(first))
    assert sent[1][: len(sent[0])] == sent[0]
    assert served.engine.sent[1].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": "required", "tools": [TOOLS[0] | TOOLS[0]["function"]]}, "only auto and"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"temperature": 3}, "temperature: Input should be less than"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls=false: is not supported here"),
        ({"previous_response_id": "x"}, "nothing is kept here between requests"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_serve_refuses_what_it_would_not_follow_of_responses(serve, fields, text: str) -> None:
    served = serve("never")
    answer = httpx.post(f"{served.url}/responses", json={"input": "x", **fields}, timeout=30)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True)


def test_serve_samples_responses_at_the_number_that_a_text_stands_for(serve) -> None:
    served = serve("It is 7.<|im_end|>")
    body = {"input": "x", "temperature": "0.5"}
    assert httpx.post(f"{served.url}/responses", json=body, timeout=30).status_code == 200
    assert repr(served.engine.sent[0].sampling.temperature) == "0.5"


def test_two_branches_of_one_answer_get_sessions_of_their_own(serve) -> None:
    served = serve(*(f"{word}.<|im_end|>" for word in ("one", "two", "three")))
    answer = served.ask(ASK).choices[0].message
    for text in ("why?", "how?"):
        served.ask([*ASK, answer, {"role": "user", "content": text}])
    first, second, third = served.engine.sent
    assert (first.session == second.session, first.session == third.session) == (True, False)
    history = len(first.token_ids) + len(parts.ids("one.<|im_end|>"))
    assert third.token_ids[:history] == second.token_ids[:history]


def test_an_edited_history_is_rendered_anew(serve) -> None:
    served = serve("It is 8.<|im_end|>", "Yes.<|im_end|>")
    served.ask(ASK)
    edited = [*ASK, {"role": "assistant", "content": "It is 7."}, {"role": "user", "content": "?"}]
    assert served.ask(edited).usage.prompt_tokens_details.cached_tokens == 0
    assert list(served.engine.sent[1].token_ids) == parts.chat().prompt_ids(edited, [])


def test_edited_reasoning_of_an_earlier_turn_is_rendered_anew(serve) -> None:
    served = serve("<think>3 + 4</think>It is 7.<|im_end|>", *["Yes.<|im_end|>"] * 3)
    served.ask(ASK)
    answer = {"role": "assistant", "content": "It is 7.", "reasoning_content": "3 + 4"}
    history = [*ASK, answer, {"role": "user", "content": "sure?"}]
    cached = [served.ask(history).usage.prompt_tokens_details.cached_tokens > 0]
    history += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "really?"}]
    for thought in ("3 + 4", "a guess"):
        history[len(ASK)] = {**answer, "reasoning_content": thought}
        cached.append(served.ask(history).usage.prompt_tokens_details.cached_tokens > 0)
    assert cached == [True, True, False]


def test_a_malformed_call_is_text_and_the_model_reads_what_was_wrong(serve) -> None:
    broken = "<tool_call>\n{oops\n</tool_call><|im_end|>"
    served = serve(broken, "Sorry.<|im_end|>")
    answer = served.ask(ASK, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert "{oops" in answer.message.content
    served.ask([*ASK, answer.message, {"role": "user", "content": "again"}], tools=TOOLS)
    text = tiny.tokenizer().decode(served.engine.sent[1].token_ids)
    assert f"{broken}\n<|im_start|>user\n<tool_response>\nError: malformed call: " in text


def test_parallel_replies_may_come_in_any_order(serve) -> None:
    two = parts.call("add", '{"a": 3, "b": 4}').removesuffix("<|im_end|>")
    two += "\n" + parts.call("add", '{"a": 5, "b": 6}')
    served = serve(two, "7 and 11.<|im_end|>")
    message = served.ask(ASK, tools=TOOLS).choices[0].message
    replies = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(message.tool_calls, ("7", "11"), strict=True)
    ]
    served.ask([*ASK, message, *reversed(replies)], tools=TOOLS)
    text = tiny.tokenizer().decode(served.engine.sent[1].token_ids)
    assert text.index("<tool_response>\n7") < text.index("<tool_response>\n11")


def test_a_stream_has_the_answers_chunks(serve) -> None:
    served = serve(parts.call("add", '{"a": 3, "b": 4}'))
    chunks = list(served.ask(ASK, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    (call,) = [c for chunk in chunks[:-1] for c in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "add")
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(served.engine.sent) * len(
        parts.ids(parts.call("add", '{"a": 3, "b": 4}'))
    )


class Dripping(ScriptedEngine):
    """Reports one token of its answer every 80 ms, or as often as `seconds` says."""

    listener: Callable[[int], None] = print
    aborted = 0
    reported = 0
    seconds = 0.08

    def watch(self, session: str, listener: Callable[[int], None]) -> None:
        self.listener = listener

    async def generate(self, token_ids: Any, sampling: Sampling, **words: Any) -> Completion:
        completion = await super().generate(token_ids, sampling, **words)
        try:
            for count, token_id in enumerate(completion.token_ids, 1):
                await asyncio.sleep(self.seconds)
                self.listener(token_id)
                self.reported = count
                if sampling.ends is not None and sampling.ends(token_id):
                    return Completion(
                        token_ids=completion.token_ids[:count],
                        logprobs=completion.logprobs[:count],
                        finish=Finish.abort,
                        versions=((self.version, count),),
                    )
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return completion


def test_content_is_streamed_as_it_is_sampled(serve) -> None:
    text = "The answer is 7."
    served = serve(engine=Dripping([f"{text}<|im_end|>"], encode=parts.ids))
    deltas = [
        chunk.choices[0].delta.content
        for chunk in served.ask(ASK, stream=True)
        if chunk.choices[0].delta.content
    ]
    assert "".join(deltas) == text
    assert len(deltas) > 2


def test_responses_stream_reasoning_and_content_as_they_are_sampled(serve) -> None:
    answer = "<think>I add three and four.</think>The answer is 7.<|im_end|>"
    served = serve(engine=Dripping([answer], encode=parts.ids, max_context=400))
    with served.client.responses.stream(model="agent", input=ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message"]
    for kind, whole in (
        ("reasoning_text", "I add three and four."),
        ("output_text", "The answer is 7."),
    ):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert ("".join(deltas), len(deltas) > 2) == (whole, True)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert (done.text, done.output_index) == ("The answer is 7.", 1)


async def chunks_of(server: ChatServer, answering: Answering) -> list[dict[str, Any]]:
    """The chunks of an answer's stream."""
    writer = CompletionWriter(answering.head, answering.question.include_usage)
    events = [event async for event in server.stream(answering, writer)]
    assert events.pop() == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_ends_with_the_answer_if_its_reading_has_changed() -> None:
    """Content turns out to be reasoning once its mark is complete, and is sent once more."""
    server = ChatServer(
        engine=Dripping(["so I add</think>It is 7.<|im_end|>"], encode=parts.ids),
        chat=parts.chat(),
        model="agent",
    )

    async def stream() -> list[dict[str, Any]]:
        return await chunks_of(server, server.begin(read_served({"messages": ASK}, {})))

    deltas = [chunk["choices"][0]["delta"] for chunk in asyncio.run(stream())]
    assert "".join(delta.get("content", "") for delta in deltas).endswith("It is 7.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_answer(serve, stream) -> None:
    engine = Dripping(["x " * 200 + "<|im_end|>"], encode=parts.ids, max_context=2000)
    served = serve(engine=engine)
    with pytest.raises(httpx.TimeoutException), httpx.Client(timeout=0.5) as client:
        body = {"messages": ASK, "stream": stream, "tools": TOOLS}
        with client.stream("POST", f"{served.url}/chat/completions", json=body) as response:
            response.read()
    deadline = time.monotonic() + 5
    while not engine.aborted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.aborted == 1
    assert len(engine.released) == 1


def test_several_conversations_at_once(serve) -> None:
    barrier = asyncio.Barrier(8)

    class Together(ScriptedEngine):
        """Answers once all eight are there."""

        async def generate(self, *arguments: Any, **words: Any) -> Completion:
            await barrier.wait()
            return await super().generate(*arguments, **words)

    engine = Together(lambda ids, session, turn: parts.ids("ok<|im_end|>"))
    served = serve(engine=engine)

    async def ask_all() -> None:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none") as client:
            await asyncio.gather(
                *(client.chat.completions.create(model="agent", messages=ASK) for _ in range(8))
            )

    asyncio.run(ask_all())
    assert len({request.session for request in engine.sent}) == 8


def test_stop_texts_seed_and_limits(serve) -> None:
    served = serve("one two three<|im_end|>", "one two three<|im_end|>")
    answer = served.ask(ASK, stop=[" two"], seed=5, temperature=0.5, top_p=0.9).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("one", "stop")
    cut = served.ask(ASK, max_tokens=1).choices[0]
    assert cut.finish_reason == "length"
    sampling = served.engine.sent[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)


def test_seeds_of_either_sign_differ(serve) -> None:
    served = serve(*["one<|im_end|>"] * 3)
    for seed in (-3, 3, 2**63 - 1):
        served.ask(ASK, seed=seed)
    seeds = [request.sampling.seed for request in served.engine.sent]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**62 for seed in seeds)


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "stop", "content", "reasoning", "calls"),
    [
        ("It is Paris.", "Paris", "It is", None, 0),
        (ADD, '"b"', '<tool_call>\n{"name": "add", "arguments": {"a": 3, ', None, 0),
        (ADD, "</tool_call>", ADD.removesuffix("</tool_call>"), None, 0),
        (ADD, "<tool_call>", "", None, 0),
        (f"{ADD}\n{ADD}", "</tool_call>\n<tool", ADD.removesuffix("</tool_call>"), None, 0),
        (f"Now {ADD}\nThen {ADD} Done", "Done", "Now \nThen", None, 2),
        ("<think>I see Paris</think>Lyon", "Paris", "", "I see", 0),
        ("<think>I see</think>Lyon and", "</think>", "", "I see", 0),
        ("<think>I see</think>Lyon and", " and", "Lyon", "I see", 0),
    ],
)
@pytest.mark.parametrize("dripping", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_no_part_of_an_answer_holds_a_stop_text(
    written: str, stop: str, content: str, reasoning, calls: int, dripping: bool, stream: bool
) -> None:
    ids = parts.ids(f"{written} And a long rest of the turn, which nobody reads.<|im_end|>")
    engine = (Dripping if dripping else ScriptedEngine)([ids], max_context=400)
    engine.seconds = 0.0
    server = ChatServer(engine=engine, chat=parts.chat(), model="agent")
    body = {"messages": ASK, "stop": [stop], "tools": TOOLS, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}}

    async def ask() -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        answering = server.begin(read_served(body, {}))
        if stream:
            chunks = await chunks_of(server, answering)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
            return deltas, chunks[-2]["choices"][0], chunks[-1]["usage"]
        answer = completion_body(await server.answer(answering))
        return [answer["choices"][0]["message"]], answer["choices"][0], answer["usage"]

    deltas, choice, usage = asyncio.run(ask())
    got = "".join(delta.get("content") or "" for delta in deltas)
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    made = sum(len(delta.get("tool_calls") or ()) for delta in deltas)
    assert (got, thought or None, made) == (content, reasoning, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    # The tokens end with the one that completes the text.
    text_of = parts.chat().text_of
    assert stop in text_of(choice["token_ids"]) and stop not in text_of(choice["token_ids"][:-1])
    assert usage["completion_tokens"] == len(choice["token_ids"])
    assert engine.released
    if dripping:
        assert engine.reported == usage["completion_tokens"]


def calls(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": TOOLS}


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[1]"}}
GOOD = {"id": "d", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
BAD = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": ASK, "n": 2}, "n=2: is not supported here; leave it out"),
    ({"messages": ASK, "response_format": {"type": "json_object"}}, "response_format="),
    ({"messages": ASK, "tool_choice": "required"}, 'tool_choice="required": only auto and none'),
    ({"messages": ASK, "temperature": 3}, "temperature: Input should be less than"),
    ({"messages": ASK, "model": "gpt"}, "model=gpt: is not served here; the model is agent"),
    ({"messages": ASK, "tools": [{"type": "web"}]}, "tools[0]: only tools of the type function"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role=bot: expected one of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content: holds a part of type image_url; only text is supported",
    ),
    (calls(*ASK, {"role": "assistant", "content": "It"}), "messages: the last one is the"),
    (
        calls(*ASK, {"role": "tool", "tool_call_id": "x", "content": "7"}),
        "messages[1].tool_call_id=x: no assistant message before it has that call",
    ),
    (
        calls(*ASK, {"role": "assistant", "tool_calls": [CALL]}, *ASK),
        "messages[1].tool_calls: the arguments of add are no JSON object",
    ),
    (calls(*ASK, {"role": "assistant", "tool_calls": 5}, *ASK), "tool_calls: expected a list"),
    (
        calls(*ASK, {"role": "assistant", "tool_calls": [GOOD]}, *ASK),
        "messages: the assistant made the calls d, and each needs exactly one tool message",
    ),
    (calls(*ASK, {"role": "tool", "tool_call_id": [1], "content": "7"}), "tool_call_id=[1]: no"),
    (
        {"messages": [{"role": "user", "content": "7 " * 1000}]},
        "tokens fill the context of 400; shorten them",
    ),
]


@pytest.mark.parametrize(("body", "problem"), BAD, ids=[problem[:30] for _, problem in BAD])
def test_bad_requests_get_openais_errors(serve, body, problem) -> None:
    response = serve("never").post(**body)
    error = response.json()["error"]
    assert problem in error["message"]
    assert error["type"] == "invalid_request_error"
    assert response.status_code == (404 if "model" in body else 400)


def test_a_body_that_is_nested_too_deeply_is_refused(serve) -> None:
    url = f"{serve('never').url}/chat/completions"
    body, headers = b'{"messages":' + b"[" * 100_000, {"content-type": "application/json"}
    response = httpx.post(url, content=body, headers=headers, timeout=30)
    assert response.status_code == 400
    assert "the body is not JSON" in response.json()["error"]["message"]


def test_a_missing_reply_is_refused(serve) -> None:
    served = serve(parts.call("add", '{"a": 3, "b": 4}'))
    message = served.ask(ASK, tools=TOOLS).choices[0].message
    with pytest.raises(openai.BadRequestError, match="each needs exactly one tool message"):
        served.ask([*ASK, message, {"role": "user", "content": "well?"}], tools=TOOLS)


def test_an_engines_failure_is_a_server_error(serve) -> None:
    served = serve(engine=ScriptedEngine([]))
    with pytest.raises(openai.InternalServerError, match="the script has no answer"):
        served.ask(ASK)


def test_an_engines_failure_ends_a_stream_of_chat(serve) -> None:
    served = serve(engine=ScriptedEngine([]))
    body = {"messages": ASK, "stream": True}
    answer = httpx.post(f"{served.url}/chat/completions", json=body, timeout=30)
    events = answer.text.split("\n\n")[1:]
    assert "the script has no answer" in json.loads(events[0][6:])["error"]["message"]
    assert events[1:] == ["data: [DONE]", ""]


def test_an_engines_failure_ends_the_response_that_has_begun(serve) -> None:
    served = serve(engine=ScriptedEngine([]))
    body = {"input": "x", "stream": True}
    answer = httpx.post(f"{served.url}/responses", json=body, timeout=30)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert len({event["response"]["id"] for event in events}) == 1
    assert {event["response"]["model"] for event in events} == {"agent"}


def test_forgotten_conversations_are_rendered_and_their_sessions_released(serve) -> None:
    served = serve("one.<|im_end|>", "two.<|im_end|>", "three.<|im_end|>")
    served.server.conversations.max_tokens = 30
    first = served.ask(ASK).choices[0].message
    served.ask([{"role": "user", "content": "and 5 + 6?"}])
    assert served.engine.released == [served.engine.sent[0].session]
    again = served.ask([*ASK, first, {"role": "user", "content": "why?"}])
    assert again.usage.prompt_tokens_details.cached_tokens == 0
