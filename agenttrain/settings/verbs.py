"""Verbs of the command line: the entries of help, of the reference page and of completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb, as `agenttrain --help` and `agenttrain <verb> --help` describe it."""

    does: str
    """One line, without the verb itself."""
    usage: str
    """Words behind the verb: ``<run folder> [step=N] [to=FILE]``."""
    examples: Mapping[str, str]
    """Words behind `agenttrain`, mapped to what they are for; `<run>` stands for a run's name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The verb's own words, ``step=N`` or ``--rows N``, mapped to their meanings."""
    arguments: tuple[str, ...] = ()
    """Words that completion offers behind the verb. It offers files too unless there are some."""
    settings: bool = True
    """True: it takes settings and options of groups too."""
    page: str = ""
    """Page of docs/ about it."""


SAVED = {
    "resume=FOLDER": "go on with the run in this folder, to the same bits",
    "trust=true": "let the code run that the folder's config.yaml names",
}
RUNNING = {
    **SAVED,
    "hydra.run.dir=FOLDER": "name the run folder (outputs/<experiment>/<date>_<time>)",
    "-m": "a sweep: one run for each combination of the values, seed=1,2",
}
VERBS: dict[str, Verb] = {
    "train": Verb(
        does="train an agent (when no verb is given)",
        usage="[key=value …]",
        options=RUNNING,
        examples={
            "train algorithm=rloo optimizer.lr=1e-4": "the bundled agent with other settings",
            "train resume=outputs/shop/<run> steps=200": "go on with a run, and further",
        },
        page="start/first-run.md",
    ),
    "sft": Verb(
        does="imitate conversations with tool calls: the warm start of an agent",
        usage="[key=value …]",
        options=RUNNING,
        examples={
            "sft experiment=shop_warmstart": "rebuild the bundled agent from demonstrations",
            "sft experiment=calculator_warmstart steps=50": "the calculator's, a short one",
        },
        page="guides/warm-start.md",
    ),
    "eval": Verb(
        does="roll out without updates: reward, pass@k and intervals",
        usage="run=<run or checkpoint folder> | model.path=<folder> [key=value …]",
        options={
            "run=FOLDER": "the agent of this run, from its newest checkpoint; or one checkpoint",
            "trust=true": "let the code run that the folder's config.yaml names",
            "hydra.run.dir=FOLDER": "name the folder of the evaluation (beside the run)",
            "-m": "a sweep: one evaluation for each combination of the values",
        },
        examples={
            "eval run=outputs/shop/<run> eval.samples=4": "four answers to each test question",
            "eval eval.questions=20 eval.greedy=true": "the bundled agent before training",
        },
        page="guides/evaluation.md",
    ),
    "submit": Verb(
        does="a run, or with -m a sweep, as a job of SLURM's",
        usage="[train|sft] [--dry-run] [--no-check] [key=value …]",
        options={
            "--dry-run": "print the job's script and submit nothing",
            "--no-check": "leave out the check of tools, template and data on this machine",
            **RUNNING,
        },
        examples={
            "submit --dry-run slurm=gpu slurm.time=08:00:00": "the script, without a job",
            "submit -m seed=0,1,2": "a sweep as an array of jobs",
        },
        arguments=("train", "sft"),
        page="guides/slurm.md",
    ),
    "check": Verb(
        does="compose, check and count; makes no folder and runs no program but an outside agent",
        usage="[key=value …]",
        options={**SAVED, "-m": "check every run of a sweep"},
        examples={
            "check algorithm.group_size=16": "what a step of that run would be",
            "check -m algorithm=grpo,rloo seed=0,1": "the runs of a sweep",
        },
        page="start/your-agent.md",
    ),
    "rehearse": Verb(
        does="the run's tools, environments and rewards, tried by a stub instead of a model",
        usage="[rollouts=64] [tokens_per_s=N] [json=FILE] [key=value …]",
        options={
            "rollouts=N": "rollouts to make (64)",
            "tokens_per_s=N": "sampling speed by which the seconds of a step are computed",
            "json=FILE": "write the report to a file too",
        },
        examples={
            "rehearse": "the bundled agent",
            "rehearse experiment=calculator rollouts=16 tokens_per_s=2000": "a step's cost too",
        },
        page="start/rehearse.md",
    ),
    "plan": Verb(
        does="memory per GPU, from the model's config.json",
        usage="[--gpu-memory-gb N] [--devices N] [key=value …]",
        options={
            "--gpu-memory-gb N": "memory of one GPU (that of this machine's)",
            "--host-memory-gb N": "memory of the machine",
            "--devices N": "number of GPUs",
            "--prompt-tokens N": "length of a prompt",
            "--server-tokens-per-s N": "measured speed of a server",
            "--trainer-tokens-per-s N": "measured speed of a training GPU",
            "--cpu": "plan for the processor alone",
            "--json": "print JSON",
        },
        examples={
            "plan --gpu-memory-gb 80 model.path=my_model": "does it fit?",
            "plan --gpu-memory-gb 80 --devices 8 distributed=fsdp2": "on eight GPUs",
        },
        page="guides/memory-plan.md",
    ),
    "data": Verb(
        does="the rows as the model will see them, with their tokens",
        usage="[--rows N] [key=value …]",
        options={"--rows N": "prompts to print (2)"},
        examples={
            "data --rows 5": "five prompts of the bundled agent",
            "data data=file data.path=rows.jsonl data.test_fraction=0.1": "those of your own rows",
        },
        page="guides/datasets.md",
    ),
    "tools": Verb(
        does="the tools as the model sees them, and what calls of them return",
        usage="[--call NAME JSON] [--row N | --task ID] [--json] [key=value …]",
        options={
            "--call NAME JSON": "call a tool; several are made one after the other",
            "--row N": "the tools of this row of data.train, from 0",
            "--task ID": "the tools of the row with this task_id",
            "--json": "print JSON",
        },
        examples={
            "tools experiment=calculator": "schemas, limits and an example of each",
            """tools --call sql '{"query": "SELECT 1"}'""": "what the model would read",
        },
        page="guides/tools.md",
    ),
    "templates": Verb(
        does="the table of known chat templates, or the certificate of a tokenizer",
        usage="[tokenizer folder or org/name] [--chat-template NAME] [--certify] [--json FILE]",
        options={
            "--certify": "certify the known families here (24 s), not as shipped",
            "--revision NAME": "branch, tag or commit of the hub",
            "--chat-template NAME": "as in chat_template=… (auto)",
            "--path FILE": "as in chat_template.path=…: a Jinja file",
            "--response-schema NAME": "as in response_schema=… (auto)",
            "--schema-path FILE": "as in response_schema.path=…: YAML",
            "--no-tools": "certify training without tools",
            "--json FILE": "write the result to a file",
            "--markdown": "print a Markdown table",
        },
        examples={
            "templates": "every family that is known",
            "templates my_model --chat-template hermes": "the certificate of a tokenizer",
        },
        settings=False,
        page="guides/chat-templates.md",
    ),
    "settings": Verb(
        does="every setting: type, default, meaning",
        usage="[section or key] [--json | --schema]",
        options={
            "--json": "print JSON",
            "--schema": "print a JSON schema with which editors complete YAML",
        },
        examples={
            "settings optimizer": "the settings of a section",
            "settings --schema": "for an editor",
        },
        settings=False,
        page="reference/settings.md",
    ),
    "view": Verb(
        does="a step's rollouts as a page, token by token",
        usage="<run folder> [step=N] [to=FILE]",
        options={
            "step=N": "the step (the last one)",
            "to=FILE": "the page (beside the rollouts)",
        },
        examples={
            "view outputs/shop/<run>": "the last step",
            "view outputs/shop/<run> step=10 to=page.html": "another step, to another file",
        },
        settings=False,
        page="operate/viewer.md",
    ),
    "timeline": Verb(
        does="who sampled, waited, trained, synced and saved when, as a page",
        usage="<run folder> [steps=A-B] [to=FILE]",
        options={
            "steps=A-B": "these steps, or one: steps=10 (all)",
            "to=FILE": "the page (timeline.html in the run's folder)",
        },
        examples={
            "timeline outputs/shop/<run>": "all of a run, also of one that goes on",
            "timeline outputs/shop/<run> steps=10-12 to=page.html": "three steps, to another file",
        },
        settings=False,
        page="operate/timeline.md",
    ),
    "replay": Verb(
        does="rollouts once more from what was recorded: the same ids?",
        usage="<run folder> [step=N] [rollout=ID] [tools=recorded|live] [trust=true]",
        options={
            "step=N": "the step (the last one)",
            "rollout=ID": "one rollout of it (all)",
            "tools=live": "run the tools again instead of reading their recorded replies",
            "trust=true": "let the code run that the folder's config.yaml names",
        },
        examples={
            "replay outputs/shop/<run> step=10": "the rollouts of a step",
            "replay outputs/shop/<run>/crash/step-000012": "a crash, to see what failed",
        },
        settings=False,
        page="operate/replay.md",
    ),
    "rescore": Verb(
        does="stored rollouts by another reward, beside the old one",
        usage="<run folder> [step=N] reward=[…] [to=FILE] [trust=true]",
        options={
            "step=N": "the step (all)",
            "to=FILE": "write every rollout's rewards",
            "trust=true": "let the code run that the folder's config.yaml names",
        },
        examples={
            "rescore outputs/shop/<run> reward=[numeric_close]": "would it have been as good?",
            "rescore outputs/shop/<run> step=10 reward=[contains] to=scores.jsonl": "one step",
        },
        page="operate/replay.md",
    ),
    "compare": Verb(
        does="a sweep's configurations against their results",
        usage="<sweep folder> [metric …] [--plot FILE] [--json | --markdown]",
        options={
            "--plot FILE": "draw the curves: .png, .svg or .pdf",
            "--json": "print JSON",
            "--markdown": "print a Markdown table",
        },
        examples={
            "compare outputs/shop/<sweep>": "the table",
            "compare outputs/shop/<sweep> reward/mean --plot curves.png": "a metric, drawn",
        },
        settings=False,
        page="guides/sweeps.md",
    ),
    "play": Verb(
        does="talk to an agent in the terminal, with its tools",
        usage="run=<run or checkpoint folder> [step=N|0|best] [row=N] [key=value …]",
        options={
            "run=FOLDER": "the agent of a run, or of one of its checkpoints; or model.path=…",
            "step=N": "a checkpoint's step, or best; 0: the model before training answers too",
            "row=N": "the row of data.test that the conversation is about (0)",
            "trust=true": SAVED["trust=true"],
        },
        examples={
            "play run=outputs/shop/<run> step=0": "the agent beside the model before training",
            "play model=shop eval.temperature=0": "a model without a run, greedily",
        },
        page="guides/use.md",
    ),
    "serve": Verb(
        does="an agent behind OpenAI's chat API, its tools with the client",
        usage="run=<run or checkpoint folder> [step=N|best] [host=…] [port=8000] [name=…]",
        options={
            "run=FOLDER": "the agent of a run, or of one of its checkpoints; or model.path=…",
            "step=N": "a checkpoint's step, or best",
            "host=ADDRESS": "the address to listen on (127.0.0.1); nothing is authenticated",
            "port=N": "the port (8000); 0 takes a free one",
            "hosts=NAME,…": "further names that clients ask by, as behind a proxy; * for all",
            "name=NAME": "the model's name for clients (the run folder's)",
            "engine=vllm": "vLLM's own server, where vLLM is installed",
            "trust=true": SAVED["trust=true"],
        },
        examples={
            "serve run=outputs/shop/<run>": "the newest checkpoint",
            "serve run=outputs/shop/<run> step=best port=8080 name=shop": "the best one",
        },
        page="guides/use.md",
    ),
    "engine-server": Verb(
        does="a vLLM server: one of a run, or one for runs elsewhere",
        usage="<run folder> [number=N] [host=…] | <new folder> port=N [host=…] [key=value …]",
        options={
            "number=N": "which of servers.count, from 0 (0): a run starts them itself",
            "port=N": "a server for servers.admin_urls; the folder gets its log",
            "host=ADDRESS": "the address that it listens on (127.0.0.1)",
            "wait=SECONDS": "wait for a run with servers.nodes to begin",
            "parent=PID": "end with this process, as servers do that a run starts",
            "trust=true": "start what the folder's plan names, if somebody else wrote it",
        },
        examples={
            "engine-server outputs/shop/<run> number=1": "replace one without restarts left",
            "engine-server /tmp/server port=8000 model=shop": "one for runs elsewhere",
        },
        settings=False,
        page="guides/fleet.md",
    ),
    "servers": Verb(
        does="the servers of a run: state, weights, load, and the ends of their logs",
        usage="<run folder> [--lines N] [--json]",
        options={
            "--lines N": "last lines of each log (3)",
            "--json": "print JSON",
        },
        examples={
            "servers outputs/shop/<run>": "the table",
            "servers outputs/shop/<run> --lines 40": "with more of the logs",
        },
        settings=False,
        page="guides/fleet.md",
    ),
    "export": Verb(
        does="a checkpoint as a model folder with a card, or on the hub",
        usage="run=<run or checkpoint folder> to=<new folder|hub:org/name> [format=…] [dtype=…]",
        options={
            "run=FOLDER": "a run, or one of its checkpoints",
            "to=PLACE": "a folder that does not exist yet, or hub:org/name",
            "step=N": "a checkpoint's step, or best (the newest)",
            "format=NAME": "transformers, merged (adapters into the weights) or adapter",
            "dtype=NAME": "auto (as saved), float32, bfloat16 or float16",
            "public=true": "a new model of the hub is public",
        },
        examples={
            "export run=outputs/shop/<run> to=my_agent": "for transformers, vLLM and others",
            "export run=outputs/shop/<run> to=small dtype=bfloat16": "in half the bytes",
        },
        settings=False,
        page="guides/use.md",
    ),
    "completion": Verb(
        does="completion of verbs, groups, settings and files for bash and zsh",
        usage="bash | zsh | install [bash|zsh]",
        examples={
            "completion install": "for the shell of $SHELL",
            "completion bash": "print the script",
        },
        arguments=("bash", "zsh", "install"),
        settings=False,
        page="start/install.md",
    ),
    "init": Verb(
        does="a new folder with the skeleton of an agent: tool, reward, rows, YAML, test",
        usage="<name>",
        examples={
            "init my_agent": "make the folder my_agent",
            "init agents/librarian": "a folder in another one",
        },
        settings=False,
        page="start/your-agent.md",
    ),
    "doctor": Verb(
        does="what this machine can do, and what is missing",
        usage="[json=FILE]",
        options={"json=FILE": "write the report to a file too"},
        examples={
            "doctor": "versions, GPUs, sandbox, SLURM, hub",
            "doctor json=doctor.json": "for a bug report",
        },
        settings=False,
        page="start/install.md",
    ),
}
