"""What a wrong setting is answered with: key, value and remedy, in the words of who typed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from agenttrain.rewards.rubric import build_rubric
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, convert, hydra_session, open_keys
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.settings.messages import ELSEWHERE, REMARKS, setting_keys, suggest_key
from agenttrain.types import ConfigError


def refusal(*overrides: str, source: Source | None = None) -> str:
    """The text of the error that the overrides end in."""
    source = source or Source()
    with pytest.raises(ConfigError) as caught, hydra_session(source):
        validate(compose_run(open_keys(overrides), source).config)
    return str(caught.value)


# Overrides that do not compose, and what the one line that answers them holds.
UNREADABLE = {
    # Unknown names.
    "algorithm.group_sise=4": "unknown key (did you mean 'algorithm.group_size'?)",
    "algoritm=rloo": "unknown key (did you mean 'algorithm'?)",
    "experimant=shop": "unknown key (did you mean 'experiment'?)",
    "lr=1e-4": "unknown key (did you mean 'optimizer.lr'?)",
    "algorithm.lr=1e-4": "unknown key (did you mean 'optimizer.lr'?)",
    "eval.foo=1": "unknown key; the keys of eval are: every, questions",
    "fooo=1": "unknown key; the keys are: model",
    "gradient_checkpointing=true": "(did you mean 'training.gradient_checkpointing'?)",
    "zzz=1": "unknown key; the keys are: model, chat_template",
    "algorithm.zzz=1": "unknown key; the keys of algorithm are: name, group_size",
    "+algorithm.zzz=1": "unknown key; the keys of algorithm are: name, group_size",
    "algorithm.beta=0.3": "algorithm.beta=0.3: is algorithm.kl.beta now",
    "++algorithm.entropy_target=3": "is algorithm.entropy.adaptive.target now",
    "algorithm.credit=gigpo": "is algorithm/credit=gigpo now",
    "algorithm.correction=token": "is algorithm.correction.level now",
    "algorithm.kl=k2": "algorithm.kl=k2: is algorithm.kl.estimator now",
    "algorithm.kl.estimator=k2": "algorithm.kl.beta: has no value; set it: algorithm.kl.beta=",
    "algorithm.kl.betta=0.1": "algorithm.kl.betta=0.1: unknown key (did you mean 'beta'?)",
    "algorithm/objective=vspo": "no such option (did you mean 'vespo'?); the options are: cispo",
    "algorithm/objective=own": "algorithm.objective._target_: has no value; set it: algorithm.obj",
    "algorithm=rlo": "no such option (did you mean 'rloo'?); the options are: bnpo, cispo",
    "model=Qwen/Qwen3-0.6B": "(did you mean 'qwen3-0.6b'?); for this one: model=folder model.path=",
    "model=./my_model": "for this one: model=folder model.path=./my_model;",
    "data=org/rows": "for this one: data=hub data.path=org/rows;",
    "data=rows.jsonl": "for this one: data=file data.path=rows.jsonl data.test_fraction=0.1;",
    "tools=my_tools.find": "for this one: tools=[] tools.find._target_=my_tools.find;",
    "reward=[my.own]": "for this one: reward=[] reward.own._target_=my.own;",
    "chat_template=./a.jinja": "for this one: chat_template=file chat_template.path=./a.jinja;",
    "tools=[sql,final_anser]": "tools=final_anser: no such option (did you mean 'final_answer'?)",
    "hydra.zzz=1": "Hydra has no such key",
    # Wrong types.
    "algorithm.group_size=many": "expected a whole number",
    "checkpoint.every=1.5": "expected a whole number, or null",
    "steps=null": "expected a whole number",
    "optimizer.lr=high": "expected a number",
    "rollout.on_tool_failure=dropp": "expected one of: drop, error (did you mean 'drop'?)",
    "rollout.deterministic=perhaps": "expected true or false",
    "stop_tools=final_answer": "expected a list",
    "algorithm.scale=grup": "expected one of: group, batch, none (did you mean 'group'?)",
    "model.dtype=float16": "expected one of: float32, bfloat16",
    "tracker.wandb.mode=onlin": "expected one of: auto, online, offline",
    "training.mixed_precision=bf17": "expected one of: no, bf16, fp16 (did you mean 'bf16'?)",
    "optimizer.betas=[a,b]": "optimizer.betas.0=a: expected a number",
    "+agent.models.small=frosen": "expected one of [policy, frozen, refuse]",
    "agent.train=mian": "expected one of: all, main (did you mean 'main'?)",
    "agent.on_sampling=ignore": "expected one of: refuse, override",
    "agent.on_failure=zeros": "expected one of: error, zero (did you mean 'zero'?)",
    # What cannot be read, or has several meanings.
    "rloo": "settings are written key=value",
    "model.path=[a": "cannot be read",
    "seed=1,2": "add -m to run one after the other, or write seed=[1,2] for a list",
    "experiment=null": "a group takes an option (calculator, ",
    "+experiment=shop": "write experiment=shop",
    "+steps=5": "+steps=5: the key is there already; write steps=5",
    "+tools.sql.connect=x": "the key is there already; write tools.sql.connect=x",
    "+experiment.x=4": "+experiment.x=4: unknown key",
    # Values of the wrong kind for a group or a section.
    "algorithm/objective=[clip,cispo]": "takes one option; the options are: cispo, clip",
    "algorithm/objective={}": "takes one option; the options are: cispo, clip",
    "algorithm=[grpo,rloo]": "algorithm=[grpo,rloo]: takes one option; the options are: bnpo",
    "engine=[vllm]": "takes one option; the options are: transformers, transformers_small, vllm",
    "engine=[]": "engine=[]: takes one option",
    "engine=5": "engine=5: no such option; the options are: transformers, transformers_small, vllm",
    "tools=3": "tools=3: no such option; the options are: add, bash",
    "tools=[3]": "tools=[3]: 3 is no option; the options are: add, bash",
    "reward=nan": "reward=nan: no such option",
    "tools={a:b}": "tools.a: unknown key; a new one begins with +: +tools.a=…",
    "chat_template.family.x=1": "a new one begins with +: +chat_template.family.x=…",
    "algorithm/objective@foo=cispo": "no group stands at that place; write algorithm/objective=cis",
    "algorithm={}": "leaves its keys as they are; it is a section; set its keys with algorithm.<k",
    "engine={}": "leaves its keys as they are; it is a section",
    "optimizer={}": "leaves its keys as they are; it is a section",
    "algorithm.objective={}": "set its keys with algorithm.objective.<key>=…",
    "tools={}": "leaves its keys as they are; to leave all of it out write tools=[]",
    "algorithm.objective=null": "is a section; choose one with algorithm/objective=cispo|clip|clip",
    "algorithm.objective=3": "is a section; choose one with algorithm/objective=cispo|clip|clip_hi",
    "eval=null": "eval=null: is a section; set its keys with eval.<key>=…",
    "eval=[]": "eval=[]: is a section; set its keys with eval.<key>=…",
    "guards.kl=null": "is a section; set its keys with guards.kl.<key>=…",
    "data.train=null": "is a section; set its keys with data.train.<key>=…",
    "data.map=3": "is a section; set its keys with data.map.<key>=…",
    "chat_template.kwargs=3": "is a section; set its keys with chat_template.kwargs.<key>=…",
    "~data.train": "~data.train: cannot be left out, as every run has it; set its keys with data.t",
    "~algorithm.objective": "cannot be left out, as every run has it; set its keys with algorithm.",
    "stop_tools=[null]": "expected a list of texts",
    "response_schema.lenient=2": "expected true or false",
    "rollout.deterministic=7": "expected true or false",
    "experiment={}": "experiment={}: takes one option; the options are: calculator",
    "tools=null": "a group takes an option (add, bash, calculator, ",
    "data.test={}": "leaves its keys as they are; for no evaluation set eval.questions=0",
    "~tools": "nothing of that name to leave out; to leave all of it out write tools=[]",
    "~zzz": "nothing of that name to leave out",
    "=1": "=1: names no setting; settings are written key=value",
    "+=1": "+=1: names no setting; settings are written key=value",
    "model.path=ü": "put a value with blanks, commas, brackets, = or letters such as ü in quotes",
    "optimizer.lr=${oc.env:NO_SUCH_NAME}": (
        "the interpolation cannot be resolved: Environment variable 'NO_SUCH_NAME' not found"
    ),
    "optimizer.lr=${optimizer.lr}": "cannot be resolved: Recursive interpolation detected",
    "seed=???": "seed: has no value; set it: seed=…",
    "algorithm.kl.beta=${lr}": "'lr' not found",
    # Missing values.
    "model=folder": "model.path: has no value; set it: model.path=…, or choose model=",
    "data=file": "data.train.path=null: has no value; set data.path=…",
    "data=hub": "data.train.path=null: has no value; set data.path=…",
    "reward=format": "reward.format.pattern: has no value; set it: reward.format.pattern=…",
    "~algorithm": "choose algorithm=bnpo|cispo|dapo",
}

# Overrides that compose to what cannot run.
UNUSABLE = {
    # Batch and length arithmetic.
    "algorithm.group_size=1": "at least 2",
    "algorithm.minibatches=5": "does not divide tasks_per_step=12; take one of 1, 2, 3, 4, 6, 12",
    "algorithm.minibatches=50": "take one of 1, 2, 3, 4, 6, 12",
    "rollout.max_turn_tokens=4096": "rollout.max_completion_tokens=2048",
    "engine.max_context=40": "leaves no room for a prompt in engine.max_context=40",
    # Ranges.
    "steps=0": "must be at least 1",
    "steps=100000000000000000000000": "must be below 9223372036854775808",
    "engine.max_rows=100000000000000000000000": "must be below 9223372036854775808",
    "tasks_per_step=-1": "must be at least 1",
    "rollout.max_tool_calls=0": "must be at least 1",
    "rollout.timeout_s=0": "must be more than 0",
    "optimizer.lr=0": "must be more than 0",
    "algorithm.kl.beta=-0.1": "must be 0 or more",
    "algorithm.objective.low=1": "must be below 1",
    "rollout.temperature=0": "must be more than 0",
    "eval.top_p=0": "must be more than 0",
    "eval.top_p=1.1": "must be at most 1",
    "eval.min_p=2": "must be at most 1",
    "checkpoint.keep_best=true": "nothing says which one is the best",
    "tools.sql.timeout_s=-1": "must be more than 0",
    "tools.sql.timeout_s=inf": "must be a finite number",
    "tools.sql.timeout_s=true": "expected a number",
    "tools.sql.concurrency=1.5": "expected a whole number",
    "tools.sql.concurrency=many": "expected a whole number",
    "tools.sql.max_calls=0": "must be at least 1",
    "tools.sql.max_result_tokens=many": "expected a whole number",
    "tools.sql.retries=-1": "must be 0 or more",
    "tools.sql.retry_backoff_s=-1": "must be 0 or more",
    "tools.sql.stop=maybe": "expected true or false",
    "tools.sql.isolation=proces": "one of: thread, process (did you mean 'process'?)",
    "tools.sql.retry_on=builtins.OSError": "expected a list, e.g. [a,b]",
    "tools.sql.retry_on=[builtins.ConectionError]": "(did you mean 'ConnectionError'?)",
    "tools.sql.retry_on=[no_such_pkg.Gone]": "retry_on=no_such_pkg.Gone: there is no module 'no",
    "tools.sql.retry_on=[sqlite3]": "names a module",
    "rollout.max_stuck_calls=-1": "must be 0 or more",
    "rollout.max_loop_lag_s=0": "must be more than 0",
    "reward.exact_match.weight=nan": "must be a finite number",
    "reward.exact_match.weight=heavy": "expected a number",
    "seed=-1": "must be 0 or more",
    "seed=9223372036854775808": "must be below 9223372036854775808",
    "optimizer.lr=inf": "must be a finite number",
    "algorithm.kl.beta=inf": "must be a finite number",
    "algorithm.objective.high=inf": "must be a finite number",
    "rollout.timeout_s=nan": "must be a finite number",
    "optimizer.warmup_steps=26": "the warm-up would not end in steps=26; lower it",
    "optimizer.betas=[0.9]": "must be two numbers",
    "optimizer.betas=[0.9,1]": "optimizer.betas.1=1: must be below 1",
    "optimizer.momentum=0.5": "unknown key of optimizer=adamw; optimizer=muon has it",
    "optimizer.schedule_options.power=2": "not an option of optimizer.schedule=linear",
    "optimizer.schedule=cosine_with_min_lr": "set one of optimizer.schedule_options.min_lr",
    "optimizer.schedule=warmup_stable_decay": "num_decay_steps=null: optimizer.schedule=warmup",
    "model.lora.rank=-1": "must be 0 (no adapters) or more",
    "model.lora.alpha=3": "add model.lora.alpha=32.0, its default, or set a rank",
    "distributed.processes=2": "distributed=single is one process; add distributed=ddp or",
    "distributed.nodes=2": "distributed=single is one process; add distributed=ddp or",
    "distributed.timeout_s=0": "distributed.timeout_s=0.0: must be more than 0",
    "engine.sleep=true": "engine=transformers has no such key; it belongs to engine=vllm",
    "engine.dtype=float16": "engine=transformers has no such key; it belongs to engine=vllm",
    "engine.vllm.slep=true": "engine.vllm.slep=true: unknown key",
    "engine.max_rowz=4": "engine.max_rowz=4: unknown key (did you mean 'engine.max_rows'?)",
    "engine.zzz=4": "unknown key; the keys of engine=transformers are: name, max_context, max_rows",
    "engine.max_rows=0": "engine.max_rows=0: must be at least 1",
    "engine._target_=nowhere.SPEC": "engine._target_=nowhere.SPEC: there is no module 'nowhere'",
    "engine._target_=null": "engine._target_=null: expected a dotted path, e.g. my_pkg.engine.SPEC",
    "engine._target_=3": "engine._target_=3: expected a dotted path",
    "engine._target_={a:1}": "engine._target_={a: 1}: expected a dotted path",
    "engine.name=[vllm]": "engine.name=[vllm]: expected one of: transformers, vllm",
    "engine._target_=json.dumps": "is no EngineSpec; name the object that is one",
    "weight_sync.mode=in_flight": "has no effect without engine=vllm",
    "servers.count=2": "engine=transformers has no servers; set engine=vllm_server",
    "servers.gpus=[1]": "engine=transformers has no servers; set engine=vllm_server",
    "servers.gpus=[1,1]": "names a GPU twice",
    "weight_sync.folder=/tmp/x": "engine=transformers has no servers; set engine=vllm_server",
    "servers.restarts=-1": "servers.restarts=-1: must be 0 or more",
    "servers.count=0": "must be at least 1",
    "async_training.max_staleness=-1": "must be 0 or more",
    "servers.nodes=2": "servers.nodes=2: engine=transformers has no servers; set engine=vllm",
    "servers.url=http://a:1": "name its servers: servers.admin_urls=[http://a:1] if it is a server",
    "servers.admin_urls=[a:1]": "servers.admin_urls=a:1: expected an address, e.g. http://10.0.0.5",
    "servers.admin_urls=[http://a,http://a]": "names a server twice",
    "weight_sync.transport=nccl": "engine=transformers has no servers; set engine=vllm_server",
    "weight_sync.transport=lora": "engine=transformers has no servers; set engine=vllm_server",
    "rollout.structured_calls=true": "engine=transformers has no grammars; set engine=vllm",
    "weight_sync.tolerance=0.1": "engine=transformers samples from the policy itself",
    # Outside agents.
    "agent.command=x": "agent.command: has no effect with agent=none; add agent=endpoint",
    "agent._target_=my_pkg.solve": "has no effect with agent=none; add agent=endpoint",
    "agent.command='a \"b'": "No closing quotation; quote the parts as in a shell, or write a list",
    "agent.command=3": "expected a list of texts, or one text as in a shell",
    "agent._target_=solve": "agent._target_=solve: expected a dotted path, my_pkg.solve",
    "agent.memory_mb=100": "agent.memory_mb=100: only a sandbox has this limit; add agent.s",
    "agent.reuse=true": "only processes are reused; add agent.command=[…]",
    "agent.exit_code_reward=true": "needs a process for each rollout; add agent.command=[…]",
    "agent.timeout_s=0": "must be more than 0",
    "agent.max_requests=0": "must be at least 1",
    "agent.concurrency=0": "must be at least 1",
    "agent.port=65536": "must be at most 65535",
    # Fixed names.
    "engine.name=transformer": "transformers, vllm, vllm_server (did you mean 'transformers'?)",
    "tracker.rollouts=al": "expected all, none, or a whole number (did you mean 'all'?)",
    # Combinations without a meaning.
    "eval.tools=[sqll]": "eval.tools=[sqll]: is not a tool of this run (did you mean 'sql'?)",
    "stop_tools=[final_anser]": "is not a tool of this run (did you mean 'final_answer'?)",
    "algorithm.kl.place=reward": "algorithm.kl.beta: has no value; set it",
    "algorithm.objective.tau_pos=2": (
        "algorithm.objective.tau_pos=2: no key of clip; sapo has it: algorithm/objective=sapo; its "
        "keys are: low, high, dual, ratio"
    ),
    "algorithm.objective.hihg=1": "no key of clip (did you mean 'high'?)",
    "algorithm.objective.ratio=tokn": "expected one of: token, sequence_mean, sequence_sum (did",
    "algorithm.objective.dual=1.1": "must be above 1 + algorithm.objective.high=1.2: it bounds",
    "algorithm.objective.name=clp": "no such objective (did you mean 'clip'?); they are: cispo",
    "algorithm.objective.name=[clip]": "algorithm.objective.name=[clip]: no such objective",
    "algorithm.objective.name=vespo": "algorithm.objective.low=0.2: no key of vespo; clip and geom",
    "algorithm.objective=vespo": "is a section; choose one with algorithm/objective=vespo",
    "algorithm.objective._target_=my_pkg.band": (
        "has no effect beside algorithm.objective.name=clip; add algorithm/objective=own, which "
        "has no name, or remove name from your file"
    ),
    "chat_template.path=x.jinja": "not used with chat_template.name=auto; add chat_template=file",
    "response_schema.path=x.yaml": "add response_schema=file",
    "chat_template.name=file": "which one? add chat_template.path=…",
    "data.path=rows.jsonl": "is not used by these rows; add data=file",
    "data.subset=main": "is not used by these rows; add data=hub",
    "data.test_fraction=0.1": "data.test has rows of its own; leave it out",
    "data.test_fraction=1.5": "must be below 1",
    "data.test_seed=3": "has no effect without data.test_fraction",
    "reward={}": "choose one: reward=[exact_match]",
    # Components.
    "model.path=/no/such/model": "there is no such folder",
    "model.path=bundled:shp": "no such bundled model (did you mean 'shop'?)",
    "tools.sq.timeout_s=3": "has no _target_ (did you mean 'sql'?)",
    "tools.sql=3": "tools.sql=3: has no _target_",
    "tools.sql.timout_s=3": "has no such argument (did you mean 'timeout_s'?)",
    "tools.sql.max_row=3": "has no such argument (did you mean 'max_rows'?)",
    "data.train.splt=tune": "has no such argument (did you mean 'split'?)",
    "tools.sql._target_=no_such_pkg.tool": "there is no module 'no_such_pkg'; install",
    "tools.sql._target_=agenttrain.tools.builtin.sql.Sqll": "has no 'Sqll' (did you mean 'Sql'?)",
    "reward.exact_match._target_=agenttrain.rewards.builtin.answers": "names a module",
    "data.test._target_=7": "expected a dotted path",
    "data.test.split=typo": "data.test.split='typo': must be one of train",
}


@pytest.mark.parametrize(("override", "expected"), UNREADABLE.items())
def test_what_does_not_compose(override: str, expected: str) -> None:
    text = refusal(override)
    assert expected in text
    assert override.lstrip("+~").partition("=")[0].partition("[")[0].split(".")[0] in text


@pytest.fixture(scope="module")
def sound() -> DictConfig:
    """Settings that can run; composing them once for the whole table saves seconds."""
    with hydra_session(Source()):
        composed = compose_run(["tasks_per_step=12", "algorithm.kl.beta=0"], Source())
    validate(composed.config)
    return OmegaConf.create(composed.plain)


@pytest.mark.parametrize(("override", "expected"), UNUSABLE.items())
def test_what_cannot_run(sound: DictConfig, override: str, expected: str) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    changed = sound.copy()
    OmegaConf.update(changed, parsed.key_or_group, parsed.value(), merge=False, force_add=True)
    with pytest.raises(ConfigError) as caught:
        composed = convert(changed)
        validate(composed.config)
        admit_engine(composed)
    (line,) = [line for line in str(caught.value).splitlines() if expected in line]
    assert ".".join(parsed.key_or_group.split(".")[:2]) in line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("distributed=ddp", "distributed.processes=0"), "must be at least 1"),
        (("distributed=ddp", "distributed.nodes=2"), "add distributed.rendezvous=<first node's"),
        (
            ("distributed=ddp", "distributed.nodes=2", "distributed.rendezvous=node1"),
            "distributed.rendezvous=node1: must be a host and a port",
        ),
        (("distributed=fsdp2", "distributed.node_rank=0"), "is for distributed.nodes > 1"),
        (
            ("distributed=fsdp2", "training.compile=true"),
            "set training.compile=false, or distributed=ddp",
        ),
        (
            ("distributed=ddp", "distributed.cpu_offload=true"),
            "has no effect with distributed=ddp; add distributed=fsdp2",
        ),
        (
            ("distributed=ddp", "distributed.shard_within=node"),
            "has no effect with distributed=ddp; add distributed=fsdp2",
        ),
        (
            (
                *("distributed=fsdp2", "distributed.cpu_offload=true"),
                "training.offload_during_rollouts=true",
            ),
            "which keeps the optimizer in host memory during updates too; leave one of them out",
        ),
        (
            ("distributed=fsdp2", "training.mixed_precision=fp16"),
            "each process would scale a part of the gradient; set training.mixed_precision=bf16",
        ),
        (
            ("optimizer=sgd", "optimizer.betas=[0.9,0.95]"),
            "unknown key of optimizer=sgd; optimizer=adamw and optimizer=muon have it",
        ),
        (("optimizer=sgd", "optimizer.momentum=0.5"), "optimizer=sgd; optimizer=muon has it"),
        (
            ("distributed=fsdp2", "engine=vllm", "engine.tensor_parallel_size=2"),
            "each process has an engine of its own on its device; set engine.tensor_para",
        ),
        (("algorithm=rloo", "algorithm.scale=group"), "algorithm.scale=none or batch"),
        (("eval.temperature=0", "eval.samples=2"), "all samples are the same"),
        (
            ("+tools.sql.retries=0", "+tools.sql.retry_backoff_s=1"),
            "tools.sql.retry_backoff_s=1: has no effect with retries=0",
        ),
        (
            ("+tools.sql.max_calls=9", "rollout.max_tool_calls=8"),
            "tools.sql.max_calls=9: has no effect, the whole rollout is limited to rollout.max_too",
        ),
        (
            ("+tools.sql.max_result_tokens=9999", "rollout.max_completion_tokens=1000"),
            "tools.sql.max_result_tokens=9999: has no effect",
        ),
        (
            ("data=file", "data.train.path=a.jsonl", "data.test.path=b.jsonl", "data.path=c.jsonl"),
            "set data.train.path=c.jsonl data.test.path=c.jsonl, which come before it",
        ),
        (
            ("model.vision=trained", "model.lora.rank=4"),
            "model.vision=trained: model.lora.rank=4 trains adapters of the language model alone",
        ),
        (
            ("engine=vllm_server", "model.lora.rank=513"),
            "model.lora.rank=513: vLLM takes adapters of a rank up to 512; lower it, or set",
        ),
        (
            ("engine=vllm_server", "model.lora.rank=4", "weight_sync.mode=in_flight"),
            "weight_sync.mode=in_flight: has no effect with adapters",
        ),
        (
            ("engine=vllm_server", "weight_sync.transport=lora"),
            "weight_sync.transport=lora: has no effect without model.lora.rank",
        ),
        (
            ("engine=vllm_server", "weight_sync.transport=nccl", "model.lora.rank=4"),
            "weight_sync.transport=nccl: model.lora.rank=4 trains adapters, which are small",
        ),
        (
            ("engine=vllm_server", "weight_sync.transport=nccl", "weight_sync.folder=/tmp/x"),
            "weight_sync.folder=/tmp/x: has no effect with weight_sync.transport=nccl",
        ),
        (
            (
                *("engine=vllm_server", "weight_sync.transport=nccl", "servers.url=http://a:1"),
                "servers.admin_urls=[http://a:2]",
            ),
            "servers.url=http://a:1: with weight_sync.transport=nccl the router might ask a server",
        ),
        (
            ("engine=vllm_server", "servers.admin_urls=[http://a:1]", "servers.count=2"),
            "servers.count=2: servers.admin_urls names 1; lower it, or name more",
        ),
        (
            ("engine=vllm_server", "servers.nodes=2", "servers.count=3"),
            "servers.count=3: servers.nodes=2 have equally many each; set a multiple of 2",
        ),
        (
            ("engine=vllm_server", "servers.nodes=1", "servers.gpus=[0]"),
            "servers.gpus=[0]: with servers.nodes=1 the servers of a node share all of its GPUs",
        ),
        (
            ("engine=vllm_server", "servers.nodes=1", "servers.admin_urls=[http://a:1]"),
            "servers.admin_urls=[http://a:1]: names servers of others, and servers.nodes=1 has",
        ),
        (
            ("engine=vllm_server", "servers.admin_urls=[http://a:1]", "servers.restarts=1"),
            "servers.restarts=1: servers.admin_urls names servers that somebody else starts; leave",
        ),
        (
            ("engine=vllm_server", "servers.admin_urls=[http://a:1]", "engine.kv_cache_mb=64"),
            "engine.kv_cache_mb=64: servers.admin_urls names servers that somebody else starts",
        ),
        (
            ("engine=vllm_server", "distributed=ddp", "rollout.process=same"),
            "rollout.process=same: with engine=vllm_server and distributed=ddp the servers belong",
        ),
        (
            ("engine=vllm_server", "servers.count=2", "servers.gpus=[4,5,6]"),
            "servers.count=2 x servers.tensor_parallel_size=1 need 2 GPUs; name as many",
        ),
        (("engine=vllm_server", "engine.sleep=true"), "it belongs to engine=vllm"),
        (
            ("engine=vllm_server", "servers.args.port=80"),
            "servers.args.port: is set by agenttrain; leave it out",
        ),
        (
            ("engine=vllm_server", "servers.args.max-num-seqs=80"),
            "servers.args.max-num-seqs: is set by agenttrain; leave it out, set engine.max_rows",
        ),
        (("engine=vllm", "engine.rejoin_steps=3"), "it belongs to engine=transformers"),
        (("engine=vllm", "engine.memory_share=1"), "engine.memory_share=1: must be below 1"),
        (("engine=vllm", "rollout.deterministic=true"), "or set engine=transformers"),
        (("engine=vllm", "engine.merge_adapters=true"), "no effect without model.lora.rank"),
        (("engine=vllm", "engine.tensor_parallel_size=0"), "must be at least 1"),
        (("engine=vllm", "model.lora.rank=513"), "rank up to 512; lower it, or set engine.m"),
        (
            ("engine=vllm", "rollout.temperature=0.005"),
            "rollout.temperature=0.005: vLLM would sample at 0.01 instead; raise it",
        ),
        (("rollout.temperature=1e-40",), "rollout.temperature=1e-40: must be at least 0.01: "),
        (("eval.temperature=0.001",), "raise it; or set it to 0, which is greedy"),
        (("engine=vllm", "eval.temperature=0.005"), "eval.temperature=0.005: vLLM would sample"),
        (("chat_template=file", "chat_template.path=/no.jinja"), "there is no such file"),
        (
            ("agent=endpoint", "agent.command=[python,a.py]", "agent._target_=my_pkg.solve"),
            "agent.command=['python', 'a.py']: agent._target_=my_pkg.solve is an agent too; leave",
        ),
        (
            (
                "agent=endpoint",
                "agent.command=x",
                "agent.reuse=true",
                "agent.exit_code_reward=true",
            ),
            "agent.exit_code_reward=true: needs a process for each rollout",
        ),
        (
            ("agent=endpoint", "+environment.life._target_=worlds.Life"),
            "environment.life: has no effect with agent=endpoint, whose program has its own",
        ),
        (
            ("agent=endpoint", "agent.command={a:1}"),
            "agent.command={a: 1}: expected a list of texts, or one text as in a shell",
        ),
        (
            ("agent=endpoint", "agent.per_process=4", "agent.command=x"),
            "agent.per_process=4: only reused processes have several tasks at once; add "
            "agent.reuse=true",
        ),
        (
            ("agent=endpoint", "agent.sandbox=bwrap", "agent._target_=my_pkg.solve"),
            "agent.sandbox=bwrap: only processes are confined; add agent.command=[…]",
        ),
        (
            ("agent=endpoint", "agent.port=8000", "distributed=ddp", "distributed.processes=2"),
            "agent.port=8000: with distributed=ddp each process of the run has an endpoint of its",
        ),
        (
            ("environment=frozen_lake", "environment.gymnasium.rewards=turns"),
            "environment.gymnasium.rewards=turns: no reward reads the rewards of turns; add "
            "reward=[turn_rewards], or leave it out",
        ),
        (
            ("agent=endpoint", "user=llm", "user.url=http://x/v1", "user.model=x"),
            "user._target_=agenttrain.environments.user.LlmUser: an outside agent holds its own",
        ),
        (
            (
                *("engine.max_context=600", "rollout.max_turn_tokens=64"),
                *("rollout.compaction=summary", "rollout.compact_at=281"),
            ),
            # 281 + 64 + 256 = 601
            "compact_at=281: with rollout.max_turn_tokens=64 and rollout.summary_tokens=256 "
            "that is 601 tokens, and engine.max_context=600; lower one of them, or raise",
        ),
        (
            ("agent=endpoint", "rollout.compaction=summary", "rollout.compact_at=100"),
            "an outside agent keeps its own context; leave compaction and compact_at out",
        ),
        (
            ("agent=endpoint", "rollout.timeout_s=5"),
            "rollout.timeout_s=5: has no effect with agent=endpoint; set agent.timeout_s",
        ),
        (
            ("engine=vllm", "rollout.process=own"),
            "samples in the training process; leave it out, or set engine=transformers|vllm_server",
        ),
        (
            ("engine=vllm", "async_training.max_staleness=1"),
            "async_training.max_staleness=1: engine=vllm samples in the training process; leave it "
            "out, or set engine=transformers|vllm_server",
        ),
        (
            ("rollout.process=same", "async_training.max_staleness=2"),
            "rollout.process=same: with async_training.max_staleness=2 rollouts are made beside",
        ),
        (
            ("algorithm.oversample=1.5", "async_training.max_staleness=1"),
            "algorithm.oversample=1.5: with async_training.max_staleness=1 every group that is",
        ),
        (
            ("algorithm.dynamic_sampling=2", "async_training.max_staleness=1"),
            "algorithm.dynamic_sampling=2: with async_training.max_staleness=1 the tasks of a step",
        ),
        (
            ("rollout.deterministic=true", "async_training.max_staleness=1"),
            "rollout.deterministic=true: with async_training.max_staleness=1 it depends on the",
        ),
        (
            ("algorithm/objective=reinforce", "async_training.max_staleness=1"),
            "algorithm.objective=reinforce: compares the policy with no other",
        ),
        (
            ("algorithm=rloo", "async_training.max_staleness=1"),
            "algorithm.behaviour=recomputed: with async_training.max_staleness=1 tokens are "
            "sampled by an older policy, which the ratio would not see; set "
            "algorithm.correction.level=token, or algorithm.behaviour=engine",
        ),
        (
            ("agent=endpoint", "engine.max_rows=8", "agent.concurrency=4"),
            "set agent.concurrency=8, a lower engine.max_rows, or rollout.deterministic=false",
        ),
    ],
)
def test_settings_that_do_not_go_together(overrides: tuple[str, ...], expected: str) -> None:
    assert expected in refusal(*overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train.path=no.jsonl"], "data.train.path=no.jsonl: there is no such file"),
        (
            ["data.train.path=rows.txt"],
            "data.train.path=rows.txt: its ending must be one of .jsonl",
        ),
        (["data.train.path=empty.jsonl"], "data.train.path=empty.jsonl: the file has no rows"),
        (["data.test.limit=0"], "data.test.limit=0: must be a whole number of at least 1"),
        (["data.test.limt=1"], "has no such argument (did you mean 'limit'?)"),
    ],
)
def test_a_file_of_rows_that_cannot_be_used(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("rows.jsonl", "{}"), ("rows.txt", "{}"), ("empty.jsonl", "")):
        Path(name).write_text(text)
    rows = [f"data.{split}.path=rows.jsonl" for split in ("train", "test")]
    keys = [override.partition("=")[0] for override in overrides]
    rows = [override for override in rows if override.partition("=")[0] not in keys]
    text = refusal("data=file", *rows, *overrides)
    assert expected in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json"),
        (["config.json", "tokenizer.json"], "file of weights (*.safetensors, *.bin)"),
        (["config.json", "model.safetensors"], "tokenizer (tokenizer.json)"),
    ],
)
def test_a_model_folder_that_lacks_a_part(files: list[str], missing: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert refusal(f"model.path={tmp_path}") == (
        f"model.path={tmp_path}: there is no {missing} in that folder; give a folder that "
        "transformers' from_pretrained can load, bundled:shop, or an id of the hub"
    )


@pytest.mark.parametrize(
    ("saved", "overrides", "told"),
    [
        ('{"r": 4, "lora_alpha": 32}', ["model.lora.rank=4"], None),
        ('{"r": 4, "lora_alpha": 32}', [], "set model.lora.rank=4 model.lora.alpha=32 to go on"),
        (
            '{"r": 4, "lora_alpha": 8}',
            ["model.lora.rank=4"],
            "model.lora.rank=4 model.lora.alpha=8",
        ),
        ('{"peft_type": "IA3"}', ["model.lora.rank=4"], "is not peft's of LoRA ('r')"),
        ("{", [], "is not peft's of LoRA"),
    ],
)
def test_a_folder_of_adapters_has_its_own_rank(
    saved: str, overrides: list[str], told: str | None, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(saved)
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    command = [f"model.path={tmp_path}", *overrides]
    if told is None:
        with hydra_session(Source()):
            validate(compose_run(command, Source()).config)
    else:
        assert told in refusal(*command)


def test_the_divisors_of_a_large_batch_are_the_nearest() -> None:
    # 10**9 = 2**9 * 5**9; its divisors near 7 are 1, 2, 4, 5, 8, 10
    text = refusal("tasks_per_step=1000000000", "algorithm.minibatches=7")
    assert text.endswith("take one of 1, 2, 4, 5, 8, 10")


def test_the_wrong_value_is_repeated() -> None:
    assert refusal("algorithm.group_size=many").startswith("algorithm.group_size=many: ")
    assert refusal("algorithm.minibatches=7").startswith("algorithm.minibatches=7: ")


def test_all_problems_are_told_at_once() -> None:
    text = refusal("steps=0", "algorithm.group_size=1", "eval.top_p=2")
    assert [line.partition("=")[0] for line in text.splitlines()] == [
        "algorithm.group_size",
        "eval.top_p",
        "steps",
    ]


MAZE = "+environment.maze._target_=worlds.Maze"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+environment.maze.pooled=true"], "has no _target_; add one: environment.maze._target_="),
        ([MAZE[:-1]], "worlds has no 'Maz' (did you mean 'Maze'?)"),
        (["+environment.maze._target_=parts.add"], "is a function; each rollout gets an instance"),
        ([MAZE, "+environment.maze.pooled=maybe"], "pooled=maybe: expected true or false"),
        ([MAZE, "+environment.maze.timeout_s=0"], "maze.timeout_s=0: must be more than 0"),
        ([MAZE, "+environment.maze.concurrency=x"], "concurrency=x: expected a whole number"),
        ([MAZE, "+environment.maze.isolation=process"], "isolation=process: an environment keeps"),
        (
            [MAZE, "+environment.maze.max_calls=9", "rollout.max_tool_calls=5"],
            "environment.maze.max_calls=9: has no effect, the whole rollout is limited to rollout.",
        ),
        (
            ["tools=[python]", "stop_tools=[]", "+tools.python.isolation=process"],
            "tools.python.isolation=process: its code runs in processes of the rollout's own",
        ),
        (
            ["algorithm=gigpo"],
            "algorithm/credit=gigpo: compares turns that began in equal states of an environment, "
            "and the run has none; add one with a state()",
        ),
        (
            ["algorithm=gigpo", MAZE],
            "environment.maze._target_=worlds.Maze: has no state(), and algorithm/credit=gigpo",
        ),
        (
            ["+environment.life._target_=worlds.Life", "+environment.life.sise=2"],
            "environment.life.sise=2: worlds.Life has no such argument; known are: slow_s, board",
        ),
        (
            ["+environment.life._target_=worlds.Life", "stop_tools=[mvoe]"],
            "stop_tools=[mvoe]: is not a tool of this run; its tools are: sql, final_answer",
        ),
        (
            ["+tools.files._target_=file_tools.Files", "stop_tools=[wriet]"],
            "stop_tools=[wriet]: is not a tool of this run (did you mean 'write'?); its tools are: "
            "sql, final_answer, write, read, suffix",
        ),
        (
            ["+reward.mine._target_=agenttrain.rewards.builtin.tools.environment"],
            "reward.mine: is the reward of an environment, and the run has none; add +environment.",
        ),
    ],
)
def test_environments_and_tools_that_cannot_work(overrides: list[str], message: str) -> None:
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [MAZE, "reward=[]"],
        [MAZE, "+reward.environment.weight=0.5"],
        [MAZE, "stop_tools=[move]"],
        ["+tools.files._target_=file_tools.Files", "stop_tools=[write]"],
    ],
)
def test_environments_and_tools_that_work(overrides: list[str]) -> None:
    with hydra_session(Source()):
        validate(compose_run(open_keys(overrides), Source()).config)


def test_a_wrong_key_in_a_file_of_the_users_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("name: mine\ngroup_sise: 4\n")
    text = refusal("algorithm=mine", source=Source(extra=str(tmp_path)))
    assert text.startswith("algorithm.group_sise (in algorithm/mine.yaml): unknown key")
    assert "did you mean 'algorithm.group_size'?" in text


def test_a_broken_file_of_the_users_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    file = tmp_path / "algorithm" / "mine.yaml"
    file.write_text("name: mine\nbeta: [0.1\nkl: k1: k2\n")
    text = refusal("algorithm=mine", source=Source(extra=str(tmp_path)))
    assert text.startswith(f"{file}, line 3: is no YAML: ")


def written(folder: Path, files: dict[str, str]) -> Source:
    """A --config-dir with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Source(extra=str(folder))


TOOL = "{_target_: agenttrain.tools.builtin.calculator.add}"
BODY = f"""# @package _global_
tools: {{plus: {TOOL}, add: {TOOL}}}
reward: {{mine: {{_target_: agenttrain.rewards.builtin.answers.ExactMatch}}}}
"""


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        # A first line that was forgotten.
        (
            {"experiment/mine.yaml": "steps: 5\n"},
            ["experiment=mine"],
            "experiment=mine: its file lacks the first line `# @package _global_`, so that its "
            "keys would stand in a section 'experiment'; put that line at its top",
        ),
        (
            {"stop/mine.yaml": "stop_tools: [sql]\n"},
            ["stop=mine"],
            "stop=mine: its file lacks the first line `# @package _global_`",
        ),
        (
            {"tools/mine.yaml": "_target_: agenttrain.tools.builtin.calculator.add\n"},
            ["tools=[mine]", "stop_tools=[]"],
            "has no name; a file in tools/ begins with the line `# @package tools.<name>`",
        ),
        (
            {"reward/mine.yaml": "_target_: agenttrain.rewards.builtin.answers.ExactMatch\n"},
            ["reward=[mine]"],
            "has no name; a file in reward/ begins with the line `# @package reward.<name>`",
        ),
        # Emptied groups beside a body that stays.
        (
            {"experiment/mine.yaml": BODY},
            ["experiment=mine", "tools=[]", "reward=[]"],
            "tools=[]: the body of experiment=mine has tools.plus tools.add, which stays; to leave "
            "it out too add ~tools.plus ~tools.add\nreward=[]: the body of experiment=mine has "
            "reward.mine, which stays; to leave it out too add ~reward.mine",
        ),
        (
            {"experiment/mine.yaml": BODY},
            ["experiment=mine", "tools=[]", "~tools.plus", "tools.found._target_=math.hypot"],
            "has tools.add, which stays; to leave it out too add ~tools.add",
        ),
    ],
)
def test_a_file_of_the_users_that_says_something_else(
    files: dict[str, str], overrides: list[str], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(*overrides, source=written(tmp_path, files))


def test_an_emptied_group_with_its_body_left_out(tmp_path: Path) -> None:
    source = written(tmp_path, {"experiment/mine.yaml": BODY})
    emptied = ["tools=[]", "~tools.plus", "~tools.add", "reward=[]", "~reward.mine"]
    mine = ["tools.hypot._target_=math.hypot", "+reward.own._target_=parts.add"]
    with hydra_session(source):
        composed = compose_run(open_keys(["experiment=mine", *emptied, *mine]), source)
    assert (list(composed.config.tools), list(composed.config.reward)) == (["hypot"], ["own"])


def test_a_name_that_only_another_config_dir_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"experiment/mine.yaml": BODY, "other.yaml": "defaults: [train]\n"}
    written(tmp_path / "my_conf", files)
    written(tmp_path / "third", {"experiment/third.yaml": BODY})
    text = refusal("experiment=mine", source=Source(extra="third"))
    assert text.startswith(
        "experiment=mine: no such option; my_conf/experiment/mine.yaml is found with --config-dir "
        "my_conf; the options are: calculator, "
    )
    assert refusal(source=Source(name="other")) == (
        "--config-name other: there is no other.yaml where it is looked for; my_conf/other.yaml is "
        "found with --config-dir my_conf"
    )
    assert "name one of conf/, or the folder that has it" in refusal(source=Source(name="none"))
    monkeypatch.chdir(tmp_path / "my_conf")
    assert "experiment/mine.yaml is found with --config-dir ." in refusal("experiment=mine")


REWARDS = """
def nothing(): return 1.0
def keyword(*, answer): return 1.0
def several(*args): return 1.0
def trl(*, completions, **kwargs): return [1.0]
class Nothing:
    def __call__(self): return 1.0
class Something:
    def __call__(self, rollout): return 1.0
"""


@pytest.mark.parametrize(
    ("name", "bound", "expected"),
    [
        ("nothing", {}, "takes no argument; a reward gets the rollout, and the columns that it "),
        ("Nothing", {}, "takes no argument; a reward gets the rollout, and the columns that it "),
        ("keyword", {}, "its first parameter cannot be the rollout (too many positional arg"),
        ("keyword", {"answer": 3}, "its first parameter cannot be the rollout"),
        *((name, {}, None) for name in ("several", "trl", "Something")),
    ],
)
def test_a_reward_that_the_rollout_cannot_be_passed_to(
    name: str,
    bound: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    section = {"_target_": f"odd_rewards.{name}", **bound}
    if expected is not None and name in ("nothing", "Nothing"):  # seen in the source
        text = refusal("reward=[]", f"reward.mine._target_=odd_rewards.{name}")
        assert text.startswith(f"reward.mine._target_=odd_rewards.{name}: {expected}")
    elif expected is None:
        assert build_rubric({"mine": section}).names == ("mine",)
    if expected is not None:  # when it is built, whatever could be seen
        with pytest.raises(
            ValueError, match=r"its first parameter cannot be the rollout"
        ) as caught:
            build_rubric({"mine": section})
        assert str(caught.value).startswith(f"reward.mine._target_='odd_rewards.{name}'")


def test_a_misspelled_setting_is_no_argument_of_a_reward_that_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "any_rewards.py").write_text("def any(rollout, height=1, **columns): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["reward=[]", "reward.mine._target_=any_rewards.any"]
    assert refusal(*mine, "reward.mine.wieght=2") == (
        "reward.mine.wieght=2: is neither a setting of a reward (did you mean 'weight'?) nor a "
        "parameter that any_rewards.any names; the settings are: weight, timeout_s, concurrency, "
        "on_unavailable"
    )
    with hydra_session(Source()):
        words = open_keys([*mine, "reward.mine.height=2", "reward.mine.unit=cm"])
        validate(compose_run(words, Source()).config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["eval.every=5"],
            "eval.every=5: data.test names no rows; data.test_fraction=0.1 holds some of data.t",
        ),
        (["eval.every=5", "checkpoint.keep_best=true"], "nothing says which one is the best"),
        (["data.test.limit=3"], "data.test.path=null: has no value; set data.path=…"),
        (["data.test_seed=3"], "has no effect without data.test_fraction"),
    ],
)
def test_without_test_rows(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}')
    assert expected in refusal("data=file", "data.train.path=rows.jsonl", *overrides)


def test_a_config_dir_that_does_not_exist() -> None:
    assert "--config-dir /no/such/dir: there is no such folder" in refusal(
        source=Source(extra="/no/such/dir")
    )


THEIRS = {
    "num_generations=8": "num_generations=8: unknown key; it is algorithm.group_size here",
    "learning_rate=1e-5": "it is optimizer.lr here",
    "actor_rollout_ref.rollout.n=8": "n=8: unknown key; it is algorithm.group_size here",
    "algorithm.adv_estimator=grpo": "it is algorithm.advantage here",
    "data.train_files=a.parquet": "it is data.path here (with data=file)",
    "temperature=0.7": "it is rollout.temperature here",
    "clip_high=0.3": "it is algorithm.objective.high here",
    "lora_r=8": "it is model.lora.rank here",
    "use_peft=true": "it is model.lora.rank here (0: no adapters)",
    "use_vllm=true": "it is engine.name here (engine=vllm)",
    "+trainer.nnodes=2": "it is distributed.nodes here",
    "trainer.critic_warmup=0": "that is verl's; `agenttrain settings` prints ours",
}


@pytest.mark.parametrize(("override", "expected"), THEIRS.items())
def test_names_of_trl_and_verl_are_answered_with_ours(override: str, expected: str) -> None:
    assert expected in refusal(override)


def test_all_unknown_keys_are_named_at_once() -> None:
    lines = refusal("lr=1", "zzz=1", "steps=many", "seed=x").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["lr=1", "zzz=1", "steps=many"]


def test_both_missing_numbers_are_one_problem() -> None:
    expected = "optimizer.betas=[]: must be two numbers, e.g. [0.9,0.99]"
    assert refusal("optimizer.betas=[]") == expected


def test_ours_exist_and_theirs_are_none_of_ours() -> None:
    known = {*setting_keys(), "hydra.run.dir", "hydra.job.name"}
    assert [name for name, ours in ELSEWHERE.items() if ours not in known] == []
    assert known & set(ELSEWHERE) == set()
    assert set(REMARKS) <= set(ELSEWHERE)


def test_a_problem_that_only_the_last_check_finds_names_its_file(tmp_path: Path) -> None:
    body = "# @package _global_\noptimizer: {lrr: 1, warmup_steps: -3}\nsteps: 0\n"
    source = written(tmp_path, {"experiment/mine.yaml": body})
    assert refusal("experiment=mine", "steps=-1", source=source).splitlines() == [
        "optimizer.lrr=1 (in experiment/mine.yaml): unknown key of optimizer=adamw (did you mean "
        "'lr'?)",
        "optimizer.warmup_steps=-3 (in experiment/mine.yaml): must be 0 or more",
        "steps=-1: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.revision=123"], "expected a text; quote it: data.revision='\"123\"'"),
        (["data.revision=12e4"], "expected a text; quote it: data.revision='\"…\"'"),
        (
            ["data.test.split=test", "data.train.revision=123"],
            "data.train.revision=123: expected a text; quote it: '\"123\"'",
        ),
    ],
)
def test_a_revision_that_arrives_as_a_number_is_to_be_quoted(
    overrides: list[str], expected: str
) -> None:
    assert expected in refusal("data=hub", "data.path=a/b", *overrides)


LATE = """
import pathlib
pathlib.Path("imported").touch()
def find(query): ...
"""


def test_code_is_imported_last_and_only_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_tools.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    find = "tools.find._target_=late_tools.find"
    assert refusal(find, "steps=0") == "steps=0: must be at least 1"
    with hydra_session(Source()):
        validate(compose_run(open_keys([find]), Source()).config, code=())
    assert not Path("imported").exists()
    text = refusal(find, "tools.find.qury=1")
    assert text.startswith("tools.find.qury=1: late_tools.find has no such argument (did you mean")
    assert Path("imported").exists()


def test_every_setting_suggests_itself() -> None:
    for key in setting_keys():
        assert suggest_key(key + "_") != "", key
