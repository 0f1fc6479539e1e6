"""Techniques that trade time for memory or overlap the two, beside the layout: declared by how they are searched, and
all together here.

Every default changes nothing. Estimator, recipe and backends share `Techniques`; which backend can do what is in the
backend's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.keys import section
from llmlaunch.techniques.requests import (
    ExpertCapacity,
    HeadsStage,
    OptimizerInstances,
    StashedExperts,
    TrainedAdapters,
    TrainedLayers,
)
from llmlaunch.techniques.switches import (
    ContextExchange,
    CudaGraphs,
    DelayedWeightGradients,
    ExpertOverlap,
    Loss,
    MlpChunks,
    SharedExpertOverlap,
    TensorOverlap,
    TokenDispatch,
)
from llmlaunch.techniques.technique import WHAT_IF, declarations, key_of
from llmlaunch.techniques.treatments import (
    CheckpointOffload,
    HostOptimizer,
    HostParameters,
    ModuleOffload,
    ModuleOffloadShare,
    Recompute,
)
from llmlaunch.techniques.what_ifs import SampledInputs, Swap, WeightVersions, ZeroBubble

# How a technique is searched is the class it is listed in. Dataclasses take the fields of their bases from the last to
# the first, so in each class what a person reads first comes last.


@section
class ActivationTreatments(CheckpointOffload, ModuleOffload, Recompute):
    """What a search combines with every layout, because it decides what fits: techniques for activations."""


@section
class StateTreatments(HostParameters, HostOptimizer):
    """What a search combines with every layout, because it decides what fits: techniques for model states."""


@section
class Switches(
    CudaGraphs,
    ContextExchange,
    TensorOverlap,
    ExpertOverlap,
    SharedExpertOverlap,
    TokenDispatch,
    DelayedWeightGradients,
    MlpChunks,
    Loss,
):
    """What a search adds to a layout whose treatments are chosen: it mostly changes time, and seldom what fits."""


@section
class Techniques(
    # what no backend runs
    ZeroBubble,
    WeightVersions,
    SampledInputs,
    Swap,
    # what a recipe asks for, and no search chooses
    HeadsStage,
    StashedExperts,
    ExpertCapacity,
    TrainedLayers,
    TrainedAdapters,
    OptimizerInstances,
    ModuleOffloadShare,
    # what a search may choose for each layout
    Switches,
    StateTreatments,
    ActivationTreatments,
):
    """What a job does beside its layout. docs/backends.md, "Techniques", says which backend runs what.

    How many layers a `recompute_method` counts is the layout's to say.
    """

    @property
    def what_ifs(self) -> tuple[str, ...]:
        """The techniques in use that no backend runs, by their keys."""
        declared = declarations(Techniques)
        return tuple(name for name in declared if declared[name].place == WHAT_IF and self.uses(name))

    def uses(self, name: str) -> bool:
        """Whether the technique of this key has another value than its default."""
        return bool(getattr(self, name) != getattr(Techniques, name))

    @property
    def effect_modules(self) -> tuple[str, ...]:
        """The modules of `effects/` that a job with these techniques may need: of the techniques in use, of treatments,
        which each layout decides, and of the exchange of a mixture, which every one has."""
        in_use = {module for name, default, module in _EFFECTS if getattr(self, name) != default}
        return tuple(sorted(in_use | _EFFECTS_OF_ALL))

    @property
    def overlaps_experts(self) -> bool:
        """Whether tokens of one micro-batch travel to their experts while another one computes: Megatron-LM delays
        weight gradients in no other schedule."""
        return self.overlap_expert_communication or self.delay_weight_gradients

    @property
    def moves_to_host(self) -> bool:
        """Whether some of the device's memory waits in host memory, whatever the layout."""
        spilled = self.paged_stash is not None and self.paged_stash.host_factor
        return bool(spilled) or any(self.uses(name) for name in MOVING_NAMES)

    def as_json(self) -> dict[str, object]:
        """Return what differs from the defaults, as plain values."""
        return {name: _plain(getattr(self, name)) for name in declarations(Techniques) if self.uses(name)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Techniques:
        """Return the techniques that `as_json` wrote. Raises TypeError for an unknown name."""
        declared = declarations(cls)
        mappings = {name: declared[name].mapping if name in declared else None for name in document}
        return cls(**{name: _restored(value, mappings[name]) for name, value in document.items()})


def _plain(value: Any) -> object:
    if hasattr(value, "as_json"):
        return value.as_json()
    return list(value) if isinstance(value, tuple) else value


def _restored(value: Any, mapping: type[Any] | None) -> Any:
    if mapping is not None and isinstance(value, Mapping):
        return mapping(**{name: _restored(item, None) for name, item in value.items()})
    return tuple(value) if isinstance(value, list) else value


NO_TECHNIQUES = Techniques()
MOVING_NAMES = tuple(name for name, declared in declarations(Techniques).items() if declared.on_host is not None)
TREATMENT_NAMES = (*declarations(ActivationTreatments), *declarations(StateTreatments))
SWITCH_NAMES = tuple(declarations(Switches))
# Switches that may spare memory; the others make a step faster and need no less (tests/unit/planner/test_switches.py).
SPARING_SWITCHES = frozenset(
    name for switch in (ContextExchange, TokenDispatch, MlpChunks, Loss) for name in declarations(switch)
)
# what a search may choose for each layout; all else holds for every layout, as the recipe has it
CHOOSABLE = (*TREATMENT_NAMES, *SWITCH_NAMES)
_EFFECTS = tuple(
    (name, getattr(Techniques, name), module)
    for name, declared in declarations(Techniques).items()
    for module in declared.effects
)
_EFFECTS_OF_ALL = frozenset(module for name, _, module in _EFFECTS if name in (*TREATMENT_NAMES, key_of(TokenDispatch)))
