"""Every flag our renderer can write for Megatron-LM, and how each was tried: docs/megatron-flags.md holds the table.

`make flags-table` prints it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cpu_training import ADDED, cpu_job
from traced_cases import CASES as TRACED
from traced_cases import PADDED, TECHNIQUES
from trained_cases import CASES as TRAINED
from trained_cases import SHARED, jobs, own_job

from llmlaunch.frameworks import megatron
from llmlaunch.frameworks.megatron.flags.table import flags

EIGHT_BITS = "Transformer Engine multiplies in 8 and 4 bits on CUDA alone"
FUSED_ADAM = "wants FusedAdam of Transformer Engine (core/optimizer/optimizer_config.py), a CUDA kernel"
HYBRID = (
    "wants the precision-aware optimizer; without its kernel HybridDeviceOptimizer ends with a KeyError, because "
    "parameters on the host are their own copies (core/optimizer/cpu_offloading/hybrid_optimizer.py)"
)
OFFLOADED = "Transformer Engine offloads; the local layers say 'CPU Offloading is enabled when TE is not present'"
DELAYED = "'Delaying wgrad compute is only supported with transformer_engine implementation' (transformer_config.py)"
VARIANTS = "core 0.19 builds the variant with Transformer Engine alone (experimental_attention_variant_module_specs.py)"
MIXERS = "of models with Mamba-2 mixers, whose layers are Transformer Engine's (models/hybrid/hybrid_layer_specs.py)"
LIBRARIES = "DeepEP and HybridEP send tokens between GPUs"

FIXED_ROWS = (
    "of the experts' one kernel for Blackwell, whose tokens HybridEP sends; core 0.19's configuration takes them"
)

TOKENIZERS = "wants Hugging Face's tokenizers, which are not among the frameworks of the tests"

GRAPHS = "graphs are captured on GPUs alone; core 0.19 takes them (test_megatron_oracle.py)"

WRITERS = "the process that writes binds itself to a GPU; core 0.19's parser takes them (test_megatron_layers.py)"

SPARSE = (
    *("--dsa-indexer-head-dim", "--dsa-indexer-k-norm-epsilon", "--dsa-indexer-loss-coeff", "--dsa-indexer-n-heads"),
    *("--dsa-indexer-rope-interleaved", "--dsa-indexer-topk", "--dsa-indexer-use-sparse-loss", "--dsa-kernel-backend"),
    "--no-dsa-indexer-rotate-activation",
)
LINEAR = (
    *("--linear-attention-freq", "--linear-conv-kernel-dim", "--linear-key-head-dim", "--linear-num-key-heads"),
    *("--linear-num-value-heads", "--linear-value-head-dim"),
)
STATE_SPACES = (
    *("--hybrid-layer-pattern", "--spec", "--mamba-head-dim", "--mamba-num-groups", "--mamba-num-heads"),
    *("--mamba-state-dim", "--moe-latent-size", "--mtp-use-repeated-layer", "--squared-relu"),
    "--use-fused-weighted-squared-relu",
)
ROWS_AND_PAGES = (
    *("--moe-expert-rank-capacity-factor", "--use-transformer-engine-op-fuser", "--moe-mlp-glu-interleave-size"),
    *("--moe-paged-stash", "--moe-paged-stash-page-size", "--moe-paged-stash-buffer-size-factor-cuda"),
    "--moe-paged-stash-buffer-size-factor-cpu",
)
OBSTACLES: dict[str, str] = {
    "--activation-offload-fraction": OFFLOADED,
    **dict.fromkeys(("--async-save", "--async-strategy", "--use-persistent-ckpt-worker"), WRITERS),
    "--apply-layernorm-1p": "torch's norms, which the local layers use, refuse it (core/transformer/torch_norm.py)",
    "--cp-comm-type": "'Context parallelism is only supported by TEDotProductAttention' (dot_product_attention.py)",
    "--cpu-offloading-num-layers": OFFLOADED,
    **dict.fromkeys(("--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-scope"), GRAPHS),
    **dict.fromkeys(("--experimental-attention-variant", "--attention-output-gate", *SPARSE, *LINEAR), VARIANTS),
    **dict.fromkeys(STATE_SPACES, MIXERS),
    "--delay-wgrad-compute": DELAYED,
    "--exp-avg-dtype": FUSED_ADAM,
    "--exp-avg-sq-dtype": FUSED_ADAM,
    "--fine-grained-activation-offloading": OFFLOADED,
    "--fp4-format": EIGHT_BITS,
    "--fp4-recipe": EIGHT_BITS,
    "--fp8-amax-compute-algo": EIGHT_BITS,
    "--fp8-amax-history-len": EIGHT_BITS,
    "--fp8-format": EIGHT_BITS,
    "--fp8-param-gather": EIGHT_BITS,
    "--fp8-recipe": EIGHT_BITS,
    "--main-grads-dtype": FUSED_ADAM,
    "--main-params-dtype": FUSED_ADAM,
    "--moe-flex-dispatcher-backend": LIBRARIES,
    **dict.fromkeys(ROWS_AND_PAGES, FIXED_ROWS),
    "--moe-router-dtype": "written from 32 experts on: more than are trained here",
    "--num-distributed-optimizer-instances": "makes a stream of a GPU (core/distributed/distributed_data_parallel.py)",
    "--offload-modules": OFFLOADED,
    "--no-check-for-nan-in-loss-and-grad": GRAPHS,
    "--optimizer": "Muon needs emerging-optimizers, which is not among the packages that the tests install",
    "--optimizer-cpu-offload": HYBRID,
    "--optimizer-offload-fraction": HYBRID,
    "--overlap-cpu-optimizer-d2h-h2d": HYBRID,
    "--overlap-moe-expert-parallel-comm": DELAYED,
    "--reuse-grad-buf-for-mxfp8-param-ag": EIGHT_BITS,
    "--padded-vocab-size": TOKENIZERS,
    "--te-rng-tracker": GRAPHS,
    **dict.fromkeys(
        ("--tensorboard-dir", "--log-timers-to-tensorboard", "--log-memory-to-tensorboard"),
        "wants TensorBoard, which is not among the frameworks of the tests",
    ),
    "--tokenizer-model": TOKENIZERS,
    "--tp-comm-overlap": "user buffers of Transformer Engine, memory of GPUs that see each other",
    "--use-precision-aware-optimizer": FUSED_ADAM,
    **dict.fromkeys(
        ("--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir"),
        "wants wandb, which is not among the frameworks of the tests",
    ),
}


ROOT = Path(__file__).resolve().parents[2]
ROOM = Path(megatron.__file__).parent
GPU_RECORDS = ROOT / "benchmarks" / "gpu"  # each file: {"words": [...]} of a training that ended well, and more
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def flags_of(words: Iterable[str]) -> set[str]:
    """The flags among a program's words."""
    return {word for word in words if FLAG.fullmatch(word)}


@cache
def written_flags() -> tuple[str, ...]:
    """Return what the renderer can write, in alphabetical order."""
    return tuple(sorted({row.name for row in flags() if row.writes}))


def _parsed(version: str) -> set[str]:
    """The flags of the real parser of a core version (the room's data; versions.py says how it was made)."""
    return set(json.loads((ROOM / "parsers" / f"{version}.json").read_text("utf-8"))["flags"])


def _traced_flags() -> set[str]:
    return set().union(*(flags_of(case.arguments()) for case in (*TRACED, *TECHNIQUES, PADDED)))


def trained_flags() -> set[str]:
    """Those the declared jobs are rendered with, and those of one's own trainer (test_megatron_own_trainer.py)."""
    declared = (*jobs(Path("/checkpoints"), TRAINED), cpu_job("own", own_job(Path("/data")), SHARED))
    return set().union(*(flags_of(job.rendered) for job in declared))


def _gpu_flags() -> set[str]:
    records = (json.loads(path.read_text("utf-8")) for path in sorted(GPU_RECORDS.glob("*.json")))
    return set().union(*(flags_of(record.get("words", ())) for record in records))


def flags_table() -> str:
    """One Markdown row for each flag."""
    columns = [_parsed("0.16"), _parsed("0.19"), _traced_flags(), trained_flags(), _gpu_flags()]
    rows = ["| flag | parsed by 0.16 | by 0.19 | traced | trained on CPU | trained on GPU | why not on the CPU |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for flag in written_flags():
        tried = " | ".join("yes" if flag in column else "no" for column in columns)
        rows.append(f"| `{flag}` | {tried} | {OBSTACLES.get(flag, '')} |")
    return "\n".join(rows)


def changes_table() -> str:
    """What the words are changed by before a CPU trains with them."""
    rows = ["| change | why |", "|---|---|"]
    rows += [f"| `{' '.join(words)}` added | {why} |" for words, why in ADDED.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(changes_table(), flags_table(), sep="\n\n")
