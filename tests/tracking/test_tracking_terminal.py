"""What a person sees in the terminal: progress and the report at the end."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tracking_rollouts import call, decode, new, say, three

from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.console import ConsoleProgress, one_line, printable
from agenttrain.tracking.metrics import Estimate, wilson
from agenttrain.tracking.report import before_after, print_report, rollout_text
from agenttrain.tracking.rollouts import rollout_record
from agenttrain.tracking.run_folder import read_summary
from agenttrain.tracking.tracker import Tracker
from agenttrain.types import StopReason, ToolError

METRICS = {"reward": 0.25, "success": 0.24, "tools/call_frequency": 1.94, "tokens_per_s": 5210.4}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=80, highlight=False), out


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def test_logs_get_plain_lines_every_few_steps():
    console, out = plain()
    with ConsoleProgress(40, console=console) as progress:
        for step in range(1, 41):
            progress.phase("rollout")
            progress.update(step, METRICS)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{step}/40" for step in (1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40)
    ]
    shown = "reward 0.25  success 0.24  calls 1.9  tok/s 5210"
    assert re.fullmatch(rf"step 4/40  {shown}  eta \d+:\d\d", lines[1])


def test_plain_lines_also_in_a_terminal_when_asked_for():
    console, out = terminal()
    with ConsoleProgress(2, live=False, console=console) as progress:
        progress.update(1, METRICS)
    assert "\x1b[" not in out.getvalue() and "step 1/2" in out.getvalue()


def test_the_live_line_fits_80_columns_and_shows_everything():
    console, out = terminal()
    with ConsoleProgress(1000, console=console) as progress:
        progress.phase("rollout")
        progress.update(999, METRICS)
    frames = [ESCAPE.sub("", frame) for frame in re.split(r"[\r\n]", out.getvalue())]
    assert max(map(len, frames)) <= 80
    for part in ("rollout", "999/1000", "reward 0.25", "success 0.24", "calls 1.9", "tok/s 5210"):
        assert part in frames[-2] + frames[-1]


def test_rollouts_of_a_long_phase_are_counted_in_the_live_line(monkeypatch):
    now = [100.0]
    console, out = terminal()
    with ConsoleProgress(1000, console=console) as progress:
        monkeypatch.setattr("agenttrain.tracking.console.time.monotonic", lambda: now[0])
        progress.update(999, METRICS)
        progress.phase("evaluation step-999")
        progress.rollouts(120, 400)
        quick = out.getvalue()
        now[0] += 6.0
        progress.rollouts(240, 400)
    frames = [ESCAPE.sub("", frame) for frame in re.split(r"[\r\n]", out.getvalue())]
    assert "rollouts" not in quick
    assert max(map(len, frames)) <= 80
    assert "evaluation step-999" in frames[-2] + frames[-1]
    assert "240/400 rollouts" in frames[-2] + frames[-1]


def test_rollouts_of_a_long_phase_are_counted_in_logs_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("agenttrain.tracking.console.time.monotonic", lambda: now[0])
    console, out = plain()
    with ConsoleProgress(40, console=console) as progress:
        progress.phase("evaluation before")
        for finished in range(1, 401):
            now[0] += 0.125
            progress.rollouts(finished, 400)
        progress.phase("rollout")
        progress.rollouts(1, 96)
    assert out.getvalue().splitlines() == [
        f"evaluation before: {finished} of 400 rollouts" for finished in (120, 240, 360)
    ]


def test_an_exception_passes_and_the_cursor_comes_back():
    console, out = terminal()
    with (
        pytest.raises(RuntimeError, match="out of luck"),
        ConsoleProgress(10, console=console) as progress,
    ):
        progress.update(1, METRICS)
        raise RuntimeError("out of luck")
    shown, hidden = "\x1b[?25h", "\x1b[?25l"
    assert out.getvalue().rindex(shown) > out.getvalue().rindex(hidden)


def test_a_resumed_run_counts_from_its_checkpoint():
    console, out = plain()
    with ConsoleProgress(100, first_step=73, console=console) as progress:
        progress.update(74, METRICS)
        progress.update(75, METRICS)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["74/100"]


def test_the_estimate_starts_with_the_first_step(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    clock = SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr("agenttrain.tracking.console.time", clock)
    console, out = plain()
    with ConsoleProgress(4, console=console) as progress:
        now.seconds = 1000.0  # an evaluation
        progress.begin()
        now.seconds = 1010.0
        progress.update(1, METRICS)
    # 3 steps are left, of 10 s each
    assert out.getvalue().endswith("eta 0:30\n")


def tracked(tmp_path) -> tuple[Tracker, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    config = TrackerConfig(console=False)
    settings = {"project": "p", "name": "r", "total_steps": 3, "console": console}
    return Tracker(tmp_path, config, **settings), out


def test_an_evaluation_tells_its_reward_even_when_it_is_0(tmp_path):
    tracker, out = tracked(tmp_path)
    with tracker:
        tracker.evaluation("before/sampled", 0, {"reward": 0.0, "pass@1": 0.0, "stop/error": 0.0})
    assert out.getvalue() == "before/sampled: reward 0  pass@1 0\n"


def test_an_evaluation_tells_its_intervals(tmp_path):
    tracker, out = tracked(tmp_path)
    with tracker:
        metrics = {"reward": 0.25, "reward_low": 0.125, "reward_high": 0.5, "stop/error": 0.5}
        tracker.evaluation("step-8/sampled", 8, metrics)
        tracker.best({"step": 8, "reward": 0.25})
    assert out.getvalue() == "step-8/sampled: reward 0.25 [0.125, 0.5]  stop/error 0.5\n"
    assert read_summary(tmp_path)["eval"] == {"best": {"step": 8, "reward": 0.25}}


def test_what_a_step_lost_is_told_once(tmp_path):
    tracker, out = tracked(tmp_path)
    lost = {"data/overlong": 2, "rollout/dropped": 0, "reward": 0.5}
    with tracker:
        tracker.step(1, lost, [])
        tracker.step(2, {**lost, "rollout/dropped": 3, "reward": math.nan}, [])
        tracker.step(3, {**lost, "rollout/dropped": 1, "reward": math.nan}, [])
    logged = [line for line in out.getvalue().splitlines() if "logged once" in line]
    assert [line.split(" (")[0] for line in logged] == [
        "step 1: left out 2 tasks, whose prompts fill the context",
        "step 2: dropped 3 rollouts, which failed or whose ledger is broken",
        "step 2: not one rollout has a reward, so that nothing was trained",
    ]


def test_a_logged_line_is_no_markup():
    console, out = plain()
    ConsoleProgress(1, console=console).log("[red]x[/red] [/nothing]")
    assert out.getvalue() == "[red]x[/red] [/nothing]\n"


@dataclass
class Evaluated:
    label: str
    reward: Estimate
    by_group: dict[str, Estimate] = field(default_factory=dict)
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    by_source: dict[str, Evaluated] = field(default_factory=dict)


def test_before_after_table_at_80_columns():
    console, out = plain()
    before = [Evaluated("sampled", wilson(100, 400), {"count": wilson(30, 100)})]
    after = [
        Evaluated("sampled", wilson(380, 400), {"count": wilson(99, 100)}),
        Evaluated("greedy", wilson(390, 400), {}, {1: wilson(390, 400), 4: wilson(399, 400)}),
    ]
    console.print(before_after(before, after))
    lines = [line for line in out.getvalue().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == [
        ["sampled", "all", "400", "0.25 [0.21, 0.29]", "0.95 [0.92, 0.97]"],
        ["", "count", "100", "0.30 [0.22, 0.40]", "0.99 [0.95, 1.00]"],
        ["greedy", "all", "400", "", "0.97 [0.95, 0.99]"],
        # pass@1 says the same as the reward.
        ["", "all, pass@4", "400", "", "1.00 [0.99, 1.00]"],
    ]
    assert max(map(len, out.getvalue().splitlines())) <= 80


def hostile() -> dict:
    rollout = new(0, 0.0)
    say(rollout, (12, 5, 2))
    call(rollout, 11, error=ToolError.exception)
    say(rollout, (10, 2))
    rollout.stop_reason = StopReason.completed
    return rollout_record(rollout)


def test_each_token_has_the_colour_of_its_origin():
    text = rollout_text(hostile(), decode)
    styled = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styled["<user>What is 3 + 4?</turn><assistant>"] == "dim"
    assert styled["[red]bold[/red][31madd(3, 4)</turn>"] == "green"
    assert styled["<script>alert(1)</script>"] == "dim cyan"
    assert styled["</turn><assistant>"] == "dim"
    assert styled["It is 7.</turn>"] == "green"
    assert styled['✗ exception: add {"a":3}\n'] == "red"


def test_the_report_prints_model_text_as_text():
    console, out = terminal()
    print_report(
        console,
        before=[],
        after=[],
        rollouts=[hostile()],
        decode=decode,
        run_folder=Path("outputs/shop/" + "long/" * 20),
        dashboards=["trackio show --project shop"],
    )
    printed = out.getvalue()
    assert "\x1b[31madd" not in printed
    shown = ESCAPE.sub("", printed)
    assert "[red]bold[/red][31madd(3, 4)" in shown.replace("\n", "")  # wrapped at 80
    # A path that is broken over lines cannot be copied.
    assert f"run        outputs/shop/{'long/' * 20}".rstrip("/") in shown.splitlines()
    assert "dashboard  trackio show --project shop" in shown.splitlines()


def test_long_prompts_and_results_are_shortened():
    rollout = three()[0]
    text = rollout_text(rollout_record(rollout), lambda ids: "x" * 1000 * len(ids))
    prompt, tool = ("…" + "x" * 160, "x" * 400 + "…")
    assert prompt in text.plain and tool in text.plain
    assert "x" * 2000 in text.plain  # two sampled tokens, whole


def test_printable_drops_what_moves_the_cursor_or_hides_text():
    assert printable("a\x1b[2Jb\rc\x07\x9b0m\u202ed\u200be\tf\ng") == "a[2Jbc0mde\tf\ng"
    assert one_line("two\n  lines and more", 12) == "two lines a…"
