"""The error for a recipe without any legal layout: the tightest rule, the pins that clash, and what would be legal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.layout import Rule
from llmlaunch.planner.legal_values import LegalValues, any_legal, legal_values, rule_failures, size_failures
from llmlaunch.planner.legality import situation
from llmlaunch.planner.relaxed_pins import as_pin, relax_pins
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.sizing import splittable
from llmlaunch.planner.smallest_change import find_advice, fixed_value, unfixed
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import place_of, written_document, written_pin
from llmlaunch.rundir.values import counted, to_type

__all__ = ["TightestRule", "locked_is_illegal", "no_layout", "tightest_rule", "tightest_size_rule"]

AT_ONCE = 256  # numbers of nodes looked at together


@dataclass(frozen=True)
class TightestRule:
    """The rule that stands in the way most: the one without which the most of `searched` layouts would be legal
    (`alone` of them fail it and no other), else the one that refuses the most. `rule` is None where the devices cannot
    be split."""

    rule: Rule | None
    alone: int
    searched: int


def no_layout(setting: Setting) -> UserError:
    """Return the error for a search space without a legal layout."""
    relaxed = setting.with_recipe(relax_pins(setting))
    values = legal_values(setting, relaxed)
    pins = values.conflict()
    if not pins:
        return UserError(_nothing_legal(setting))
    why = _broken_rule(setting, setting.with_recipe(relax_pins(setting, pins)))
    clash = _contradiction(setting.recipe, pins, _clashing_techniques(setting, pins))
    return UserError(f"{clash}: {_because(setting, why)}. {_remedies(setting, values, pins)}")


def locked_is_illegal(setting: Setting) -> UserError:
    """Return the error for a recipe whose locked plan a rule refuses."""
    recipe, rule = setting.recipe, tightest_rule(setting).rule
    reason = "the devices cannot be split so" if rule is None else f"{rule.sentence} ({rule.where})"
    return UserError(
        f"{recipe.locked_by}: the plan it keeps is not legal for this recipe: {reason}. To plan anew and keep that: "
        f"{to_type('plan', recipe.path, *recipe.overrides, '--lock')}; to leave the lock aside this once: --replan"
    )


def tightest_rule(setting: Setting) -> TightestRule:
    """Return the tightest rule of a setting without a legal layout."""
    rules = setting.backend.rules(setting.recipe)
    return _tightest(rules, _failures(setting, rules))


def tightest_size_rule(setting: Setting) -> TightestRule:
    """Return the tightest of the rules that look at sizes alone, without a rule where some split passes them all."""
    rules = [rule for rule in setting.backend.rules(setting.recipe) if not rule.of_techniques]
    failures = [(1, failed) for failed in size_failures(setting, rules)]
    if all(failed.any(axis=0).all() for _, failed in failures):
        return _tightest(rules, failures)
    return TightestRule(None, 0, sum(failed.shape[1] for _, failed in failures))


def _broken_rule(setting: Setting, relaxed: Setting) -> TightestRule:
    """Return the tightest rule of the `relaxed` setting, which keeps the pins that clash and no others, among the rules
    that every layout of `setting` breaks; among those that some break where no rule refuses them all. A rule that holds
    for what the person wrote is no reason."""
    rules = setting.backend.rules(setting.recipe)
    always, sometimes = np.ones(len(rules), dtype=np.bool_), np.zeros(len(rules), dtype=np.bool_)
    for _, failed in _failures(setting, rules):
        always &= failed.all(axis=1)
        sometimes |= failed.any(axis=1)
    broken = {
        rule.key for rule, is_broken in zip(rules, always if always.any() else sometimes, strict=True) if is_broken
    }
    if not sometimes.any():
        return TightestRule(None, 0, 0)
    others = relaxed.backend.rules(relaxed.recipe)
    return _tightest(others, _failures(relaxed, others), broken)


def _tightest(
    rules: Sequence[Rule], failures: Iterable[tuple[int, BoolColumn]], among: Collection[str] | None = None
) -> TightestRule:
    """Return the tightest of the rules, or of those with a key `among` some, by which of them refuse which layouts."""
    alone, refusing, searched = np.zeros(len(rules)), np.zeros(len(rules)), 0
    for times, failed in failures:
        alone += times * np.count_nonzero(failed[:, np.equal(failed.sum(axis=0, dtype=np.int16), 1)], axis=1)
        refusing += times * np.count_nonzero(failed, axis=1)
        searched += times * failed.shape[1]
    if among is not None:
        named = np.array([rule.key in among for rule in rules])
        alone, refusing = np.where(named, alone, 0), np.where(named, refusing, 0)
    if not searched or not refusing.any():
        return TightestRule(None, 0, searched)
    index = int(np.argmax(alone if alone.any() else refusing))
    return TightestRule(rules[index], int(alone[index]), searched)


def _failures(setting: Setting, rules: Sequence[Rule]) -> Iterator[tuple[int, BoolColumn]]:
    """Yield which rule (row) refuses which split (column), and for how many combinations of techniques that is so."""
    for _, times, failed in rule_failures(setting, rules):
        yield times, failed


def _because(setting: Setting, why: TightestRule) -> str:
    """Return the rule that is broken, with the numbers of the person's own layout that break it."""
    if why.rule is None:
        recipe = setting.recipe
        return f"they leave no split of {counted(recipe.world_size, 'device')} ({counted(recipe.nodes, 'node')} x " \
               f"{recipe.cluster.devices_per_node})"  # fmt: skip
    return f"{why.rule.sentence}{_figures(setting, why.rule)} [{why.rule.key}; {why.rule.where}]"


def _figures(setting: Setting, rule: Rule) -> str:
    """Return the numbers of a layout of the setting that break the rule, and as few others as any; nothing where the
    rule cannot say them."""
    if rule.figures is None:
        return ""
    rules = setting.backend.rules(setting.recipe)
    index = [other.key for other in rules].index(rule.key)
    fewest, example = len(rules) + 1, None
    for splits, _, failed in rule_failures(setting, rules):
        rows = np.flatnonzero(failed[index])
        counts = failed[:, rows].sum(axis=0)
        if len(rows) and counts.min() < fewest:
            fewest, example = int(counts.min()), splits.take(rows[[int(np.argmin(counts))]])
    return "" if example is None else f" (here {rule.figures(situation(setting.recipe, example))})"


def _clashing_techniques(setting: Setting, pins: Sequence[str]) -> list[str]:
    """Return the techniques that the recipe writes each of which, left free, would give these pins a legal layout."""
    relaxed = relax_pins(setting, pins)
    written = [name for name in relaxed.fixed if _written_path(relaxed, name) is not None]
    return [name for name in written if any_legal(setting.with_recipe(_freed(relaxed, name)))]


def _freed(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe without what it says of a technique; not every backend searches the formats of gradients."""
    freed = unfixed(recipe, name)
    if name != "gradient_dtype":
        return freed
    return replace(freed, training=replace(freed.training, gradient_dtype=None))


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
    return legal + find_advice(setting).sentence()


def _nothing_legal(setting: Setting) -> str:
    """Return the message where no pin is to blame: which batch, number of nodes or sequence length would do."""
    recipe = setting.recipe
    why = _broken_rule(setting, setting.with_recipe(relax_pins(setting)))
    sizes = [f"{key}: {value} (from {before})" for key, value, before in _legal_sizes(setting)]
    remedy = (
        f"Legal would be {', or '.join(sizes)}" if sizes else "Change the model, the batch or the nodes accordingly"
    )
    place = place_of(recipe, ("layout",))
    return f"{place}: layout: none of {why.searched:,} layouts is legal: {_because(setting, why)}. {remedy}"


def _legal_sizes(setting: Setting) -> Iterator[tuple[str, int, int]]:
    """Yield (key, value, present value) of the nearest batch, number of nodes and sequence length with a legal layout,
    each changed alone."""
    recipe = setting.recipe
    work, nodes = recipe.workload, recipe.nodes
    batches = sorted({_round(work.global_batch_size, part) for part in _parts(recipe.world_size)})
    lengths = sorted({_round(work.sequence_length, 1 << power) for power in range(12)})
    sizes = {
        "training.global_batch_size": (work.global_batch_size, batches),
        "nodes": (nodes, range(1, 2 * nodes + 1)),
        "training.sequence_length": (work.sequence_length, lengths),
    }
    for key, (now, values) in sizes.items():
        nearest = sorted((v for v in values if v != now), key=lambda v: (abs(np.log2(v / now)), v))
        for value in _splittable(setting, nearest) if key == "nodes" else nearest:
            if any_legal(setting.with_recipe(_resized(recipe, key, value))):
                yield key, value, now
                break


def _splittable(setting: Setting, nodes: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of nodes whose devices can be split at all, in their order."""
    for start in range(0, len(nodes), AT_ONCE):
        counts = np.array(nodes[start : start + AT_ONCE])
        yield from counts[splittable(setting, counts)].tolist()


def _round(size: int, part: int) -> int:
    """Return the multiple of `part` nearest to `size`."""
    return max(part * round(size / part), part)


def _parts(whole: int) -> list[int]:
    return [part for part in range(1, whole + 1) if whole % part == 0]


def _resized(recipe: Recipe, key: str, value: int) -> Recipe:
    if key == "nodes":
        return replace(recipe, nodes=value)
    size: dict[str, Any] = {key.partition(".")[2]: value}
    return replace(recipe, training=replace(recipe.training, **size))


def _values(pin: object) -> list[object]:
    return list(pin) if isinstance(pin, tuple) else [pin]


def _listed(values: Sequence[object]) -> str:
    shown = ["true" if v is True else "false" if v is False else str(v) for v in values]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
