"""`agenttrain doctor`: what this machine can do, and what is missing, with the remedy.

torch and the packages of engines are imported in processes of their own: an import that crashes is
an answer too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.text import Text

from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.engines.registry import specs
from agenttrain.runtimes.machines import client_problem
from agenttrain.utils.host_memory import host_memory
from agenttrain.utils.redaction import hide_secrets

GIB = 2**30
IMPORT_S = 180
"""Longest import of torch or another engine: from a network file system it takes minutes."""
HUB_S = 4.0
LOW_GIB = 5.0
"""Free disk below which a warning stands: checkpoints and downloads need gigabytes."""
RUN_GIB = 0.1
"""Free disk without which the default command cannot run."""
TORCH = """
import json, torch, transformers
transformers.AutoModelForCausalLM  # imported only now
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "build": torch.version.cuda or torch.version.hip,
    "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus],
    "threads": torch.get_num_threads(),
}))
"""
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Units of a processor that torch uses, as /proc/cpuinfo names them."""
SLURM = ("sbatch", "srun", "squeue", "sacct")


class State(StrEnum):
    """State of one part of the machine."""

    ok = "ok"
    warn = "warn"
    """It works, with a caveat."""
    missing = "missing"
    """It is not there. The default command does not need it."""
    broken = "broken"
    """The default command cannot run: exit code 1."""


STYLES = {State.ok: "green", State.warn: "yellow", State.missing: "dim", State.broken: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `agenttrain doctor`."""

    part: str
    """Part of the machine: ``torch``, ``GPU``, ``engine=vllm``."""
    state: State
    detail: str
    """Version, number or problem that was found."""
    remedy: str = ""
    """Advice; empty: none is needed or known."""


def doctor(args: Namespace) -> int:
    """Print the report; return exit code 1 if the default command cannot run."""
    console = Console(stderr=args.json == STDOUT)
    with console.status("importing torch …"):
        findings = list(examine())
    width = max(len(finding.part) for finding in findings)
    broken = [finding.part for finding in findings if finding.state is State.broken]
    report = {"ok": not broken, "findings": [asdict(finding) for finding in findings]}
    write_report(report, args.json)
    if args.json == STDOUT:  # the JSON takes the place of the text
        return int(bool(broken))
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:<8}", STYLES[finding.state]), f"{finding.part:<{width}}  "
        )
        console.print(line.append(finding.detail), soft_wrap=True, highlight=False)
        if finding.remedy:
            remedy = Text(f"{'':8}{'':{width}}  {finding.remedy}", "dim")
            console.print(remedy, soft_wrap=True, highlight=False)
    ready = f"`agenttrain` cannot run: {', '.join(broken)}" if broken else "`agenttrain` can run."
    console.print(f"\n{ready}", highlight=False)
    return int(bool(broken))


def examine() -> Iterator[Finding]:
    """Yield the findings, those that the default command needs first."""
    packages = {name: spec.package for name, spec in specs().items()}
    with ThreadPoolExecutor(2) as pool:
        torch_report = pool.submit(_run_python, TORCH)
        imports = {
            name: pool.submit(_run_python, f"import {package}")
            for name, package in packages.items()
            if package is not None and find_spec(package)
        }
        yield from _versions()
        printed, torch_problem = torch_report.result()
        facts = json.loads(printed) if not torch_problem else {"gpus": []}
        yield from _torch(facts, torch_problem)
        yield _processor()
        yield from _disks()
        for name, spec in specs().items():
            problems = list(
                spec.check_machine(spec.settings(name=name), lambda: len(facts["gpus"]))
            )
            state = State.missing if problems else State.ok
            if not problems and name in imports:
                _, import_problem = imports[name].result()
                if import_problem:
                    state = State.warn
                    problems = [f"{packages[name]} {import_problem}; install it again"]
            engine = f"engine={name}"
            detail = "; ".join(text.removeprefix(f"{engine}: ") for text in problems)
            yield Finding(engine, state, detail or "can sample on this machine")
    yield _sandbox()
    yield _containers()
    programs = [name for name in SLURM if shutil.which(name)]
    yield Finding(
        "SLURM",
        State.ok if "sbatch" in programs else State.missing,
        ", ".join(programs) or "no sbatch on PATH",
        "" if "sbatch" in programs else "agenttrain submit needs it: log in to a cluster",
    )
    yield hub()


def _run_python(code: str) -> tuple[str, str]:
    """Run code in a new Python process; return its last printed line and the problem, or ""."""
    # -P keeps files of the current folder from hiding packages.
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return "", f"not imported after {IMPORT_S} s"
    output = process.stdout if process.returncode == 0 else process.stderr
    last_line = (output.strip().splitlines() or [""])[-1]
    if process.returncode == 0:
        return last_line, ""
    return "", f"fails to import: {last_line}"


def _versions() -> Iterator[Finding]:
    """Yield findings about Python, required packages, extras, and packages that conflict."""
    detail = f"{platform.python_version()}, {sys.executable}"
    yield Finding("Python", State.ok, detail)
    try:
        requirements = [Requirement(text) for text in requires("agenttrain") or ()]
    except PackageNotFoundError:
        yield Finding(
            "packages",
            State.warn,
            "agenttrain is not installed, so that versions are not checked",
            "pip install -e . in the checkout",
        )
        return
    extras = sorted({extra for r in requirements for extra in _extras(r)} - {"test", "docs"})
    problems = [problem for r in requirements if _is_required(r) and (problem := _misfit(r))]
    names = ("torch", "transformers", "accelerate", "hydra-core")
    yield Finding(
        "packages",
        State.broken if problems else State.ok,
        "; ".join(problems) or ", ".join(f"{name} {_installed(name)}" for name in names),
        "pip install -U agenttrain" if problems else "",
    )
    for extra in extras:
        packages = [r for r in requirements if extra in _extras(r)]
        is_absent = any(_installed(r.name) is None for r in packages)
        # The line engine=<extra> says that an engine's package is absent; only here is the version
        # of an installed one checked.
        if is_absent and extra in specs():  # the engines by name
            continue
        problems = [problem for r in packages if (problem := _misfit(r))]  # absent ones too
        state = State.warn if problems else State.ok
        if is_absent:
            state = State.missing
        remedy = f"pip install 'agenttrain[{extra}]'"
        listed = ", ".join(f"{r.name} {_installed(r.name)}" for r in packages)
        yield Finding(
            f"[{extra}]", state, "; ".join(problems) or listed, remedy if problems else ""
        )
    yield from _conflicts(requirements)


def _conflicts(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    """Yield packages that ask for another version of an installed one, as an engine does of torch.

    trl is not a requirement, but often in the same environment.
    """
    for name in dict.fromkeys([*(r.name for r in requirements), "trl"]):
        if _installed(name) is None:
            continue
        for text in requires(name) or ():
            try:
                limit = Requirement(text)
            except InvalidRequirement:
                continue
            if not _is_required(limit) or _installed(limit.name) is None:
                continue
            if (problem := _misfit(limit)) is not None:
                yield Finding(
                    name,
                    State.warn,
                    f"{name} {_installed(name)} asks for another version: {problem}",
                    "install one of them into an environment of its own",
                )


def _is_required(requirement: Requirement) -> bool:
    """Return True if the requirement holds on this machine without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _extras(requirement: Requirement) -> list[str]:
    """Return the extras to which a requirement belongs: ``…; extra == 'mcp'`` -> ``["mcp"]``."""
    marker = str(requirement.marker or "")
    return [part.split('"')[1] for part in marker.split(" or ") if part.startswith("extra ==")]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _misfit(requirement: Requirement) -> str | None:
    """Return the problem of the package that a requirement names; None if it fits."""
    installed = _installed(requirement.name)
    if installed is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} {installed} is outside {requirement.specifier}"


def _torch(facts: Mapping[str, Any], problem: str) -> Iterator[Finding]:
    """Yield findings about torch and GPUs from the output of TORCH, or from its `problem`."""
    if problem:
        remedy = "install torch again, for this machine: https://pytorch.org/get-started"
        yield Finding("torch", State.broken, problem, remedy)
        return
    build = f"built for CUDA or ROCm {facts['build']}" if facts["build"] else "a build without GPUs"
    yield Finding("torch", State.ok, f"{facts['version']}, {build}; threads: {facts['threads']}")
    gpus = [f"{name} ({memory / GIB:.0f} GiB)" for name, memory in facts["gpus"]]
    driver = shutil.which("nvidia-smi") or Path("/dev/kfd").exists()  # NVIDIA's, or AMD's
    if gpus:
        yield Finding("GPU", State.ok, ", ".join(gpus))
    elif driver:
        yield Finding(
            "GPU",
            State.warn,
            "there is a driver, and torch sees no GPU",
            "install a torch that is built for the driver's version, or see CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding("GPU", State.missing, "none: runs use the processor")


def _processor() -> Finding:
    """Return the finding about cores, vector units and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8") if info.is_file() else ""
    units = [unit for unit in UNITS if f" {unit}" in flags]
    memory = psutil.virtual_memory()
    limit = host_memory() or memory.total  # a container or a job may have less than the machine
    share = f", {limit / GIB:.1f} GiB of it for this process" if limit < memory.total else ""
    low = min(memory.available, limit) < 2 * GIB
    fast = "bfloat16 is fast" if {"avx512_bf16", "amx_bf16"} & set(units) else "float32 is faster"
    return Finding(
        "processor",
        State.warn if low else State.ok,
        f"{cores} cores, {', '.join(units) or platform.machine()} ({fast}), "
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free{share}",
        "end other programs: a run needs 2 GiB or more" if low else "",
    )


def _disks() -> Iterator[Finding]:
    """Yield findings about the folders that are written to: free space and permission."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for part, folder, remedy, needed in (
        ("outputs", Path("outputs").absolute(), "hydra.run.dir=<folder> names another one", True),
        ("hub cache", cache, "HF_HOME=<folder> names another one", False),
    ):
        # The folder may not exist yet: examine the nearest parent that does.
        nearest = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(nearest).free / GIB
        writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        unusable = State.broken if needed else State.warn
        state = State.ok
        if not writable or free < RUN_GIB:
            state = unusable
        elif free < LOW_GIB:
            state = State.warn
        yield Finding(
            part,
            state,
            f"{folder}: {free:.1f} GiB free{'' if writable else ', may not be written'}",
            "" if state is State.ok else remedy,
        )


def _sandbox() -> Finding:
    """Return the finding about the sandbox of `python` and `bash`, which runs a program."""
    from agenttrain.tools.sandbox.pool import usable_backend

    try:
        backend = usable_backend("required")
    except ValueError as error:
        # The error ends with the remedy: "…; it takes Linux 5.14 with user namespaces …".
        problem, _, remedy = str(error).partition("; it takes ")
        return Finding("sandbox", State.missing, problem, f"it takes {remedy}")
    note = "" if shutil.which("bwrap") else "; bubblewrap is not installed"
    return Finding("sandbox", State.ok, f"works by {backend}{note}")


def _containers() -> Finding:
    """Return the finding about containers: the answer of the first client that is installed."""
    for client in ("podman", "docker"):
        if shutil.which(client) is None:
            continue
        problem = client_problem(client)
        if problem is None:
            return Finding("containers", State.ok, f"{client} answers")
        reason, remedy = problem
        return Finding("containers", State.warn, f"{client}: {reason}", remedy)
    return Finding(
        "containers",
        State.missing,
        "neither podman nor docker is installed",
        "for runtime=podman: apt-get install podman runc uidmap",
    )


def hub() -> Finding:
    """Return the finding about the Hugging Face hub."""
    import httpx

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    endpoint = hide_secrets(address)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        detail = f"{endpoint} is not asked: HF_HUB_OFFLINE is set"
        return Finding("hub", State.missing, detail)
    remedy = "models and rows come from folders or the cache; HF_ENDPOINT names a mirror"
    try:
        status = httpx.head(address, timeout=HUB_S, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        # ImportError: a SOCKS proxy without its package.
        detail = f"{endpoint} is not reached: {str(error) or type(error).__name__}"
        return Finding("hub", State.missing, detail, remedy)
    if status >= 500:
        detail = f"{endpoint} answers with status {status}"
        return Finding("hub", State.warn, detail, remedy)
    return Finding("hub", State.ok, f"{endpoint} is reachable")
