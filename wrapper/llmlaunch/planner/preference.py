"""What a layout's unusual parts cost beside its step time, so that of nearly equal layouts the one that an expert would
sign is chosen.

The habits are data: `preference.json`, one line each, with its price as a share of the step, its reason, and its source
where there is one; those about one technique are declared with it. Ordinary habits cost at most `within` of a step
together: they decide between layouts that the model of time cannot tell apart, and never more. A habit with an
`own_price` costs that in addition, because an expert wants so much in return. Beside the prices, the file has the rule
by which a plan keeps head-room (`planner/headroom.py`).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn, NarrowColumn
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import LAYOUT_FIELDS, OFFLOAD_LAYERS, LayoutColumns
from llmlaunch.planner.points import Points
from llmlaunch.planner.search_space import SPLIT_FIELDS
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES, SWITCH_NAMES, Techniques
from llmlaunch.techniques.technique import ACTIVATIONS_ON_HOST, declarations, parameter_owners

Columns = Mapping[str, Any]
COMPARISONS: Mapping[str, Callable[[Any, float], Any]] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
}
SWITCHES = tuple(name for name in SWITCH_NAMES if name not in parameter_owners(Techniques))
PLAIN_CUT = ((), (1, 2))  # even stages, and uneven ones that differ at the ends alone
PIECE = 16384  # points whose factors are worked out together
POWERS_OF_TWO = ("tensor", "context", "expert", "micro_batch_size")


@frozen
class Habit:
    """One habit: a layout for which all of `when` holds costs `price`, a share of its step time, times the column
    `each` where there is one. `when` maps columns to a comparison and its number; all columns of a habit are of the
    split, of the step techniques, or of the state techniques."""

    name: str
    when: Mapping[str, tuple[str, float]]
    price: float
    reason: str
    own_price: bool = False
    each: str | None = None
    source: str | None = None

    def concerns(self, columns: Columns) -> bool:
        """Whether these columns are the ones the habit looks at."""
        return self.when.keys() <= columns.keys()

    def prices(self, columns: Columns) -> Any:
        """Return the share of a step it costs, 0 where it does not apply, as a column or a number like `columns`."""
        applies: Any = True
        for name, (comparison, number) in self.when.items():
            applies = applies & COMPARISONS[comparison](columns[name], number)
        return self.price * (applies if self.each is None else applies * columns[self.each])


@frozen
class HeadroomRule:
    """A plan whose stated risk is above `risk` gives way to a layout of at most that risk whose step takes at most the
    share `within` longer."""

    risk: float
    within: float
    reason: str
    source: str


@cache
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(Path(__file__).with_name("preference.json").read_text("utf-8"))
    return document


def within() -> float:
    """Return the share of a step that all ordinary habits cost together at most."""
    return float(_document()["within"])


@cache
def headroom_rule() -> HeadroomRule:
    """Return the rule by which a plan keeps head-room."""
    return HeadroomRule(**_document()["headroom"])


@cache
def habits() -> tuple[Habit, ...]:
    """Return all habits, those that are declared with techniques before those of the file."""
    declared = dict.fromkeys(each.habit for each in declarations(Techniques).values() if each.habit is not None)
    of_techniques = (Habit(each.name, {each.name: (">", 0)}, each.price, each.reason, True) for each in declared)
    return (*of_techniques, *(Habit(**line) for line in _document()["habits"]))


def preference_factor(recipe: Recipe, points: Points) -> FloatColumn:
    """Return by how much more each point counts than its step time: at least 1, and 1 everywhere where the recipe
    switches the preference off."""
    factor = np.ones(len(points))
    if not recipe.preference:
        return factor
    split = _prices(split_columns(recipe, points.splits), len(points.splits))
    step = _prices_of_used(points.step_techniques, points.rows.step_techniques)
    state = _prices_of_used(points.state_techniques, points.rows.state_techniques)
    for piece in (slice(start, start + PIECE) for start in range(0, len(factor), PIECE)):
        rows = points.rows.take(piece)
        factor[piece] = factor_of(split[:, rows.split], step[:, rows.step_techniques], state[:, rows.state_techniques])
    return factor


def _prices_of_used(
    techniques: Sequence[StepTechniques] | Sequence[StateTechniques], index: NarrowColumn
) -> FloatColumn:
    """Return `technique_prices` where a point has these techniques, and nothing elsewhere: few points have few."""
    used = np.flatnonzero(np.bincount(index, minlength=len(techniques)))
    prices = np.zeros((2, len(techniques)))
    if len(used):
        prices[:, used] = technique_prices([techniques[place] for place in used.tolist()])
    return prices


def factor_of(*prices: FloatColumn) -> FloatColumn:
    """Return the factor that follows from the prices of a layout's parts, each in two rows: of ordinary habits and of
    those with a price of their own."""
    ordinary, own = reduce(operator.add, prices)
    factor: FloatColumn = 1.0 + np.minimum(ordinary, within()) + own
    return factor


def least_split_prices(recipe: Recipe, splits: LayoutColumns) -> FloatColumn:
    """Return what each split costs at least by its habits, however uneven stages are cut, as `factor_of` takes it."""
    return _prices(
        split_columns(recipe, replace(splits, partition=1 * splits.uneven, partitions=PLAIN_CUT)), len(splits)
    )


def technique_prices(techniques: Sequence[StepTechniques] | Sequence[StateTechniques]) -> FloatColumn:
    """Return what sets of techniques cost by their habits, one column each, as `factor_of` takes it."""
    return np.concatenate([_technique_prices(each) for each in techniques], axis=1)


def prices_at(recipe: Recipe, points: Points, index: int) -> list[tuple[Habit, float]]:
    """Return the habits that apply to one point, each with the share of a step it costs."""
    split = points.splits.take(points.rows.split[index : index + 1])
    step, state = points.techniques(index)
    columns = {name: float(column[0]) for name, column in split_columns(recipe, split).items()}
    columns |= technique_columns(step) | technique_columns(state)
    asked = [(habit, float(habit.prices(columns))) for habit in habits()]
    return [(habit, price) for habit, price in asked if price]


def _prices(columns: Columns, count: int) -> FloatColumn:
    """Return two rows of `count` shares of a step: what the ordinary habits about these columns cost, and what those
    with a price of their own do."""
    prices = np.zeros((2, count))
    for habit in habits():
        if habit.concerns(columns):
            prices[int(habit.own_price)] += habit.prices(columns)
    return prices


@cache
def _technique_prices(techniques: StepTechniques | StateTechniques) -> FloatColumn:
    return _prices(technique_columns(techniques), 1)


def split_columns(recipe: Recipe, splits: LayoutColumns) -> dict[str, IntColumn | FloatColumn]:
    """Return what habits may ask of a split, by name."""
    cluster, cuts = recipe.cluster, splits.partitions
    parts = splits.tensor * splits.pipeline * splits.context * splits.virtual_pipeline
    filled_ends = 1 if recipe.model.mtp_num_layers else 0  # the last stage has the layers that predict further tokens
    empty = np.array([any(layers == 0 for layers in cut[: len(cut) - filled_ends]) for cut in cuts])
    unlike = np.array([len(set(cut[1:-1])) > 1 for cut in cuts])
    return {name: getattr(splits, name) for name in SPLIT_FIELDS} | {
        "tokens_of_a_context_rank": recipe.workload.sequence_length / splits.context,
        "nvlink_domains_of_tensor": splits.tensor / cluster.nvlink_domain_devices,
        "nodes_of_tensor": splits.tensor / cluster.devices_per_node,
        "nvlink_domains_of_experts": splits.expert * splits.expert_tensor / cluster.nvlink_domain_devices,
        "odd_sizes": np.sum([_odd(getattr(splits, name)) for name in POWERS_OF_TWO], axis=0),
        "split_doublings": np.log2(parts),
        "uneven": splits.uneven,
        "empty_stages": empty[splits.partition],
        "unlike_middle_stages": unlike[splits.partition],
    }


def _odd(sizes: IntColumn) -> IntColumn:
    """1 where a size is no power of two, else 0."""
    odd: IntColumn = np.not_equal(sizes & (sizes - 1), 0).astype(np.int64)
    return odd


def technique_columns(techniques: StepTechniques | StateTechniques) -> dict[str, float]:
    """Return what habits may ask of the techniques: the fields of a layout among them, how many switches are on, and
    by its name whether a habit that is declared with techniques applies."""
    declared = declarations(type(techniques))
    columns = {f.name: float(getattr(techniques, f.name)) for f in fields(techniques) if f.name in LAYOUT_FIELDS}
    on = {name for name in declared if getattr(techniques, name) != getattr(NO_TECHNIQUES, name)}
    for name, each in declared.items():
        if each.habit is not None:
            columns[each.habit.name] = max(columns.get(each.habit.name, 0.0), float(name in on))
    if isinstance(techniques, StepTechniques):
        if techniques.offload_layers or techniques.solved == OFFLOAD_LAYERS:
            columns[ACTIVATIONS_ON_HOST.name] = 1.0
        columns["switches"] = float(len(on.intersection(SWITCHES)))
    return columns
