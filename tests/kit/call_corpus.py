"""Completions as models write them, with the calls that we read and those that vLLM reads.

`tests/chat/test_call_corpus.py` holds our parsers to the second column, and in the environment of
vLLM `tests/engines/test_vllm_tool_parsers.py` holds vLLM's own to the third. The docs' table of
differences is made of the rows where the two are not the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Calls = list[Any]
"""Of (name, arguments), or `MALFORMED`."""
MALFORMED = "malformed"
"""Ours: a call that cannot be read. The model reads why, and no tool runs."""
NO_CALL = "no call"
"""vLLM: the whole completion is content, other calls in it too, or its parser raises."""
NOT_COMPARED = "not compared"
"""vLLM reads this form with tokenizers of mistral_common alone."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in {
        "find": {"q": {"type": "string"}, "top": {"type": "integer"}},
        "point": {"x": {}, "y": {}},
    }.items()
]


@dataclass(frozen=True, slots=True)
class Row:
    """One completion; `ours` and `vllm` are calls, or the word for what is read in their place."""

    format: str
    what: str
    """The trait of the completion, as the docs name it."""
    text: str
    ours: Calls | str
    vllm: Calls | str | None = None
    """None: the same as ours."""


TEA: Calls = [("find", {"q": "tea", "top": 3})]
ARGUMENTS = '{"q": "tea", "top": 3}'
BARE = (
    "<function=find>\n<parameter=q>\ntea\n</parameter>\n<parameter=top>\n3\n</parameter>\n"
    "</function>"
)


def _json(
    form: str, key: str, others: dict[str, Calls | str | None], usual: str | None = None
) -> Sequence[tuple]:
    """Forms of a call that is a JSON object, written into `form`; `key` is the family's own.

    `others` maps the other keys for arguments to vLLM's readings, `usual` is vLLM's of the rest.
    """
    return [
        (
            "as the template writes it",
            form % f'{{"name": "find", "{key}": {ARGUMENTS}}}',
            TEA,
            usual,
        ),
        ("the arguments first", form % f'{{"{key}": {ARGUMENTS}, "name": "find"}}', TEA, usual),
        (
            "a type and an id beside",
            form % f'{{"type": "function", "id": "a1", "name": "find", "{key}": {ARGUMENTS}}}',
            TEA,
            usual,
        ),
        *(
            (
                f"`{name}` in place of `{key}`",
                form % f'{{"name": "find", "{name}": {ARGUMENTS}}}',
                TEA,
                other,
            )
            for name, other in others.items()
        ),
    ]


CORPUS: list[Row] = []


def _add(format: str, *rows: tuple[str, str, Calls | str, Calls | str | None]) -> None:
    CORPUS.extend(Row(format, *row) for row in rows)


HERMES = "<tool_call>\n%s\n</tool_call>"
for name in ("hermes", "qwen"):
    _add(
        name,
        *_json(HERMES, "arguments", {"parameters": NO_CALL, "args": NO_CALL}),
        (
            "two calls",
            (HERMES % f'{{"name": "find", "arguments": {ARGUMENTS}}}') * 2,
            TEA * 2,
            None,
        ),
        ("arguments beside the name", HERMES % '{"name": "find", "q": "tea"}', MALFORMED, NO_CALL),
        (
            "a key beside the arguments",
            HERMES % f'{{"name": "find", "arguments": {ARGUMENTS}, "q": "tea"}}',
            MALFORMED,
            TEA,
        ),
        (
            "the arguments twice",
            HERMES % f'{{"name": "find", "arguments": {{}}, "parameters": {ARGUMENTS}}}',
            MALFORMED,
            [("find", {})],
        ),
        ("no arguments", HERMES % '{"name": "find"}', [("find", {})], NO_CALL),
        (
            "arguments as JSON text",
            HERMES % '{"name": "find", "arguments": "{\\"q\\": \\"tea\\", \\"top\\": 3}"}',
            TEA,
            [("find", ARGUMENTS)],
        ),
        (
            "Python's words",
            HERMES % '{"name": "find", "arguments": {"q": None}}',
            MALFORMED,
            NO_CALL,
        ),
        ("not closed", f'<tool_call>{{"name": "find", "arguments": {ARGUMENTS}}}', MALFORMED, TEA),
    )

for what, tag in {"": "", " behind python_tag": "<|python_tag|>"}.items():
    _add(
        "llama3",
        *(
            (trait + what, *row)
            for trait, *row in _json(tag + "%s", "parameters", {"arguments": None, "args": NO_CALL})
        ),
    )
_add(
    "llama3",
    ("a JSON answer", '{"name": "Bob", "age": 3}', [], NO_CALL),
    ("a JSON answer with parameters", '{"parameters": {"lr": 3}}', [], NO_CALL),
    ("arguments beside the name", '{"name": "find", "q": "tea"}', [], NO_CALL),
    (
        "arguments beside the name behind python_tag",
        '<|python_tag|>{"name": "find", "q": "tea"}',
        MALFORMED,
        NO_CALL,
    ),
    (
        "two calls",
        f'{{"name": "find", "parameters": {ARGUMENTS}}}; '
        f'{{"name": "find", "arguments": {ARGUMENTS}}}',
        TEA * 2,
        None,
    ),
)

for name in ("qwen_xml", "nemotron3"):
    _add(
        name,
        ("as the template writes it", HERMES % BARE, TEA, None),
        ("without the opening mark", BARE, TEA, None),
        ("without the opening mark, closed", f"{BARE}\n</tool_call>", TEA, None),
        ("without the opening mark, behind a text", f"I look.\n\n{BARE}\n</tool_call>", TEA, None),
        ("without the opening mark, two calls", f"{BARE}\n{BARE}", TEA * 2, None),
        ("without the opening mark, behind a call", f"{HERMES % BARE}\n{BARE}", TEA * 2, None),
        (
            "without the opening mark, no such tool",
            BARE.replace("find", "nothing"),
            [],
            [("nothing", {"q": "tea", "top": "3"})],
        ),
        (
            "a parameter that is not closed, without the opening mark",
            f"<function=find>\n<parameter=q>\ntea\n{BARE}",
            [MALFORMED, *TEA],
            TEA,
        ),
        ("not closed", f"<tool_call>\n{BARE}", MALFORMED, TEA),
    )

LFM = "<|tool_call_start|>[%s]<|tool_call_end|>"
for name, form, rewritten, positional in (
    # vLLM's parser of lfm2 rewrites what is no Python before it reads it.
    ("lfm2", LFM, None, [("find", {})]),
    ("pythonic", "[%s]", NO_CALL, NO_CALL),
):
    _add(
        name,
        ("as the template writes it", form % 'find(q="tea", top=3)', TEA, None),
        (
            "single quotes, two calls",
            form % "find(q='tea', top=3), point(x=1)",
            [*TEA, ("point", {"x": 1})],
            None,
        ),
        ("a tuple", form % "point(x=(800, 600))", [("point", {"x": [800, 600]})], None),
        ("a set", form % "point(x={'a', 'b'})", [("point", {"x": ["a", "b"]})], None),
        ("hexadecimal", form % "point(x=0x1f, y=1_000)", [("point", {"x": 31, "y": 1000})], None),
        ("signs and points", form % "point(x=+1, y=-.5)", [("point", {"x": 1, "y": -0.5})], None),
        ("strings behind each other", form % "find(q='a' \"b\")", [("find", {"q": "ab"})], None),
        ("a string in three quotes", form % 'find(q="""a\nb""")', [("find", {"q": "a\nb"})], None),
        ("a raw string", form % r"find(q=r'\d+')", [("find", {"q": r"\d+"})], None),
        (
            "JSON's words",
            form % "point(x=true, y=[null])",
            [("point", {"x": True, "y": [None]})],
            None,
        ),
        ("numbers as keys", form % "point(x={1: 'a'})", [("point", {"x": {"1": "a"}})], None),
        ("zeros in front", form % "point(x=07)", [("point", {"x": 7})], rewritten),
        ("a reserved word as a key", form % "point(from=1)", [("point", {"from": 1})], rewritten),
        ("a value without a name", form % "find('tea')", MALFORMED, positional),
        ("bytes", form % "point(x=b'a')", MALFORMED, NO_CALL),
    )

MISTRAL = "[TOOL_CALLS]"
_add(
    "mistral",
    ("as the template writes it", f"{MISTRAL}find[ARGS]{ARGUMENTS}", TEA, None),
    ("two calls", f"{MISTRAL}find[ARGS]{ARGUMENTS}" * 2, TEA * 2, None),
    *(
        (f"an array, {trait}", *row)
        for trait, *row in _json(
            f"{MISTRAL}[%s]",
            "arguments",
            {"parameters": NOT_COMPARED, "args": NOT_COMPARED},
            NOT_COMPARED,
        )
    ),
    (
        "an array, arguments beside the name",
        MISTRAL + '[{"name": "find", "q": "tea"}]',
        MALFORMED,
        NOT_COMPARED,
    ),
)

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_add(
    "deepseek",
    ("as the template writes it", DEEPSEEK % ARGUMENTS, TEA, None),
    ("broken JSON", DEEPSEEK % '{"q": tea}', MALFORMED, [("find", '{"q": tea}')]),
)
_add(
    "gemma4",
    (
        "as the template writes it",
        '<|tool_call>call:find{q:<|"|>tea<|"|>,top:3}<tool_call|>',
        TEA,
        None,
    ),
    (
        "quotes of JSON",
        '<|tool_call>call:find{"q":"tea","top":3}<tool_call|>',
        TEA,
        [("find", {'"q"': '"tea"', '"top"': "3"})],
    ),
)
_add(
    "glm4_moe",
    (
        "as the template writes it",
        "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>tea</arg_value>\n<arg_key>top</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        TEA,
        None,
    ),
)


def read_alike(row: Row) -> bool:
    """True if vLLM reads what we read; no calls are the same as no call."""
    return row.vllm is None or (row.vllm == NO_CALL and row.ours == [])


def differences() -> str:
    """The table of docs/guides/response-schemas.md: rows that are not read alike."""
    words = {MALFORMED: "malformed", NO_CALL: "no call at all", NOT_COMPARED: "not compared"}

    def cell(value: Calls | str) -> str:
        if isinstance(value, str):
            return words[value]
        calls = [c if isinstance(c, str) else f"`{c[0]}({_shown(c[1])})`" for c in value]
        return ", ".join(calls) or "content"

    lines = ["| format | completion | agenttrain | vLLM |", "|---|---|---|---|"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in CORPUS:
        if not read_alike(row):
            assert row.vllm is not None
            key = (row.what.replace("|", "\\|"), cell(row.ours), cell(row.vllm))
            alike.setdefault(key, []).append(f"`{row.format}`")
    lines += [
        f"| {', '.join(formats)} | {what} | {ours} | {vllm} |"
        for (what, ours, vllm), formats in alike.items()
    ]
    return "\n".join(lines) + "\n"


def _shown(arguments: Any) -> str:
    if isinstance(arguments, str):
        return repr(arguments)
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


if __name__ == "__main__":
    print(differences())
