"""Exit codes of `agenttrain`: numbers that a shell, a scheduler or a launcher may rely on.

A scheduler puts a job back into its queue on PREEMPTED; `commands/slurm/core.sh` does so too for a
signal that came before the run handled signals.
"""

from __future__ import annotations

DONE = 0
"""The command has finished; so has a resumed run that had nothing left to do."""
FAILED = 1
"""The run failed; the message and summary.json have the reason."""
REFUSED = 2
"""The command or its settings are invalid: nothing was started."""
STALLED = 70
"""The watchdog ended a phase that overran (EX_SOFTWARE of sysexits.h)."""
PREEMPTED = 75
"""SIGTERM, SIGUSR1, SIGHUP: the run has saved its work and goes on with resume= (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ctrl-C, as shells have it."""
TERMINATED = 143
"""A second SIGTERM, or the first of a command without resume= (`eval`), as shells have it."""
