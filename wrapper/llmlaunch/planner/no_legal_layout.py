"""The error for a recipe without any legal layout: the tightest rule, the pins that clash, and what would be legal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.layout import TECHNIQUE_FIELDS, LayoutColumns, Rule
from llmlaunch.planner.changes import as_pin, fixed_value, relax_pins, resized, rules_failed, unfixed
from llmlaunch.planner.legality import first_failed, situation, technique_failures, technique_legality
from llmlaunch.planner.search_space import (
    TechniqueSpace,
    as_ints,
    enumerate_splits,
    enumerate_uneven,
    technique_space,
    technique_values,
)
from llmlaunch.planner.setting import SPLIT_SHARE, Setting, count_candidates, within_budget
from llmlaunch.planner.sizing import splittable
from llmlaunch.planner.smallest_change import find_advice
from llmlaunch.planner.stage_search import have_cuts
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import place_of, written_document, written_pin
from llmlaunch.rundir.values import counted, to_type

AT_ONCE = 256  # numbers of nodes looked at together
REMEDY_CANDIDATES = 200_000  # of what is looked at for one kind of remedy (`PricingBudget`)


@frozen
class LegalValues:
    """The different combinations of values (rows) that the fields `names` (columns) have in legal layouts, and which
    of them each pin of a recipe allows (of the same shape). A contradiction of pins is one of legality, so nothing is
    priced, and a million layouts have few combinations."""

    names: tuple[str, ...]
    values: IntColumn
    kept: BoolColumn

    def conflict(self) -> tuple[str, ...] | None:
        """Return the smallest set of pins that no legal layout keeps together; None where all can be kept, and an empty
        set where no layout is legal whatever the pins."""
        columns = range(len(self.names))
        for some in (some for size in range(len(self.names) + 1) for some in combinations(columns, size)):
            if not np.any(self.kept[:, some].all(axis=1)):
                return tuple(self.names[j] for j in some)
        return None

    def beside_the_others(self, name: str) -> list[int]:
        """Return the values of `name` in legal layouts that keep all other pins."""
        index = self.names.index(name)
        others = np.delete(self.kept, index, axis=1).all(axis=1)
        return sorted(set(self.values[others, index].tolist()))


def legal_values(setting: Setting, relaxed: Setting) -> LegalValues:
    """Return the values that the pinned fields of `setting` have in the legal layouts of `relaxed`, which is its recipe
    with those fields free."""
    pins = setting.recipe.pins
    of_split = [name for name in pins if name not in TECHNIQUE_FIELDS]
    different: set[tuple[int, ...]] = set()
    numbered: LayoutColumns | None = None
    for splits, legal, techniques in _legal_splits(relaxed):
        if splits is not numbered:
            numbered, (few, row_of) = splits, splits.distinct(of_split)
        rows = ({name: int(getattr(few, name)[row]) for name in of_split} for row in np.unique(row_of[legal]).tolist())
        different |= {tuple((row | techniques)[name] for name in pins) for row in rows}
    values = np.array(sorted(different), dtype=np.int64).reshape(len(different), len(pins))
    kept = np.ones(values.shape, dtype=np.bool_)
    for j, (name, pin) in enumerate(pins.items()):
        kept[:, j] = np.isin(values[:, j], as_ints(name, pin))
    return LegalValues(tuple(pins), values, kept)


def any_legal(setting: Setting) -> bool:
    """Return whether any layout of the setting's space is legal."""
    return any(legal.any() for _, legal, _ in _legal_splits(setting))


def _offers(setting: Setting) -> Iterator[tuple[LayoutColumns, TechniqueSpace]]:
    """Yield the splits of a search with the techniques that are tried with them: those of even stages, then those of
    uneven ones that the search knows a cut of (`uneven_search`), with which no amount is solved."""
    recipe, space = setting.recipe, setting.backend.space(setting.recipe)
    techniques = technique_space(recipe, setting.backend)
    uneven = enumerate_uneven(recipe, space)
    uneven = uneven.take(have_cuts(setting.job, uneven)) if len(uneven) else uneven
    steps = tuple(techniques.step[index] for index in techniques.step_without_amounts)
    for splits, offered in ((enumerate_splits(recipe, space), techniques.step), (uneven, steps)):
        if len(splits) and offered:
            count_candidates(SPLIT_SHARE * len(splits))
            yield splits, replace(techniques, step=offered)


def _legal_splits(setting: Setting) -> Iterator[tuple[LayoutColumns, BoolColumn, dict[str, int]]]:
    """Yield splits with which of them are legal, once for each different answer, and the fields of a layout that
    techniques set."""
    recipe, rules = setting.recipe, setting.backend.rules(setting.recipe)
    asked = [rule for rule in rules if rule.of_techniques]
    for splits, space in _offers(setting):
        failed = first_failed([rule for rule in rules if not rule.of_techniques], situation(recipe, splits))
        splits, different = splits.take(np.flatnonzero(failed < 0)), set()
        if not len(splits):
            continue
        legality = technique_legality(space, splits, asked, range(len(space.step)))
        for i, j in np.ndindex(legality.mask_of.shape):
            techniques = technique_values(space.step[i], space.state[j])
            key = int(legality.mask_of[i, j]), *techniques.values()
            if key not in different:
                different.add(key)
                yield splits, legality.masks[key[0]], techniques


def _failures(setting: Setting, rules: Sequence[Rule]) -> Iterator[tuple[LayoutColumns, int, BoolColumn]]:
    """Yield splits with which rule (row) refuses which of them (column), and for how many combinations of techniques
    that is so."""
    of_techniques = np.array([rule.of_techniques for rule in rules])
    asked = [rule for rule in rules if rule.of_techniques]
    for splits, space in _offers(setting):
        failed = rules_failed(setting.recipe, splits, rules)
        if not asked:
            yield splits, 1, failed
            continue
        for times, failed[of_techniques] in technique_failures(space, splits, asked):
            yield splits, times, failed


def no_layout(setting: Setting) -> UserError:
    """Return the error for a search space without a legal layout."""
    relaxed = setting.with_recipe(relax_pins(setting))
    values = legal_values(setting, relaxed)
    pins = values.conflict()
    if not pins:
        return UserError(_nothing_legal(setting))
    rule, _ = _broken_rule(setting, setting.with_recipe(relax_pins(setting, pins)))
    techniques, _ = within_budget(REMEDY_CANDIDATES, _clashing_techniques(setting, pins))
    clash = _contradiction(setting.recipe, pins, techniques)
    return UserError(f"{clash}: {_because(setting, rule)}. {_remedies(setting, values, pins)}")


def locked_is_illegal(setting: Setting) -> UserError:
    """Return the error for a recipe whose locked plan a rule refuses."""
    recipe, (rule, _) = setting.recipe, tightest_rule(setting)
    reason = "the devices cannot be split so" if rule is None else f"{rule.sentence} ({rule.where})"
    return UserError(
        f"{recipe.locked_by}: the plan it keeps is not legal for this recipe: {reason}. To plan anew and keep that: "
        f"{to_type('plan', recipe.path, *recipe.overrides, '--lock')}; to leave the lock aside this once: --replan"
    )


def tightest_rule(
    setting: Setting, among: Collection[str] | None = None, sizes_alone: bool = False
) -> tuple[Rule | None, int]:
    """Return the rule that stands in the way most where no layout is legal, and how many were looked at: the rule
    without which the most of them would be legal, else the one that refuses the most, of those with a key `among` some.
    There is none where the devices cannot be split; and none of the rules that look at `sizes_alone` where some split
    passes them all."""
    rules = [rule for rule in setting.backend.rules(setting.recipe) if not (sizes_alone and rule.of_techniques)]
    alone, refusing, searched, passed = np.zeros(len(rules)), np.zeros(len(rules)), 0, False
    for _, times, failed in _failures(setting, rules):
        reasons = failed.sum(axis=0, dtype=np.int16)
        alone += times * np.count_nonzero(failed[:, np.equal(reasons, 1)], axis=1)
        refusing += times * np.count_nonzero(failed, axis=1)
        searched += times * failed.shape[1]
        passed |= not reasons.all()
    if among is not None:
        named = np.array([rule.key in among for rule in rules])
        alone, refusing = np.where(named, alone, 0), np.where(named, refusing, 0)
    if not refusing.any() or (sizes_alone and passed):
        return None, searched
    return rules[int(np.argmax(alone if alone.any() else refusing))], searched


def _broken_rule(setting: Setting, relaxed: Setting) -> tuple[Rule | None, int]:
    """Return the tightest rule of the `relaxed` setting, which keeps the pins that clash and no others, among the rules
    that every layout of `setting` breaks; among those that some break where no rule refuses them all. A rule that holds
    for what the person wrote is no reason."""
    rules = setting.backend.rules(setting.recipe)
    always, sometimes = np.ones(len(rules), dtype=np.bool_), np.zeros(len(rules), dtype=np.bool_)
    for _, _, failed in _failures(setting, rules):
        always &= failed.all(axis=1)
        sometimes |= failed.any(axis=1)
    if not sometimes.any():
        return None, 0
    broken = always if always.any() else sometimes
    return tightest_rule(relaxed, {rule.key for rule, is_broken in zip(rules, broken, strict=True) if is_broken})


def _because(setting: Setting, rule: Rule | None) -> str:
    """Return the rule that is broken, with the numbers of the person's own layout that break it."""
    if rule is None:
        recipe = setting.recipe
        return f"they leave no split of {counted(recipe.world_size, 'device')} ({counted(recipe.nodes, 'node')} x " \
               f"{recipe.cluster.devices_per_node})"  # fmt: skip
    return f"{rule.sentence}{_figures(setting, rule)} [{rule.key}; {rule.where}]"


def _figures(setting: Setting, rule: Rule) -> str:
    """Return the numbers of a layout of the setting that break the rule, and as few others as any; nothing where the
    rule cannot say them."""
    if rule.figures is None:
        return ""
    rules = setting.backend.rules(setting.recipe)
    index = [other.key for other in rules].index(rule.key)
    fewest, example = len(rules) + 1, None
    for splits, _, failed in _failures(setting, rules):
        rows = np.flatnonzero(failed[index])
        counts = failed[:, rows].sum(axis=0)
        if len(rows) and counts.min() < fewest:
            fewest, example = int(counts.min()), splits.take(rows[[int(np.argmin(counts))]])
    return "" if example is None else f" (here {rule.figures(situation(setting.recipe, example))})"


def _clashing_techniques(setting: Setting, pins: Sequence[str]) -> Iterator[str]:
    """Yield the techniques that the recipe writes each of which, left free, would give these pins a legal layout."""
    relaxed = relax_pins(setting, pins)
    for name in relaxed.fixed:
        freed = unfixed(relaxed, name)
        if name == "gradient_dtype":  # not every backend searches the formats of gradients
            freed = replace(freed, training=replace(freed.training, gradient_dtype=None))
        if _written_path(relaxed, name) is not None and any_legal(setting.with_recipe(freed)):
            yield name


def _written_path(recipe: Recipe, name: str) -> tuple[str, str] | None:
    """Return the section and key of the recipe that fix a technique; None where the recipe does not write it."""
    section = "training" if name == "gradient_dtype" else "layout"
    document = written_document(recipe)
    values = document.value.get(section) if document is not None else None
    return (section, name) if isinstance(values, dict) and values.get(name) is not None else None


def _contradiction(recipe: Recipe, names: Sequence[str], techniques: Sequence[str]) -> str:
    """Return the sentence on the settings that contradict one another, with file and line of each."""
    pins = [written_pin(recipe, name) for name in names]
    paths = [_written_path(recipe, name) or ("layout", name) for name in techniques]
    keys = [*(pin.key for pin in pins), *map(".".join, paths)]
    places = [*(pin.place for pin in pins), *(place_of(recipe, path) for path in paths)]
    values = [*(recipe.pins[name] for name in names), *(fixed_value(recipe, name) for name in techniques)]
    texts = [f"{key}: {_listed(_values(value))}" for key, value in zip(keys, values, strict=True)]
    first = places[0]
    if len(texts) == 1:
        return f"{first}: {texts[0]} leaves no legal layout"
    shown = [text + ("" if place == first else f" ({place})") for text, place in zip(texts, places, strict=True)]
    if len(shown) == 2:
        return f"{first}: {shown[0]} contradicts {shown[1]}"
    return f"{first}: {', '.join(shown[:-1])} and {shown[-1]} contradict one another"


def _remedies(setting: Setting, values: LegalValues, names: Sequence[str]) -> str:
    """Return what each of the pins might be instead, the others kept, and the smallest change that is also safe."""
    recipe = setting.recipe
    legal_of = {name: values.beside_the_others(name) for name in names}
    remedies = [
        f"{written_pin(recipe, name).key}: {_listed([as_pin(name, v) for v in legal])}"
        for name, legal in legal_of.items()
        if legal
    ]
    legal = f"Legal would be {', or '.join(remedies)}. " if remedies else ""
    return legal + find_advice(setting).sentence


def _nothing_legal(setting: Setting) -> str:
    """Return the message where no pin is to blame: which batch, number of nodes or sequence length would do."""
    recipe = setting.recipe
    rule, searched = _broken_rule(setting, setting.with_recipe(relax_pins(setting)))
    sizes, _ = within_budget(REMEDY_CANDIDATES, _legal_sizes(setting))
    legal = f"Legal would be {', or '.join(sizes)}"
    remedy = legal if sizes else "Change the model, the batch or the nodes accordingly"
    place = place_of(recipe, ("layout",))
    return f"{place}: layout: none of {searched:,} layouts is legal: {_because(setting, rule)}. {remedy}"


def _legal_sizes(setting: Setting) -> Iterator[str]:
    """Yield the nearest batch, number of nodes and sequence length with a legal layout, each changed alone."""
    recipe = setting.recipe
    batch, nodes, length = recipe.workload.global_batch_size, recipe.nodes, recipe.workload.sequence_length
    parts = [part for part in range(1, recipe.world_size + 1) if recipe.world_size % part == 0]
    sizes = {
        "training.global_batch_size": (batch, {_round(batch, part) for part in parts}),
        "nodes": (nodes, range(1, 2 * nodes + 1)),
        "training.sequence_length": (length, {_round(length, 1 << power) for power in range(12)}),
    }
    for key, (now, values) in sizes.items():
        nearest = sorted((v for v in values if v != now), key=lambda v: (abs(np.log2(v / now)), v))
        able = _splittable(setting, nearest) if key == "nodes" else nearest
        legal = (v for v in able if any_legal(setting.with_recipe(resized(recipe, key, v).recipe)))
        for value in islice(legal, 1):
            yield f"{key}: {value} (from {now})"


def _splittable(setting: Setting, nodes: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of nodes whose devices can be split at all, in their order."""
    for start in range(0, len(nodes), AT_ONCE):
        counts = np.array(nodes[start : start + AT_ONCE])
        yield from counts[splittable(setting, counts)].tolist()


def _round(size: int, part: int) -> int:
    """Return the multiple of `part` nearest to `size`."""
    return max(part * round(size / part), part)


def _values(pin: object) -> list[object]:
    return list(pin) if isinstance(pin, tuple) else [pin]


def _listed(values: Sequence[object]) -> str:
    shown = ["true" if v is True else "false" if v is False else str(v) for v in values]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
