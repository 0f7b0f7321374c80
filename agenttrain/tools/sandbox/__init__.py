"""Sandboxes for a model's code: each rollout's processes run in namespaces of their own.

Agents' programs are confined by the same modules (`agents/sandbox.py`). The limits of the tools are
settings in `agenttrain/tools/sandbox/config.py`.

    tool.py              the tools `python` and `bash`
    outside_process.py   outside: the process of one sandbox, from start to end
    session.py           outside: one call, its output and its time
    pool.py              outside: a sandbox per rollout, shared by `python` and `bash`
    inside_setup.py      inside: namespaces, then `confine.py`, then `init.py`
    confine.py           inside: files, limits and filter, and dropping all privileges
    root.py              inside: the file system that the code sees
    seccomp.py           inside: the system calls that are refused
    system.py            inside: system calls that Python lacks
    init.py              inside: the first process; starts workers, watches memory, ends them
    repl.py              inside: the worker of `python`

Modules that run inside import the standard library only.
"""
