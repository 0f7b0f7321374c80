"""Starts an agent's program below a keeper, which ends it with everything that it started.

``python -I -S launcher.py <root> <parent> <lifeline> program argument …``: `root` is the folder of
this package, `parent` the run's process, `lifeline` a pipe whose end is the program's end.
"""

import os
import sys


def main() -> None:
    """Fork; be the keeper in one process, the program in the other."""
    root, parent, lifeline, *command = sys.argv[1:]
    sys.path.insert(0, root)
    from agenttrain.utils.keeper import fork_worker

    fork_worker(int(parent), int(lifeline))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


main()
