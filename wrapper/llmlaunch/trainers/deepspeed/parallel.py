"""How the ranks share the work: tensor parallel (AutoTP), sequence parallel (Ulysses), or each its own samples.

Neighbouring ranks split one layer or one sequence, as DeepSpeed lays its groups (runtime/engine.py
`_configure_tensor_parallel_states`, runtime/sequence_parallel/parallel_state_sp.py, 0.19.8); blocks of them take
different samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from group import refuse

Json = dict[str, Any]


@dataclass(frozen=True)
class RankSplit:
    """`tensor` ranks hold a part of each layer, `sequence` ranks a part of each sequence; one of the two is 1."""

    tensor: int = 1
    sequence: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def data(self) -> int:
        """Blocks of ranks that see different samples."""
        return self.ranks // (self.tensor * self.sequence)

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor * self.sequence)

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence

    def part(self, length: int) -> slice:
        """This rank's positions of a sequence of `length`."""
        share = length // self.sequence
        return slice(self.sequence_rank * share, (self.sequence_rank + 1) * share)


def split_of(settings: Json, sequence_length: int) -> RankSplit:
    """What ds_config says of this job's ranks. Ends the job where they cannot be shared so."""
    tensor = max(1, settings.get("tensor_parallel", {}).get("autotp_size", 1))
    sequence = max(1, settings.get("sequence_parallel_size", 1))
    ranks = dist.get_world_size()
    if tensor > 1 and sequence > 1:
        refuse("ds_config: tensor_parallel and sequence_parallel_size together: DeepSpeed makes groups for one alone")
    if ranks % (tensor * sequence):
        refuse(f"ds_config: {ranks} ranks cannot be split in groups of {tensor * sequence}")
    if sequence_length % sequence:
        refuse(f"a sequence of {sequence_length} tokens cannot be cut in {sequence} equal parts; change either")
    return RankSplit(tensor, sequence, dist.get_rank(), ranks)


def check_model(config: Any, split: RankSplit, sequence_length: int) -> None:
    """Ends the job where DeepSpeed could not split this model, or would compute something else."""
    wrong = {
        "tensor_parallel": _tensor_hindrances(config, split.tensor) if split.tensor > 1 else [],
        "sequence_parallel_size": _sequence_hindrances(config, split.sequence, sequence_length)
        if split.sequence > 1
        else [],
    }
    for key, reasons in wrong.items():
        if reasons:
            refuse(f"ds_config: {key}: a {config.model_type} model cannot be split so: {'; '.join(reasons)}")


def _tensor_hindrances(config: Any, size: int) -> list[str]:
    """AutoTP follows the plan Transformers has for a model, and knows the plans of dense ones
    (module_inject/tp_plan_converter.py SUPPORTED_STYLES, 0.19.8); without one it guesses from names."""
    reasons = []
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if is_mixture(config) or not plan or not SUPPORTED_STYLES.issuperset(plan.values()):
        reasons.append("AutoTP has a plan for dense Llama-like models alone")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (getattr(config, name, None) or size) % size:
            reasons.append(f"{name} {getattr(config, name)} is no multiple of {size}")
    return reasons


def _sequence_hindrances(config: Any, size: int, length: int) -> list[str]:
    """UlyssesSPAttentionHF exchanges heads for positions, and drops the attention mask
    (runtime/sequence_parallel/ulysses_sp.py, 0.19.8)."""
    reasons = []
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups is None:
        reasons.append("its attention is not told positions")
    elif groups % size and size % groups:
        reasons.append(f"num_key_value_heads {groups} is neither multiple nor divisor of {size}")
    if heads % size:
        reasons.append(f"num_attention_heads {heads} is no multiple of {size}")
    if getattr(config, "kv_lora_rank", None):
        reasons.append("keys and values of latent attention differ in width")
    if attention_of(config) != "sdpa":
        reasons.append("attention whose scores are capped or joined by sinks needs the whole matrix of them")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length and getattr(config, "use_sliding_window", True):
        reasons.append(f"its attention window of {window} tokens would be lost")
    return reasons


def gradient_share(settings: Json, split: RankSplit) -> float:
    """By what a rank's share of the loss is multiplied before the backward pass.

    DeepSpeed adds up the gradients of a sequence's ranks, but averages them where ZeRO 3 reduces by scatter
    (zero/stage3.py `__avg_scatter_grads` beside `__avg_scatter_contiguous_grads`, 0.19.8).
    """
    zero = settings.get("zero_optimization", {})
    return float(split.sequence) if zero.get("stage") == 3 and zero.get("reduce_scatter", True) else 1.0


def is_mixture(config: Any) -> bool:
    """Whether the configuration is of a mixture of experts."""
    return any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


# Attributes of configurations whose layers carry something from one position to the next: Mamba, delta nets, short
# convolutions, and keys that are compressed over several positions.
CARRYING = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "conv_L_cache", "compress_rates")
# Their masks do not follow positions (models/gpt_oss/modeling_gpt_oss.py `GptOssModel.forward`, 5.23).
WITHOUT_POSITIONS = ("gpt_oss",)


def check_packing(config: Any, split: RankSplit) -> None:
    """Ends the job where rows that share a sequence would not be kept apart."""
    if split.sequence > 1:
        refuse("--packed: the ranks of a sequence (sequence_parallel_size) cannot tell rows apart; leave out either")
    if any(getattr(config, name, None) for name in CARRYING):
        refuse(f"--packed: a {config.model_type} model carries a state from one row into the next; leave it out")
    if config.model_type in WITHOUT_POSITIONS:
        refuse(f"--packed: Transformers' {config.model_type} lets a row attend to the one before it; leave it out")


def attention_of(config: Any) -> str:
    """torch's attention neither caps scores (Gemma 2) nor adds sinks to them (GPT-OSS); Transformers' own can."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "eager" if getattr(config, "attn_logit_softcapping", None) or not model._supports_sdpa else "sdpa"


def tensor_groups(split: RankSplit, settings: Json) -> Any:
    """DeepSpeed's groups of a job that splits layers, or None. Handed over to it, so that it counts blocks of ranks as
    data parallel ranks and not every rank (runtime/config.py DeepSpeedConfig, 0.19.8)."""
    if split.tensor == 1:
        return None
    from deepspeed.utils import groups

    # else the head of a model with tied embeddings would give each rank a part of the logits
    settings["tensor_parallel"]["vocab_parallel_lm_head"] = False
    groups._init_tp_mesh_device(tensor_model_parallel_size=split.tensor)
    return groups


def share_sequences(model: torch.nn.Module, split: RankSplit, micro_batch_size: int) -> Any:
    """Lets ranks of a sequence exchange heads for positions around each attention; returns DeepSpeed's groups, or None
    where sequences are whole."""
    if split.sequence == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=split.sequence,
        micro_batch_size=micro_batch_size,
        seq_length_is_variable=True,
    )
