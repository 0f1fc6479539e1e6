"""Six small layouts that try a cluster out: which they are, and how deep the model and how long its sequences must be
so that one of them just fits and one is predicted to run out of memory.

The layers keep the shape of the model family. Only their number, the length of the sequences and the size of a
micro-batch are chosen here, so that a few devices are filled as far as each layout asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import UserError
from llmlaunch.frameworks.registry import framework_of
from llmlaunch.frameworks.trials import DIES, FITS, TIGHT, Trial
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_LAYERS, RECOMPUTE_NAMES, Layout
from llmlaunch.planner.judge import LayoutVerdict, judge_layouts
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.layout_keys import ASKED_ONLY
from llmlaunch.techniques import MOVING_NAMES, NO_TECHNIQUES, TREATMENT_NAMES
from llmlaunch.units import MINUTE

__all__ = [
    "DIES",
    "EXPECTED",
    "FITS",
    "TIGHT",
    "ChosenTrial",
    "choose_trials",
    "expectation_of",
    "kept_techniques",
]

EXPECTED = {FITS: "predicted to fit", TIGHT: "predicted near the limit", DIES: "predicted above the card"}

STEPS = 12
MOST_MICRO_BATCH, MOST_SEQUENCE = 64, 4096
MOST_EXPERT_PARALLEL = 8
MOST_LAYERS_ON_CPU = 256  # model states fill a CPU sooner than tokens do; on a GPU the model's own depth is the most
MICRO_BATCHES = 2  # of each pipeline rank in a step: the second finds the gradients of the first
DEATH = 1.20  # predicted bytes of the layout that is to die, as a share of the card
NEAR_DEATH = 0.05  # how far from that it may be predicted
NEAR_FIT = 0.12
NEAR_CARD = 0.97
TIGHT_SHARE, NEAR_TIGHT = 0.35, 0.25  # of what lies between the limit and the card the tight layout uses so much
EIGHTHS = 8  # a sequence is lengthened or cut by eighths of itself, where a layer would be too much
START_MINUTES = 13  # for the start of a job, and for the first step

# What a job that is measured must not do: train on, come back, write checkpoints, fall back on another layout.
SHORT_RUN = (
    "data={mock: true}",
    "budget={}",
    "restart=none",
    "on_oom=stop",
    "on_bad_loss=tell",
    "preflight=false",
    "spare_nodes=0",
    "watchdog={floor_seconds: 180, first_step_seconds: 600}",
    "slurm.requeue=false",
    "slurm.no-requeue=true",
    "training.log_interval=1",
    *(f"training.{key}=null" for key in ("save_interval", "checkpoint_path", "start_from", "warmup_steps")),
    *("training.keep_checkpoints=null", "training.async_save=false", "training.non_persistent_save_interval=null"),
)
# Pins and techniques that a search would choose; those that a trial does not name are switched off.
SWITCHED_OFF = {"virtual_pipeline": 1, "expert_tensor": 1, "sequence_parallel": False, OFFLOAD_LAYERS: 0}


@dataclass(frozen=True)
class ChosenTrial:
    """A trial as it will run: `words` are the overrides of the recipe that say so."""

    trial: Trial
    words: tuple[str, ...]
    layout: Layout
    num_layers: int
    sequence_length: int
    predicted_bytes: int
    step_seconds: float


SettingOf = Callable[[Sequence[str]], Setting]
"""Called with overrides of the recipe; returns what its layouts are priced with."""


def expectation_of(device_bytes: int, limit_bytes: int, memory_bytes: int) -> str:
    """Return what is to be expected of a run by its predicted bytes. Beyond NEAR_CARD of the memory a run is tight,
    even where the limit lies higher."""
    if device_bytes > memory_bytes:
        return DIES
    return TIGHT if device_bytes > _tight_from(limit_bytes, memory_bytes) else FITS


def _tight_from(limit_bytes: int, memory_bytes: int) -> float:
    return min(limit_bytes, NEAR_CARD * memory_bytes)


def choose_trials(setting_of: SettingOf, name: str) -> list[ChosenTrial]:
    """Return the six layouts of a recipe, sized; their runs are called `name`-1 to `name`-6.

    Raises:
        UserError: no size of the model brings a layout near the limit, or above the card; or the backend cannot run
            the recipe at all.
    """
    base = setting_of(())
    chosen: list[ChosenTrial] = []
    for number, trial in enumerate(framework_of(base.recipe).trials(), start=1):
        sizing = _Sizing(trial, f"{name}-{number}", base, setting_of)
        chosen.append(sizing.best([_kind(earlier) for earlier in chosen]))
    return chosen


def _kind(chosen: ChosenTrial) -> tuple[Layout, int, int]:
    """Return what tells two runs apart."""
    return chosen.layout, chosen.num_layers, chosen.sequence_length


class _Sizes(NamedTuple):
    """The sizes of a split, but for data parallelism, which takes up what they leave."""

    tensor: int
    pipeline: int
    context: int
    expert: int

    @property
    def replica_devices(self) -> int:
        return self.tensor * self.pipeline * self.context


class _Point(NamedTuple):
    """One size of a trial."""

    sizes: _Sizes
    micro_batch_size: int
    sequence_length: int
    num_layers: int


@dataclass(frozen=True)
class _Sizing:
    """One trial of one recipe, to be sized."""

    trial: Trial
    name: str
    base: Setting
    setting_of: SettingOf
    verdicts: dict[_Point, LayoutVerdict] = field(default_factory=dict)

    @cached_property
    def aim_bytes(self) -> float:
        """The bytes that the trial is to be predicted to need."""
        limit = self.base.limit
        if self.trial.expectation == DIES:
            return DEATH * limit.memory_bytes
        if self.trial.expectation == TIGHT:
            return limit.memory_bytes - (1 - TIGHT_SHARE) * self._tight_room
        idle = self.base.job.facts.allocator.context_bytes
        return idle + self.trial.fill * (limit.limit_bytes - idle)

    def best(self, earlier: Sequence[tuple[Layout, int, int]]) -> ChosenTrial:
        """Return the first of the trial's splits and micro-batches that comes near enough to the aim, else the nearest
        one. Raises UserError where that is not what the trial is for."""
        nearest: ChosenTrial | None = None
        for sizes in self._legal_sizes():
            for micro_batch_size in _powers_of_two(self.trial.micro_batch_size):
                candidate = self._nearest(sizes, micro_batch_size)
                if candidate is None or _kind(candidate) in earlier:
                    continue
                nearest = candidate if nearest is None else min(nearest, candidate, key=self._worth)
                if self._near_enough(nearest):
                    return nearest
        if nearest is None or not self._as_expected(nearest):
            raise self._no_such_layout(nearest)
        return nearest

    def _near_enough(self, candidate: ChosenTrial) -> bool:
        share = {FITS: NEAR_FIT, DIES: NEAR_DEATH}.get(self.trial.expectation)
        tolerance = NEAR_TIGHT * self._tight_room if share is None else share * self.base.limit.memory_bytes
        return self._distance(candidate) <= tolerance and self._as_expected(candidate)

    @property
    def _tight_room(self) -> float:
        """The bytes between the limit and the card."""
        limit = self.base.limit
        return limit.memory_bytes - _tight_from(limit.limit_bytes, limit.memory_bytes)

    def _worth(self, candidate: ChosenTrial) -> tuple[bool, float]:
        """Return a key by which the best candidate is the smallest."""
        return not self._as_expected(candidate), self._distance(candidate)

    def _distance(self, candidate: ChosenTrial) -> float:
        return abs(candidate.predicted_bytes - self.aim_bytes)

    def _as_expected(self, candidate: ChosenTrial) -> bool:
        limit = self.base.limit
        expected = expectation_of(candidate.predicted_bytes, limit.limit_bytes, limit.memory_bytes)
        return expected == self.trial.expectation

    def _no_such_layout(self, nearest: ChosenTrial | None) -> UserError:
        recipe = self.base.recipe
        card = f"{self.base.limit.memory_bytes / 2**30:.1f} GiB"
        close = "none is legal"
        if nearest is not None:
            close = f"the nearest, {nearest.layout.describe()}, needs {nearest.predicted_bytes / 2**30:.1f} GiB"
        return UserError(
            f"{recipe.path}: qualify: no layout of {recipe.model.name} on {recipe.cluster.name} is "
            f"{EXPECTED[self.trial.expectation]} ({card}): {close}; name a model with layers of another size (--model)"
        )

    def _legal_sizes(self) -> Iterator[_Sizes]:
        """Yield the splits that a rule allows, the largest first."""
        recipe = self.base.recipe
        megatron = recipe.backend.on_megatron_core
        most_experts = MOST_EXPERT_PARALLEL if megatron and recipe.model.moe is not None else 1
        wanted = {} if self._on_cpu else {**self.trial.sizes, "expert": most_experts}  # CPUs split no replica
        options = [[2**power for power in range(wanted.get(name, 1).bit_length())] for name in _Sizes._fields]
        splits = [_Sizes(*sizes) for sizes in product(*options)]
        for sizes in sorted(splits, key=lambda sizes: (-sizes.replica_devices, -sizes.expert)):
            if recipe.world_size % sizes.replica_devices == 0:
                layers = self._least_groups(sizes) * sizes.pipeline
                point = _Point(sizes, self.trial.micro_batch_size, self._sequence_length, layers)
                if self._priced(point).legal:
                    yield sizes

    def _least_groups(self, sizes: _Sizes) -> int:
        """Return the fewest layers of a stage: enough for a mixture to have one with experts."""
        moe = self.base.recipe.model.moe
        least_layers = 1 if moe is None else 1 + moe.layer_pattern.index(1)
        return -(-least_layers // sizes.pipeline)

    @property
    def _on_cpu(self) -> bool:
        return self.base.recipe.cluster.accelerator.kind == "cpu"

    @property
    def _sequence_length(self) -> int:
        wanted = min(self.base.recipe.training.sequence_length, MOST_SEQUENCE) * self.trial.sequence_factor
        return min(wanted, self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        model = self.base.recipe.model
        return model.max_position_embeddings if model.position_embedding == "learned_absolute" else 2**28

    def _nearest(self, sizes: _Sizes, micro_batch_size: int) -> ChosenTrial | None:
        """Return the deepest model that stays below the aim, or one with a layer more on each stage, with sequences as
        long as come nearest to it; None where not even the shallowest is legal."""
        stages, length = sizes.pipeline, self._sequence_length

        def bytes_of(groups: int, sequence_length: int = length) -> float:
            verdict = self._priced(_Point(sizes, micro_batch_size, sequence_length, groups * stages))
            return float("inf") if verdict.device_bytes is None else verdict.device_bytes

        least_groups = self._least_groups(sizes)
        if bytes_of(least_groups) == float("inf"):
            return None
        most_layers = MOST_LAYERS_ON_CPU if self._on_cpu else self.base.recipe.model.num_layers
        most_groups = max(most_layers // stages, least_groups)
        more = _most_below(
            lambda count: bytes_of(least_groups + count - 1) <= self.aim_bytes, most_groups - least_groups + 1
        )
        groups = least_groups + more - 1
        lengths = [length * part // EIGHTHS for part in range(EIGHTHS // 2, 2 * EIGHTHS + 1)]
        lengths = [tokens for tokens in lengths if tokens <= self._most_tokens]
        nearest: ChosenTrial | None = None
        for deep in range(groups, min(groups + 1, most_groups) + 1):
            if nearest is None or not self._near_enough(nearest):
                below = _most_below(partial(self._is_below, bytes_of, deep, lengths), len(lengths))
                for tokens in lengths[below - 1 : below + 1]:
                    candidate = self._chosen(_Point(sizes, micro_batch_size, tokens, deep * stages))
                    nearest = candidate if nearest is None else min(nearest, candidate, key=self._worth)
        return nearest

    def _is_below(self, bytes_of: Callable[[int, int], float], groups: int, lengths: Sequence[int], count: int) -> bool:
        return bytes_of(groups, lengths[count - 1]) <= self.aim_bytes

    def _chosen(self, point: _Point) -> ChosenTrial:
        verdict = self._priced(point)
        assert verdict.device_bytes is not None
        assert verdict.step_seconds is not None
        minutes = START_MINUTES + round(2 * STEPS * verdict.step_seconds / MINUTE)
        return ChosenTrial(
            self.trial,
            (f"name={self.name}", *SHORT_RUN, *self._words(point), f'slurm.time="{minutes}"'),
            verdict.layout,
            point.num_layers,
            point.sequence_length,
            verdict.device_bytes,
            verdict.step_seconds,
        )

    def _priced(self, point: _Point) -> LayoutVerdict:
        if point not in self.verdicts:
            self.verdicts[point] = self._price(point)
        return self.verdicts[point]

    def _price(self, point: _Point) -> LayoutVerdict:
        setting = self.setting_of(self._words(point))
        layout = Layout(
            tensor=point.sizes.tensor,
            pipeline=point.sizes.pipeline,
            context=point.sizes.context,
            expert=point.sizes.expert,
            data=setting.recipe.world_size // point.sizes.replica_devices,
            micro_batch_size=point.micro_batch_size,
            sequence_parallel=int(self._sequence_parallel(point.sizes)),
            zero_stage=self.trial.zero_stage,
            recompute=RECOMPUTE_NAMES.index(self.trial.recompute),
        )
        return judge_layouts(setting, [layout])[0]

    def _sequence_parallel(self, sizes: _Sizes) -> bool:
        return self.base.recipe.backend.on_megatron_core and sizes.tensor > 1

    def _words(self, point: _Point) -> tuple[str, ...]:
        """Return the overrides on which the price of a size hangs."""
        recipe = self.base.recipe
        data = recipe.world_size // point.sizes.replica_devices
        batch = data * point.micro_batch_size * MICRO_BATCHES * point.sizes.pipeline
        layout = {
            **kept_techniques(recipe.document),
            **SWITCHED_OFF,
            "techniques": ASKED_ONLY,
            **point.sizes._asdict(),
            "data": data,
            "micro_batch_size": point.micro_batch_size,
            "sequence_parallel": self._sequence_parallel(point.sizes),
            "zero_stage": self.trial.zero_stage,
            "recompute": self.trial.recompute,
            **{name: getattr(NO_TECHNIQUES, name) for name in TREATMENT_NAMES if name in MOVING_NAMES},
        }
        if recipe.backend.on_megatron_core:
            layout["layers_by_stage"] = "even"
        return (
            "what_if={}",
            "training.trained_layers=null",
            f"model.num_layers={point.num_layers}",
            f"training.sequence_length={point.sequence_length}",
            f"training.global_batch_size={batch}",
            f"training.steps={min(recipe.training.steps, STEPS)}",
            f"layout={json.dumps(layout)}",
        )


def _powers_of_two(first: int) -> list[int]:
    """Return the micro-batch sizes to try: the first, then larger ones, then smaller ones."""
    sizes = [2**power for power in range(MOST_MICRO_BATCH.bit_length())]
    return [first, *(size for size in sizes if size > first), *(size for size in reversed(sizes) if size < first)]


def kept_techniques(document: Document | None) -> dict[str, object]:
    """Return what the recipe's own `layout` says beside the split, recompute and offload, which each trial sets."""
    written = None if document is None else document.value.get("layout")
    ours = {*LAYOUT_KEYS, *TREATMENT_NAMES}
    return {key: value for key, value in written.items() if key not in ours} if isinstance(written, dict) else {}


LAYOUT_KEYS = (
    *_Sizes._fields,
    *SWITCHED_OFF,
    *("data", "micro_batch_size", "zero_stage", "distributed_optimizer", "recompute", RECOMPUTE_LAYERS),
    "layers_by_stage",
)


def _most_below(below: Callable[[int], bool], most: int) -> int:
    """Return the largest count from 1 to `most` that is `below`, as all smaller ones are; 1 where none is."""
    high = 1
    while high < most and below(min(2 * high, most)):
        high = min(2 * high, most)
    low, high = high, min(2 * high, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if below(middle) else (low, middle - 1)
    return low
