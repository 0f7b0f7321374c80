"""Every verb, in the order of the help, and which of them a command line names.

A verb's command is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from agenttrain.commands.verb import (
    SAVED,
    VERBS,
    OneOf,
    Verb,
    add_folder,
    add_json,
    add_new_file,
    positive,
    whole_number,
)
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean

DEFAULT = "train"
"""Verb of a command that names none."""
RUNNING = ("train", "sft", "eval")
"""Verbs whose processes torchrun may start; the others print."""
BEFORE = {
    **dict.fromkeys(("--config-dir", "-cd", "--config-name", "-cn", "--cfg", "-c"), 1),
    **dict.fromkeys(("--package", "-p", "--info", "-i"), 1),
    **dict.fromkeys(("-m", "--multirun", "--resolve", "--hydra-help"), 0),
    **dict.fromkeys(("-h", "--help", "--version"), 0),
}
"""Options that may stand before the verb, and the number of their values."""
LIKE_TRAIN = ("submit", "rehearse", "plan", "data", "tools", "images")
"""Verbs that take the settings of a run, whichever verb will start it; `check` names them too."""
TRUST = {"trust=true": "let the code run that the folder's config.yaml names"}
NEW_FOLDER = {"hydra.run.dir=FOLDER": "name the run folder (outputs/<experiment>/<date>_<time>)"}
AGENT = {"run=FOLDER": "the agent of a run, or of one of its checkpoints; or model.path=…", **TRUST}


def split_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb, `train` when none is given, and the other arguments.

    Example: ``["--config-dir", "mine", "check", "seed=1"]`` -> ``("check", ["--config-dir", "mine",
    "seed=1"])``.
    """
    position = _first_word(arguments)
    if position is None or arguments[position] not in VERBS:
        return DEFAULT, list(arguments)
    return arguments[position], [*arguments[:position], *arguments[position + 1 :]]


def typed_verb(arguments: Sequence[str]) -> str | None:
    """Return the verb, None when none is given; raises ConfigError for a word that is no verb."""
    position = _first_word(arguments)
    word = "" if position is None else arguments[position]
    if word and "=" not in word and word not in VERBS and not word.startswith(("+", "~")):
        raise ConfigError(
            f"{word}: no such verb{did_you_mean(word, VERBS)}; the verbs are {', '.join(VERBS)}, "
            "and settings are written key=value"
        )
    return word if word in VERBS else None


def _first_word(arguments: Sequence[str]) -> int | None:
    """Return the position of the first argument that is neither an option nor an option's value.

    Options of BEFORE may come before the verb. None if there is no such argument, or if an unknown
    option comes before it.
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        name, equals, _ = arguments[position].partition("=")
        if name not in BEFORE:
            return None
        # `--cfg=job` holds its value; the values of `--cfg job` are the next arguments.
        position += 1 if equals else 1 + BEFORE[name]
    return position if position < len(arguments) else None


def _submit(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain submit`."""
    add = parser.add_argument
    text = "train, or sft: they can be resumed"
    verbs = OneOf("train", "sft")
    add("target", nargs="?", default="train", type=verbs, metavar="VERB", help=text)
    add("--dry-run", action="store_true", help="print the job's script and submit nothing")
    text = "leave out the check of tools, template and data on this machine"
    add("--no-check", action="store_true", help=text)


def _check(parser: ArgumentParser) -> None:
    text = "the verb whose settings these are: sft, eval run=…"
    names = ("train", "sft", "eval", "play", "serve", "rescore", "engine-server", *LIKE_TRAIN)
    parser.add_argument("target", nargs="?", type=OneOf(*names), metavar="VERB", help=text)
    text = "with rescore and engine-server: their folder"
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=text)


def _rehearse(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain rehearse`."""
    add = parser.add_argument
    add("--rollouts", type=whole_number(1), default=64, metavar="N", help="rollouts to make (64)")
    text = "sampling speed by which the seconds of a step are computed"
    add("--tokens-per-s", type=positive, metavar="N", help=text)
    add_json(parser)


def _plan(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain plan`."""
    add = parser.add_argument
    for name, text in (
        ("--gpu-memory-gb", "memory of one GPU (that of this machine's)"),
        ("--host-memory-gb", "memory of the machine"),
        ("--server-tokens-per-s", "measured speed of a server"),
        ("--trainer-tokens-per-s", "measured speed of a training GPU"),
    ):
        add(name, type=positive, metavar="N", help=text)
    add("--devices", type=whole_number(1), metavar="N", help="number of GPUs")
    text = "length of a prompt (1024)"
    add("--prompt-tokens", type=whole_number(1), default=1024, metavar="N", help=text)
    add("--cpu", action="store_true", help="plan for the processor alone")
    add_json(parser)


def _images(parser: ArgumentParser) -> None:
    parser.add_argument("--build", action="store_true", help="build those that are missing")
    add_json(parser)


def _data(parser: ArgumentParser) -> None:
    text = "prompts to print (2)"
    parser.add_argument("--rows", type=whole_number(), default=2, metavar="N", help=text)


def _tools(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain tools`."""
    text = "call a tool; several are made one after the other"
    names = ("NAME", "JSON")
    parser.add_argument("--call", nargs=2, action="append", default=[], metavar=names, help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--row",
        type=whole_number(),
        metavar="N",
        help="the tools of this row of data.train, from 0",
    )
    add("--task", metavar="ID", help="the tools of the row with this task_id")
    add_json(parser)


def _templates(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain templates`."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="TOKENIZER", help="its folder, or org/name")
    add("--certify", action="store_true", help="certify the known families here (24 s)")
    add("--revision", metavar="NAME", help="branch, tag or commit of the hub")
    add("--chat-template", metavar="NAME", help="as in chat_template=… (auto)")
    add("--path", type=Path, metavar="FILE", help="as in chat_template.path=…: a Jinja file")
    add("--response-schema", metavar="NAME", help="as in response_schema=… (auto)")
    add("--schema-path", type=Path, metavar="FILE", help="as in response_schema.path=…: YAML")
    add("--no-tools", action="store_true", help="certify training without tools")
    add_json(parser)
    add("--markdown", action="store_true", help="print a Markdown table")


def _settings(parser: ArgumentParser) -> None:
    parser.add_argument("section", nargs="?", metavar="SECTION", help="or a single key")
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    text = "print a JSON schema with which editors complete YAML"
    form.add_argument("--schema", action="store_true", help=text)


def _view(parser: ArgumentParser) -> None:
    add_folder(parser)
    text = "all rollouts of a step (those of the run that are worth a look)"
    parser.add_argument("--step", type=whole_number(), metavar="N", help=text)
    add_new_file(parser, "the page (beside the rollouts)")


def _timeline(parser: ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument("--steps", metavar="A-B", help="these steps, or one: --steps 10 (all)")
    add_new_file(parser, "the page (timeline.html in the run's folder)")


def _replay(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain replay`."""
    add_folder(parser, text="the run's folder, or that of a crash")
    add = parser.add_argument
    add("--step", type=whole_number(), metavar="N", help="the step (the last one)")
    add("--rollout", metavar="ID", help="one rollout of it (all)")
    text = "live: run the tools again instead of reading their recorded replies"
    kinds = ("recorded", "live")
    add("--tools", type=OneOf(*kinds), default="recorded", metavar="|".join(kinds), help=text)
    # The help of trust=true, which other verbs take as a setting: TRUST has this entry alone.
    (text,) = TRUST.values()
    add("--trust", type=OneOf("true", "false"), default="false", metavar="true", help=text)


def _rescore(parser: ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument("--step", type=whole_number(), metavar="N", help="the step (all)")
    add_new_file(parser, "write every rollout's rewards")


def _compare(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain compare`."""
    add_folder(parser, "SWEEP", "the sweep's folder")
    add = parser.add_argument
    add("metrics", nargs="*", metavar="METRIC", help="columns of the table")
    add("--plot", type=Path, metavar="FILE", help="draw the curves: .png, .svg, .pdf or .html")
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")


def _play(parser: ArgumentParser) -> None:
    text = "a checkpoint's step, or best; 0: the model before training answers too"
    parser.add_argument("--step", metavar="N", help=text)
    text = "the row of data.test that the conversation is about (0)"
    parser.add_argument("--row", type=whole_number(), default=0, metavar="N", help=text)


def _serve(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain serve`."""
    add = parser.add_argument
    add("--step", metavar="N", help="a checkpoint's step, or best")
    text = "the address to listen on (127.0.0.1); nothing is authenticated"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "the port (8000); 0 takes a free one"
    add("--port", type=whole_number(0, 65535), default=8000, metavar="N", help=text)
    text = "further names that clients ask by, as behind a proxy; * for all"
    add("--hosts", type=_host_names, default=(), metavar="NAME,…", help=text)
    add("--name", metavar="NAME", help="the model's name for clients (the run folder's)")


def _host_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.strip("[]").split(","))))


def _engine_server(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain engine-server`."""
    add_folder(parser, text="the folder of a run; with --port a new one")
    add = parser.add_argument
    text = "which of servers.count, from 0 (0): a run starts them itself"
    add("--number", type=whole_number(), metavar="N", help=text)
    text = "a server for servers.admin_urls; the folder gets its log"
    add("--port", type=whole_number(1, 65535), metavar="N", help=text)
    add("--host", metavar="ADDRESS", help="the address that it listens on (127.0.0.1)")
    text = "wait for a run with servers.nodes to begin"
    add("--wait", type=whole_number(), metavar="SECONDS", help=text)
    text = "end with this process, as servers do that a run starts"
    add("--parent", type=whole_number(), metavar="PID", help=text)


def _servers(parser: ArgumentParser) -> None:
    add_folder(parser)
    text = "last lines of each log (3)"
    parser.add_argument("--lines", type=whole_number(), default=3, metavar="N", help=text)
    add_json(parser)


def _export(parser: ArgumentParser) -> None:
    """Add the arguments of `agenttrain export`."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="RUN", help="a run, or one of its checkpoints")
    add("--run", type=Path, metavar="FOLDER", help="the same")
    add("--to", metavar="PLACE", help="a folder that does not exist yet, or hub:org/name")
    add("--step", metavar="N", help="a checkpoint's step, or best (the newest)")
    text = "transformers, merged (adapters into the weights) or adapter"
    forms = OneOf("transformers", "adapter", "merged")
    add("--format", type=forms, default="transformers", metavar="NAME", help=text)
    text = "auto (as saved), float32, bfloat16 or float16"
    dtypes = OneOf("auto", "float32", "bfloat16", "float16")
    add("--dtype", type=dtypes, default="auto", metavar="NAME", help=text)
    text = "a new model of the hub is public"
    add("--public", type=OneOf("true", "false"), metavar="true", help=text)


def _completion(parser: ArgumentParser) -> None:
    add = parser.add_argument
    words, text = ("bash", "zsh", "install"), "print the script of this shell, or install it"
    add("what", type=OneOf(*words), metavar="|".join(words), help=text)
    text = "with install: bash or zsh (that of $SHELL)"
    add("shell", nargs="?", type=OneOf("bash", "zsh"), metavar="SHELL", help=text)


def _init(parser: ArgumentParser) -> None:
    parser.add_argument("name", type=Path, metavar="NAME", help="the new folder")


_DECLARED = (
    Verb(
        name="train",
        help="train an agent (when no verb is given)",
        page="start/first-run.md",
        examples={
            "train algorithm=rloo optimizer.lr=1e-4": "the bundled agent with other settings",
            "train resume=outputs/shop/<run> steps=200": "go on with a run, and further",
        },
        command="running:run_verb",
        settings=SAVED | NEW_FOLDER,
        shows=True,
    ),
    Verb(
        name="sft",
        help="imitate conversations with tool calls: the warm start of an agent",
        page="guides/warm-start.md",
        examples={
            "sft experiment=shop_warmstart": "rebuild the bundled agent from demonstrations",
            "sft experiment=calculator_warmstart steps=50": "the calculator's, a short one",
        },
        command="running:run_verb",
        settings=SAVED | NEW_FOLDER,
        shows=True,
    ),
    Verb(
        name="eval",
        help="roll out without updates: reward, pass@k and intervals",
        page="guides/evaluation.md",
        examples={
            "eval run=outputs/shop/<run> eval.samples=4": "four answers to each test question",
            "eval eval.questions=20 eval.greedy=true": "the bundled agent before training",
        },
        command="running:run_verb",
        settings={
            "run=FOLDER": "the agent of this run, from its newest checkpoint; or one checkpoint",
            "model.path=FOLDER": "a model without a run",
            **TRUST,
            "hydra.run.dir=FOLDER": "name the folder of the evaluation (beside the run)",
        },
        shows=True,
    ),
    Verb(
        name="submit",
        help="a run, or with -m a sweep, as a job of SLURM's",
        page="guides/slurm.md",
        examples={
            "submit --dry-run slurm=gpu slurm.time=08:00:00": "the script, without a job",
            "submit -m seed=0,1,2": "a sweep as an array of jobs",
        },
        add_arguments=_submit,
        command="slurm.submit:submit",
        check="slurm.submit:check_job",
        settings=SAVED | NEW_FOLDER,
    ),
    Verb(
        name="check",
        help="compose, check and count; makes no folder and runs no program but an outside agent",
        page="start/your-agent.md",
        examples={
            "check algorithm.group_size=16": "what a step of that run would be",
            "check sft experiment=shop_warmstart": "the same for supervised learning",
            "check -m algorithm=grpo,rloo seed=0,1": "the runs of a sweep",
        },
        add_arguments=_check,
        command="running:check_verb_settings",
        settings={**SAVED, "run=FOLDER": "with eval, play and serve: the saved run"},
        shows=True,
    ),
    Verb(
        name="rehearse",
        help="the run's tools, environments and rewards, tried by a stub instead of a model",
        page="start/rehearse.md",
        examples={
            "rehearse": "the bundled agent",
            "rehearse experiment=calculator --rollouts 16 --tokens-per-s 2000": "a step's cost too",
        },
        add_arguments=_rehearse,
        command="single:rehearse",
        settings=SAVED,
    ),
    Verb(
        name="plan",
        help="memory per GPU, from the model's config.json",
        page="guides/memory-plan.md",
        examples={
            "plan --gpu-memory-gb 80 model.path=my_model": "does it fit?",
            "plan --gpu-memory-gb 80 --devices 8 distributed=fsdp2": "on eight GPUs",
        },
        add_arguments=_plan,
        command="single:plan",
        settings=SAVED,
    ),
    Verb(
        name="data",
        help="the rows as the model will see them, with their tokens",
        page="guides/datasets.md",
        examples={
            "data --rows 5": "five prompts of the bundled agent",
            "data data=file data.path=rows.jsonl data.test_fraction=0.1": "those of your own rows",
        },
        add_arguments=_data,
        command="single:data",
        settings=SAVED,
    ),
    Verb(
        name="images",
        help="the images of the rows' containers, and building them before a run",
        page="guides/containers.md",
        examples={
            "images runtime=podman runtime.image=debian:12": "does this machine have it?",
            "images --build runtime=podman runtime.image=folder runtime.trust=true": (
                "made of a Dockerfile"
            ),
        },
        add_arguments=_images,
        command="single:images",
        settings=SAVED,
    ),
    Verb(
        name="tools",
        help="the tools as the model sees them, and what calls of them return",
        page="guides/tools.md",
        examples={
            "tools experiment=calculator": "schemas, limits and an example of each",
            'tools --call sql \'{"query": "SELECT 1"}\'': "what the model would read",
        },
        add_arguments=_tools,
        command="single:tools",
        settings=SAVED,
    ),
    Verb(
        name="templates",
        help="the table of known chat templates, or the certificate of a tokenizer",
        page="guides/chat-templates.md",
        examples={
            "templates": "every family that is known",
            "templates my_model --chat-template hermes": "the certificate of a tokenizer",
        },
        add_arguments=_templates,
        command="templates:templates",
    ),
    Verb(
        name="settings",
        help="every setting: type, default, meaning",
        page="reference/settings.md",
        examples={
            "settings optimizer": "the settings of a section",
            "settings --schema": "for an editor",
        },
        add_arguments=_settings,
        command="settings:settings",
    ),
    Verb(
        name="view",
        help="rollouts as a page, token by token: alarms, best, worst, or a step's",
        page="operate/viewer.md",
        examples={
            "view outputs/shop/<run>": "the rollouts to look at first",
            "view outputs/shop/<run> --step 10 --to page.html": "all of a step, to another file",
        },
        add_arguments=_view,
        command="records:view",
    ),
    Verb(
        name="timeline",
        help="who sampled, waited, trained, synced and saved when, as a page",
        page="operate/timeline.md",
        examples={
            "timeline outputs/shop/<run>": "all of a run, also of one that goes on",
            "timeline outputs/shop/<run> --steps 10-12 --to page.html": "three steps, elsewhere",
        },
        add_arguments=_timeline,
        command="timeline:timeline",
    ),
    Verb(
        name="replay",
        help="rollouts once more from what was recorded: the same ids?",
        page="operate/replay.md",
        examples={
            "replay outputs/shop/<run> --step 10": "the rollouts of a step",
            "replay outputs/shop/<run>/crash/step-000012": "a crash, to see what failed",
        },
        add_arguments=_replay,
        command="records:replay",
    ),
    Verb(
        name="rescore",
        help="stored rollouts by another reward, beside the old one",
        page="operate/replay.md",
        examples={
            "rescore outputs/shop/<run> reward=[numeric_close]": "as good by another one?",
            "rescore outputs/shop/<run> --step 10 reward=[contains] --to scores.jsonl": "one step",
        },
        add_arguments=_rescore,
        command="records:rescore",
        check="records:check_rescore",
        settings={"reward=[…]": "the other reward", **TRUST},
    ),
    Verb(
        name="compare",
        help="a sweep's configurations against their results",
        page="guides/sweeps.md",
        examples={
            "compare outputs/shop/<sweep>": "the table",
            "compare outputs/shop/<sweep> reward/mean --plot curves.png": "a metric, drawn",
        },
        add_arguments=_compare,
        command="sweep.compare:compare",
    ),
    Verb(
        name="play",
        help="talk to an agent in the terminal, with its tools",
        page="guides/use.md",
        examples={
            "play run=outputs/shop/<run> --step 0": "the agent beside the model before training",
            "play model=shop eval.temperature=0": "a model without a run, greedily",
        },
        add_arguments=_play,
        command="single:play",
        settings=AGENT,
    ),
    Verb(
        name="serve",
        help="an agent behind OpenAI's chat API, its tools with the client",
        page="guides/use.md",
        examples={
            "serve run=outputs/shop/<run>": "the newest checkpoint",
            "serve run=outputs/shop/<run> --step best --port 8080 --name shop": "the best one",
        },
        add_arguments=_serve,
        command="single:serve",
        settings={**AGENT, "engine=vllm": "vLLM's own server, where vLLM is installed"},
    ),
    Verb(
        name="engine-server",
        help="a vLLM server: one of a run, or one for runs elsewhere",
        page="guides/fleet.md",
        examples={
            "engine-server outputs/shop/<run> --number 1": "replace one without restarts left",
            "engine-server /tmp/server --port 8000 model=shop": "one for runs elsewhere",
        },
        add_arguments=_engine_server,
        command="engine_server:engine_server",
        check="engine_server:check_server",
        settings={"trust=true": "start what the folder's plan names, if somebody else wrote it"},
    ),
    Verb(
        name="servers",
        help="the servers of a run: state, weights, load, and the ends of their logs",
        page="guides/fleet.md",
        examples={
            "servers outputs/shop/<run>": "the table",
            "servers outputs/shop/<run> --lines 40": "with more of the logs",
        },
        add_arguments=_servers,
        command="servers:servers",
    ),
    Verb(
        name="export",
        help="a checkpoint as a model folder with a card, or on the hub",
        page="guides/use.md",
        examples={
            "export outputs/shop/<run> --to my_agent": "for transformers, vLLM and others",
            "export outputs/shop/<run> --to small --dtype bfloat16": "in half the bytes",
        },
        add_arguments=_export,
        command="export:export_checkpoint",
    ),
    Verb(
        name="completion",
        help="completion of verbs, groups, settings and files for bash and zsh",
        page="start/install.md",
        examples={
            "completion install": "for the shell of $SHELL",
            "completion bash": "print the script",
        },
        add_arguments=_completion,
        command="completion.command:completion",
    ),
    Verb(
        name="init",
        help="a new agent's folder: tool, reward, rows, YAML, test, skill for coding agents",
        page="start/your-agent.md",
        examples={
            "init my_agent": "make the folder my_agent",
            "init agents/librarian": "a folder in another one",
        },
        add_arguments=_init,
        command="init.command:init",
    ),
    Verb(
        name="doctor",
        help="what this machine can do, and what is missing",
        page="start/install.md",
        examples={
            "doctor": "versions, GPUs, sandbox, SLURM, hub",
            "doctor --json doctor.json": "for a bug report",
        },
        add_arguments=add_json,
        command="doctor:doctor",
    ),
)
DECLARED = {verb.name: verb for verb in _DECLARED}
"""Name -> its verb."""


def parse(arguments: Sequence[str]) -> tuple[Verb, Namespace, list[str]]:
    """Return the verb of a command line, its arguments and the settings; raises ConfigError."""
    typed_verb(arguments)
    name, words = split_verb(arguments)
    verb = DECLARED[name]
    args, settings = verb.parse(words)
    args.verb, args.words, args.command_line = name, words, list(arguments)
    return verb, args, settings
