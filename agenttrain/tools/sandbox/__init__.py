"""Processes that run a model's code, each rollout's in namespaces of its own.

What it may use: `agenttrain/tools/sandbox/config.py`.

    tool.py              the tools `python` and `bash`
    outside_process.py   outside: one sandbox's process, its command, from start to end
    session.py           outside: one call, its output and its time
    pool.py              outside: a sandbox per rollout, shared by `python` and `bash`
    inside_setup.py      inside: namespaces and files, then limits and filter, then `init.py`
    confine.py           inside: resource limits and the loss of every privilege
    seccomp.py           inside: the system calls that are refused
    system.py            inside: the system calls that Python lacks
    init.py              inside: the first process; starts workers, watches memory, ends all
    repl.py              inside: the worker of `python`

What runs inside imports the standard library only.
"""
