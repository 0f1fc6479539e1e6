"""Ways to trade time for memory that hold for a whole job: what is recomputed, offloaded, chunked or not trained.

Every field's default changes nothing. Estimator, recipe and backends share this type; which backend can do what is in
the backend's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["NO_TECHNIQUES", "Adapters", "Techniques"]


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters beside every linear layer of the blocks; the rest of the model is frozen.

    `frozen_down` is LoRA-FA (Zhang et al. 2023): the first matrix of each pair is frozen too, so a linear keeps the
    r-wide projection of its input instead of the input.
    """

    rank: int
    frozen_down: bool = False


@dataclass(frozen=True)
class Techniques:
    """What one job does beside its layout.

    What a recipe says of these, and which backend runs which, stands in docs/backends.md, "Techniques".

    Recompute: `recompute_modules` are what selective recompute recomputes, in Megatron's names; empty is the backend's
    default. `recompute_method` belongs to full recompute: "uniform" keeps the input of every so many layers, "block"
    recomputes so many layers of each model chunk and keeps the others whole; how many is the layout's to say.
    Offload: `offload_modules` (activations, Megatron's fine-grained names) go to the host; so do optimizer states by
    share, and with `offload_parameters` the parameters.
    """

    recompute_modules: tuple[str, ...] = ()
    recompute_method: str = "uniform"
    offload_modules: tuple[str, ...] = ()
    offload_checkpoints: bool = False  # full recompute's kept layer inputs go to the host (DeepSpeed cpu_checkpointing)
    offload_optimizer: float = 0.0  # share of the optimizer states, 0 to 1
    offload_parameters: bool = False  # ZeRO 3 offload_param
    loss: str | None = None  # "native", "te", "fused_linear", "tiled"; None = the backend's default
    loss_tiles: int = 8  # pieces of the sequence a tiled loss computes one after the other
    mlp_chunks: int = 1  # mini-sequences of the MLP (MsT)
    adapters: Adapters | None = None
    trained_layers: int | None = None  # only the last so many layers and the head are trained (SHERL)
    delay_weight_gradients: bool = False  # 2BP
    flex_backend: str | None = None  # of token_dispatcher "flex": "deepep" or "hybridep"; None = the backend's default
    overlap_shared_expert: bool = False  # the shared expert computes while tokens travel to the others
    overlap_expert_communication: bool = False  # tokens of a micro-batch travel while another one computes
    tp_comm_overlap: bool = False  # gathers and scatters of tensor parallelism beside the products (user buffers)
    context_comm: str | None = None  # of context parallelism: "p2p" (a ring) or "a2a"; None = the backend's default
    swapped_share: float = 0.0  # MEMO's alpha: share of skeletal activations swapped to the host, what-if
    sampled_share: float = 1.0  # WTA-CRS: share of a linear's input rows kept, what-if
    weight_versions: int = 1  # PipeDream-2BW keeps 2, what-if

    @property
    def what_ifs(self) -> tuple[str, ...]:
        """What of this no backend runs, by the names of the recipe."""
        neutral = {"swapped_share": 0.0, "sampled_share": 1.0, "weight_versions": 1}
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def moves_to_host(self) -> bool:
        """Something of the device waits in host memory, whatever the layout."""
        activations = self.offload_modules or self.offload_checkpoints or self.swapped_share
        return bool(activations or self.offload_optimizer or self.offload_parameters)

    @property
    def steps_on_the_host(self) -> bool:
        """Whether CPU cores take part in the optimizer step: DeepSpeed's CPU Adam, Megatron's hybrid optimizer."""
        return self.offload_optimizer > 0

    def as_json(self) -> dict[str, object]:
        """What is not neutral, as plain values."""
        held = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {
            name: list(value) if isinstance(value, tuple) else asdict(value) if isinstance(value, Adapters) else value
            for name, value in held.items()
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Techniques:
        """The inverse of `as_json`. Raises TypeError for a name that is none of ours."""
        held: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in said.items()}
        if "adapters" in held:
            held["adapters"] = Adapters(**held["adapters"])
        return cls(**held)


NO_TECHNIQUES = Techniques()
