"""Exit codes of `agenttrain`: numbers that a shell, a scheduler or a launcher may rely on.

A scheduler puts a job back into its queue on PREEMPTED; `commands/slurm/core.sh` also where a
signal came before the run listened for it.
"""

from __future__ import annotations

DONE = 0
"""The command did what it was asked; a finished run that is resumed has nothing left to do."""
FAILED = 1
"""The run failed; the message and summary.json say why."""
REFUSED = 2
"""The command or its settings cannot be: nothing was begun."""
STALLED = 70
"""The watchdog ended a phase that overran (EX_SOFTWARE of sysexits.h)."""
PREEMPTED = 75
"""SIGTERM, SIGUSR1, SIGHUP: the run has saved its work and goes on with resume= (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ctrl-C, as shells have it."""
TERMINATED = 143
"""A second SIGTERM, or one where nothing can go on (`eval`), as shells have it."""
