"""The report at the end of a run: evaluations before and after, sample rollouts, paths."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agenttrain.tracking.console import one_line, printable
from agenttrain.tracking.metrics import Estimate, Scores
from agenttrain.tracking.pictures import decoded_span
from agenttrain.tracking.usage import usage_lines
from agenttrain.utils.json_lines import dumps

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""

ORIGIN_STYLES = {"prompt": "dim", "sampled": "green", "template": "dim", "tool": "dim cyan"}
PROMPT_CHARACTERS = 160
"""Characters shown of a prompt's end, which has the question; it starts with the tools."""
TOOL_CHARACTERS = 400
"""Characters shown of a tool result."""


def before_after(before: Sequence[Scores], after: Sequence[Scores]) -> Table:
    """Return a table of mean rewards with 95 % intervals, up to 80 columns.

    An evaluation's label is the decoding, ``sampled`` or ``greedy``. Each label has a row for all
    questions, one for each group (a value of the column `eval.group_by`), and one for each source
    of a mixture. A cell is blank if there is no such evaluation.
    """
    table = Table(title="Reward on held-out questions (mean, 95% interval)", title_justify="left")
    table.add_column("decoding")
    table.add_column("questions", no_wrap=True)
    table.add_column("n", justify="right")
    table.add_column("before", no_wrap=True)
    table.add_column("after", no_wrap=True, style="bold")
    sides = [{scores.label: scores for scores in side} for side in (before, after)]
    for label in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(label) for side in sides]  # before and after; None: no such evaluation
        present = [scores for scores in pair if scores is not None]
        rewards = [s.reward if s else None for s in pair]
        _add_row(table, label, "all", rewards)
        for k in sorted({k for scores in present for k in scores.pass_at}):
            cells = [s.pass_at.get(k) if s else None for s in pair]
            # Left out if it would repeat the row above, as pass@1 does with rewards of 0 and 1.
            if cells != rewards:
                _add_row(table, "", f"all, pass@{k}", cells)
        for group in sorted({name for scores in present for name in scores.by_group}):
            _add_row(table, "", group, [s.by_group.get(group) if s else None for s in pair])
        for source in dict.fromkeys(name for scores in present for name in scores.by_source):
            _add_source(table, source, [s.by_source.get(source) if s else None for s in pair])
        table.add_section()
    return table


def _add_source(table: Table, source: str, pair: Sequence[Scores | None]) -> None:
    """Add the rows of one source of a mixture: its mean reward, then its groups."""
    cells = [e.reward if e and e.questions else None for e in pair]
    if any(cells):
        _add_row(table, "", source, cells)
    for group in sorted({name for e in pair if e for name in e.by_group}):
        groups = [e.by_group.get(group) if e else None for e in pair]
        _add_row(table, "", f"{source}, {group}", groups)


def _add_row(table: Table, label: str, group: str, cells: Sequence[Estimate | None]) -> None:
    n = max(cell.n for cell in cells if cell is not None)
    values = [Text("" if cell is None else str(cell)) for cell in cells]
    table.add_row(Text(label), Text(one_line(group, 20)), str(n), *values)


def rollout_text(record: Mapping[str, Any], decode: Decode) -> Text:
    """Render a rollout record, each token in the colour of its origin.

    Sampled text is green, all other text dim. Only the end of the prompt and the start of a long
    tool result are shown. Failed calls follow in red.
    """
    text = Text()
    reward = "none" if record["reward"] is None else f"{record['reward']:.2f}"
    head = f"{record['task_id']}  reward {reward}  {record['stop_reason']}"
    text.append(one_line(head, 200) + "\n", style="bold")
    for trajectory in record["trajectories"]:
        if trajectory["parent"] is not None:
            parent, position = trajectory["parent"]
            head = f"{trajectory['role']}, after {position} tokens of trajectory {parent}"
            text.append(f"\n{one_line(head, 200)}\n", style="bold")
        elif (delegation := trajectory.get("delegation")) is not None:
            head = f"{trajectory['role']}, for call {delegation['call_id']}"
            text.append(f"\n{one_line(head, 200)}\n", style="bold")
        for span in trajectory["spans"]:
            origin = span["origin"]
            ids = trajectory["token_ids"][span["start"] : span["end"]]
            content = printable(decoded_span(decode, ids, span.get("images") or ()))
            if origin == "prompt" and len(content) > PROMPT_CHARACTERS:
                # From the first complete line of the end, if it has several.
                tail = content[-PROMPT_CHARACTERS:]
                content = "…\n" + (tail.partition("\n")[2] or tail)
            elif origin == "tool" and len(content) > TOOL_CHARACTERS:
                content = content[:TOOL_CHARACTERS] + "…"
            text.append(content, ORIGIN_STYLES[origin])
    if not text.plain.endswith("\n"):
        text.append("\n")
    for call in record["tool_calls"]:
        if call["error"] is not None:
            line = f"{call['error']}: {call['name'] or '(no name)'} {dumps(call['arguments'])}"
            text.append("✗ " + one_line(line, 200) + "\n", style="red")
    return text


def print_report(
    console: Console,
    *,
    before: Sequence[Scores],
    after: Sequence[Scores],
    rollouts: Iterable[Mapping[str, Any]],
    decode: Decode,
    run_folder: Path,
    dashboards: Sequence[str] = (),
    best: Mapping[str, Any] | None = None,
    usage: Mapping[str, float] | None = None,
) -> None:
    """Print the report; `dashboards` are the commands and addresses that show the run.

    `best` is the best evaluation during the run: ``{"step": 40, "reward": 0.53, …}``. `usage` is
    that of summary.json.
    """
    if before or after:
        console.print(before_after(before, after))
    for number, record in enumerate(rollouts, start=1):
        console.rule(Text(f"rollout {number}: sampled text is green", style="dim"), style="dim")
        console.print(rollout_text(record, decode))
    console.rule(style="dim")
    # soft_wrap: a path or a command broken over lines cannot be copied.
    console.print(Text.assemble("run        ", (str(run_folder), "bold")), soft_wrap=True)
    if best is not None:
        for name, record in {"": best, **best.get("sources", {})}.items():
            text = f"reward {record['reward']:.2f} after step {record['step']}"
            of_source = f" ({name})" if name else ""
            console.print(Text.assemble("best       ", (text, "bold"), of_source), soft_wrap=True)
    for title, text in usage_lines(usage or {}):
        console.print(Text(f"{title:<11}{text}"), soft_wrap=True)
    view = f"agenttrain view {shlex.quote(str(run_folder))}"
    console.print(Text.assemble("tokens     ", (view, "bold")), soft_wrap=True)
    for dashboard in dashboards:
        console.print(Text.assemble("dashboard  ", (dashboard, "bold")), soft_wrap=True)
