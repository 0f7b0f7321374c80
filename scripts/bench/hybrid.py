"""Training step of recurrent models: forward and backward of one group, on a CPU core.

One group of 8 rollouts: a prompt of 300 tokens, then about 100 of their own. Random models of 8
layers of 256 in float32, two of attention and six recurrent ones. Side by side in one run:

    bare       each rollout alone, the head on sampled positions only, log_softmax, backward
    packed     ours with training.share_prefix=never: all rollouts in one pass
    shared     ours with training.share_prefix=always: the prompt once, as `auto` has it here

With `--quick` of 2 repetitions, else 3; each figure is the fewest CPU seconds of its repetitions,
which take turns. The families are qwen3_5 (gated delta rule), granite (Mamba2) and lfm2 (short
convolutions). The figures:

    speedup_shared_<family>         bare / shared
    speedup_packed_<family>         bare / packed
    sharing_<tokens>_<family>       packed / shared with a prompt of that many tokens, at hidden
                                    size 128: above 1 sharing pays (not with --quick)
    seconds_<variant>_<family>      what these are made of
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any

import harness
import torch
import transformers
from train_step import fewest
from train_step_cases import Case, Step, bare_step, our_step, rollouts

from agenttrain.training.batch import make_sequences
from agenttrain.training.config import SharePrefix

GROUP = Case(sigma=0.12, tasks=1, vocabulary=1000, prompt=300, median=100)
LINEAR, FULL = "linear_attention", "full_attention"


def model(family: str, hidden: int = 256) -> Any:
    """A random model of 8 layers."""
    shared = {
        "vocab_size": GROUP.vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    layers = ([LINEAR] * 3 + [FULL]) * 2
    torch.manual_seed(0)
    if family == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(
            **shared,
            head_dim=64,
            layer_types=layers,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=hidden // 64,
            linear_num_value_heads=hidden // 32,
        )
        return transformers.Qwen3_5ForCausalLM(config).eval()
    if family == "granite":
        config = transformers.GraniteMoeHybridConfig(
            **shared,
            layer_types=layers,
            mamba_n_heads=hidden // 16,
            mamba_d_head=32,
            mamba_d_state=64,
            mamba_n_groups=1,
            mamba_chunk_size=64,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=3 * hidden,
        )
        return transformers.GraniteMoeHybridForCausalLM(config).eval()
    config = transformers.Lfm2Config(**shared, layer_types=(["conv"] * 3 + [FULL]) * 2)
    return transformers.Lfm2ForCausalLM(config).eval()


def variants(family: str, case: Case, hidden: int = 256) -> dict[str, Step]:
    """Name -> step."""
    net = model(family, hidden)
    rows = [make_sequences(one)[0] for one in rollouts(case)]
    return {
        "bare": bare_step(net, rows),
        "packed": our_step(net, rows, SharePrefix.never),
        "shared": our_step(net, rows, SharePrefix.always),
    }


def measure(family: str, quick: bool) -> dict[str, float]:
    """Figures of one family."""
    seconds = fewest(variants(family, GROUP), 2 if quick else 3, time.process_time)
    figures = {
        f"speedup_shared_{family}": seconds["bare"] / seconds["shared"],
        f"speedup_packed_{family}": seconds["bare"] / seconds["packed"],
        **{f"seconds_{variant}_{family}": value for variant, value in seconds.items()},
    }
    for tokens in () if quick else (10, 20, 40):
        case = Case(sigma=0.12, tasks=1, vocabulary=1000, prompt=tokens, median=90)
        steps = variants(family, case, hidden=128)
        del steps["bare"]
        short = fewest(steps, 5, time.process_time)
        figures[f"sharing_{tokens}_{family}"] = short["packed"] / short["shared"]
    return figures


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    families = ("qwen3_5", "granite", "lfm2")
    harness.run_parts(__doc__ or "", {family: partial(measure, family) for family in families})
