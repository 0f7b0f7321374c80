"""What a run has used so far: tokens, seconds by phase, GPUs and money.

`Usage.add` completes the metrics of a step, `Usage.summary` is `usage` in summary.json, and
`usage_lines` its text on the console.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

PHASES = ("data", "rollout", "train", "sync")
"""Phases of a step whose seconds are metrics: ``time/train_s``."""
WAITED = {"async/idle_s": "engine_idle_s", "async/wait_s": "trainer_wait_s"}
"""Seconds of an asynchronous step's metrics -> their sum in `Usage.summary()`."""
HOUR_S = 3600.0


class Usage:
    """Adds up the metrics of a run's steps, over all its parts if it was resumed.

    Example::

        usage = Usage(gpus=8, gpu_hour=2.5)
        usage.add({"tokens/sampled": 5210.0, "time/rollout_s": 1.5, …})
        usage.summary()  # {"tokens_sampled": 5210.0, "rollout_s": 1.5, "cost": 0.011, …}
    """

    def __init__(
        self,
        *,
        gpus: int = 1,
        gpu_hour: float | None = None,
        earlier_s: float = 0.0,
        rows: Iterable[Mapping[str, float | None]] = (),
        started: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the clock, or take it to have started at `started`.

        `gpu_hour` is the price of a GPU for an hour, in a currency of the user's. A resumed run
        gives the `rows` of its metrics.jsonl, and `earlier_s`, the seconds that its earlier parts
        have recorded when they ended.
        """
        self.gpus = gpus
        """GPUs of the run; without a GPU, its processes."""
        self._gpu_hour, self._clock = gpu_hour, clock
        self._started = clock() if started is None else started
        self._sums: dict[str, float] = {}
        self._steps = 0
        for row in rows:
            self._count(row)
            # Seconds of the whole run until that step. A part that was killed has left no others.
            earlier_s = max(earlier_s, row.get("time/total_s") or 0.0)
        self._earlier_s = earlier_s
        """Seconds of the run before this part of it."""
        self._last_s = earlier_s
        """`seconds` of the run at the last `add`."""

    @property
    def seconds(self) -> float:
        """Seconds of the run until now."""
        return self._earlier_s + self._clock() - self._started

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count a step that has just ended; return the metrics that depend on earlier steps."""
        self._count(metrics)
        now_s = self.seconds
        step_s, self._last_s = now_s - self._last_s, now_s
        totals = {
            f"{name}_total": self._sums[name]
            for name in ("tokens/sampled", "tokens/trained")
            if name in self._sums
        }
        totals |= {"time/step_s": step_s, "time/total_s": now_s}
        if self._gpu_hour is not None:
            totals |= {"cost/step": self._price(step_s), "cost/total": self._price(now_s)}
        return totals

    def summary(self) -> dict[str, float]:
        """Return the run's totals and means, e.g. of `perf/mfu` weighted by seconds of training.

        A figure that no step had is left out. `other_s` are the seconds of no phase: loading,
        evaluations, checkpoints.
        """
        sums, seconds = self._sums, self.seconds
        figures: dict[str, float] = {}
        if self._gpu_hour is not None:
            figures = {"gpus": self.gpus, "gpu_hour": self._gpu_hour, "cost": self._price(seconds)}
        if not self._steps:
            return figures
        for name in ("sampled", "trained", "computed"):
            if f"tokens/{name}" in sums:
                figures[f"tokens_{name}"] = sums[f"tokens/{name}"]
        phases = {phase: sums[name] for phase in PHASES if (name := f"time/{phase}_s") in sums}
        figures |= {f"{phase}_s": value for phase, value in phases.items()}
        figures["other_s"] = max(seconds - sum(phases.values()), 0.0)
        figures |= {figure: sums[name] for name, figure in WAITED.items() if name in sums}
        # Means weighted by seconds: `_count` adds up value x seconds, and the seconds as `…_of`.
        if "idle" in sums:
            figures["rollout_idle"] = sums["idle"] / sums["idle_of"]
        if "mfu" in sums:
            figures["mfu"] = sums["mfu"] / sums["mfu_of"]
        if "gpu_tokens" in sums:
            figures["tokens_per_s_gpu"] = sums["gpu_tokens"] / sums["gpu_tokens_of"]
        if "perf/peak_gb" in sums:
            figures["peak_gb"] = sums["perf/peak_gb"]
        return figures

    def _price(self, seconds: float) -> float:
        assert self._gpu_hour is not None
        return self._gpu_hour * self.gpus * seconds / HOUR_S

    def _count(self, metrics: Mapping[str, float | None]) -> None:
        """Add a step to the sums."""
        measured = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._steps += 1
        for name in ("tokens/sampled", "tokens/trained", "tokens/computed", *WAITED):
            self._add(name, measured.get(name))
        in_phases = {phase: measured.get(f"time/{phase}_s") for phase in PHASES}
        for phase, value in in_phases.items():
            self._add(f"time/{phase}_s", value)
        # Means over steps are weighted by seconds: `_sums["mfu"]` adds up value x seconds, and
        # `_sums["mfu_of"]` the seconds.
        weights = {
            ("idle", "idle/rollout"): in_phases["rollout"],
            ("mfu", "perf/mfu"): in_phases["train"],
            ("gpu_tokens", "perf/tokens_per_s_gpu"): sum(v for v in in_phases.values() if v),
        }
        for (sum_name, name), weight in weights.items():
            if weight and name in measured:
                self._add(sum_name, measured[name] * weight)
                self._add(f"{sum_name}_of", weight)
        if (peak_gb := measured.get("perf/peak_gb")) is not None:
            self._sums["perf/peak_gb"] = max(peak_gb, self._sums.get("perf/peak_gb", 0.0))

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self._sums[name] = self._sums.get(name, 0.0) + value


def usage_lines(usage: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield title and text of the lines about `Usage.summary()`.

    Example: ``("time", "rollout 62% (engine idle 14%), train 30%, sync 1%, other 7%")``, and with
    `gpu_hour`, the price of a GPU for an hour, ``("cost", "12.40: 8 x 2.5 an hour")``.
    """
    # The phases and `other` add up to the run's time.
    names = [name for name in (*PHASES, "other") if f"{name}_s" in usage]
    total_s = sum(usage[f"{name}_s"] for name in names)
    if total_s:
        shares = {name: f"{name} {usage[f'{name}_s'] / total_s:.0%}" for name in names}
        if "rollout_idle" in usage:
            shares["rollout"] += f" (engine idle {usage['rollout_idle']:.0%})"
        # Waits of an asynchronous run overlap with its phases: they are listed beside them.
        waits = [text.format(usage[n] / total_s) for n, text in WAITS.items() if n in usage]
        yield "time", ", ".join([*shares.values(), *waits])
    tokens = [text.format(usage[name]) for name, text in TOKENS.items() if name in usage]
    if tokens:
        yield "usage", ", ".join(tokens)
    speed = [text.format(usage[name]) for name, text in SPEED.items() if name in usage]
    if speed:
        yield "speed", ", ".join(speed)
    if "cost" in usage:
        yield "cost", f"{usage['cost']:,.2f}: {usage['gpus']:.0f} x {usage['gpu_hour']:g} an hour"


TOKENS = {
    "tokens_sampled": "{:,.0f} tokens sampled",
    "tokens_trained": "{:,.0f} tokens trained",
}
WAITS = {
    "engine_idle_s": "engine idle {:.0%}",
    "trainer_wait_s": "trainer waiting {:.0%}",
}
SPEED = {
    "mfu": "MFU {:.3f}",
    "tokens_per_s_gpu": "{:,.0f} tokens/s and GPU",
    "peak_gb": "{:.1f} GB at most",
}
"""Figures of `Usage.summary()` -> how they are shown."""
