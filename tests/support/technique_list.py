"""Every technique a recipe can ask for: its key, the paper, what it saves and costs, and what each backend is told.

docs/backends.md shows the list as a table. It follows from the declarations in `techniques/` and from the tables of
flags; here is what neither says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmlaunch.frameworks.deepspeed.settings import SETTINGS
from llmlaunch.frameworks.megatron.flags.table import flags
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations

# beside the flags whose keys name the technique
ALSO_MEGATRON: Mapping[str, str] = {
    "layout.offload_modules": "`NVTE_CPU_OFFLOAD_V1=1`",
    "layout.expert_rank_capacity_factor": "`NVTE_CUTEDSL_FUSED_GROUPED_MLP=1`",
    "layout.cuda_graphs": "`NCCL_GRAPH_REGISTER=0`",
    "layout.mtp_stage": "`--pipeline-model-parallel-layout`",
}
OF_THE_SCRIPT: Mapping[str, str] = {
    "layout.recompute": "`--gradient-checkpointing` (every layer)",
    "layout.loss_tiles": "`--loss-tiles` (`sequence_tiled_compute`)",
    "layout.mlp_chunks": "`--mlp-chunks` (`TiledMLP`)",
    "training.adapters": "`--adapter-rank`, `--adapter-targets`, `--frozen-adapter-down`",
    "training.trained_layers": "`--trained-layers`",
}


@dataclass(frozen=True)
class Technique:
    """`keys` stand in a recipe. `source` is the paper, or where none is known the framework."""

    keys: tuple[str, ...]
    source: str
    saves: str
    costs: str

    @property
    def megatron(self) -> str | None:
        """What is rendered for Megatron-LM; None where nothing is."""
        known = core_parser("0.19").flags
        names = [flag.name for flag in flags() if flag.writes and flag.name in known and self._decides(flag.keys)]
        also = [ALSO_MEGATRON[key] for key in self.keys if key in ALSO_MEGATRON]
        return ", ".join([*([f"`{' '.join(names)}`"] if names else []), *also]) or None

    @property
    def deepspeed(self) -> str | None:
        """What is rendered for DeepSpeed, in its ds_config.json or for the shipped script; None where nothing is."""
        keys = [each.key for each in SETTINGS if each.is_rendered and self._decides(each.keys)]
        script = [f"{OF_THE_SCRIPT[key]} of the script" for key in self.keys if key in OF_THE_SCRIPT]
        return ", ".join([*(f"`{key}`" for key in keys), *script]) or None

    def _decides(self, keys: tuple[str, ...]) -> bool:
        return any(key == own or key.startswith(f"{own}.") for key in keys for own in self.keys)


def _declared() -> Iterator[Technique]:
    """Yield each technique, with those of its parameters that say nothing else of where they are from."""
    keys: list[str] = []
    for name, each in reversed(declarations(Techniques).items()):
        keys.insert(0, f"{each.place}.{name}")
        if each.source:
            yield Technique(tuple(keys), each.source, each.saves, each.costs)
            keys = []


# those whose amounts and formats are no techniques of `techniques/` but fields of the layout and of the training
BESIDE_THE_LAYOUT = (
    Technique(
        ("layout.recompute", "layout.recompute_layers"),
        "Chen et al. 2016; Korthikanti et al. 2022, section 5",
        "full: all a layer saves but its input; selective: what the modules save",
        "up to one more forward pass",
    ),
    Technique(
        ("layout.offload_layers",),
        "KARMA (Wahib et al. 2020)",
        "all that the first layers save",
        "host memory and the link to it",
    ),
    Technique(
        ("training.gradient_dtype",),
        "Megatron core, DistributedDataParallel",
        "bf16: half the gradient buffer",
        "precision of the accumulated gradient",
    ),
)
TECHNIQUE_LIST: tuple[Technique, ...] = (*BESIDE_THE_LAYOUT, *reversed([*_declared()]))
