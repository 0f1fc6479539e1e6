"""Workloads with a published layout beside the planner's own choice: what each is predicted to take, with the
preference and without it, and what keeps the published one from being chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from llmlaunch.calibration.margins import Margin
from llmlaunch.cluster.load import load_cluster
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.layout import LayoutColumns
from llmlaunch.planner.plan import Candidate, as_planned
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.load import recipe_from
from llmlaunch.timing.step import step_time
from llmlaunch.units import gib
from support.plans import setting_for

DATA = Path(__file__).resolve().parents[1] / "data" / "published_layouts.json"
# A published layout has no technique that its recipe does not name; the fused loss is in all of them.
NO_TECHNIQUES = {
    "recompute": "none",
    "offload_modules": [],
    "offload_layers": 0,
    "offload_optimizer": 0,
    "zero_stage": 1,
    "loss": "native",
    "mlp_chunks": 1,
    "delay_weight_gradients": False,
    "overlap_shared_expert": False,
    "overlap_expert_communication": False,
    "tp_comm_overlap": False,
    "context_comm": "p2p",
    "cuda_graphs": [],
}
SAME_KERNEL = {"loss": "native"}
SWITCHES = (
    "tp_comm_overlap",
    "token_dispatcher",
    "flex_backend",
    "cuda_graphs",
    "overlap_expert_communication",
    "delay_weight_gradients",
)
SIZES = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "micro_batch_size": "MBS",
}
IN_ALL = ("sequence_parallel", "expert_tensor", "layers_by_stage")  # follow from the sizes and the model


@dataclass(frozen=True)
class Published:
    """One published layout: the keys under `layout:` that pin it, its speed, and the release it was measured in."""

    layout: Mapping[str, Any]
    tokens_per_second_per_gpu: float
    release: str


@dataclass(frozen=True)
class Workload:
    """A published workload; the first of its layouts is the fastest that was published for it."""

    name: str
    model: Any
    cluster: str
    devices: int
    sequence_length: int
    global_batch_size: int
    formats: Mapping[str, Any]
    published: tuple[Published, ...]

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.global_batch_size

    @property
    def is_mixture(self) -> bool:
        """Whether its published recipe sends tokens to experts."""
        return any("expert" in each.layout for each in self.published)

    def seconds(self, published: Published) -> float:
        """Return the measured seconds of a step of one of the published layouts."""
        return self.tokens_per_step / (published.tokens_per_second_per_gpu * self.devices)

    def setting(self, layout: Mapping[str, Any], limit: float | None = None) -> Setting:
        """Return the setting of this workload with these keys under `layout:`. `limit` is the share of device memory
        that may be filled, above 1 where more is predicted for a layout that ran; None is the margin by measured runs.
        """
        per_node = load_cluster(self.cluster, Path()).devices_per_node
        libraries = {"libraries": ["deepep", "hybridep"]} if self.is_mixture else {}  # NVIDIA's images have both
        training = {
            "sequence_length": self.sequence_length,
            "global_batch_size": self.global_batch_size,
            "steps": 100,
            **self.formats,
        }
        recipe = {
            "schema": 1,
            "name": "published",
            "model": self.model,
            "backend": {"name": "megatron-lm", **libraries},
            "cluster": self.cluster,
            "nodes": self.devices // per_node,
            "training": training,
            "data": {"mock": True},
            "layout": dict(layout),
        }
        setting = setting_for(recipe_from(parse_document(json.dumps(recipe), self.name)))
        if limit is None:
            return setting
        limit_bytes = int(limit * setting.limit.memory_bytes)
        return replace(setting, limit=replace(setting.limit, limit_bytes=limit_bytes))


def workloads() -> list[Workload]:
    """Return all published workloads."""
    document = json.loads(DATA.read_text("utf-8"))
    return [
        Workload(**{**line, "published": tuple(Published(**each) for each in line["published"])})
        for line in document["workloads"]
    ]


@dataclass(frozen=True)
class PricedLayout:
    """A published layout as it is predicted."""

    candidate: Candidate
    limit: Margin
    terms: Mapping[str, float]

    @property
    def bytes_beyond(self) -> int:
        """By how much it needs more than the limit, 0 where it is safe."""
        return max(self.candidate.device_bytes - self.limit.limit_bytes, 0)

    @property
    def share_needed(self) -> float:
        """The share of device memory it needs, in whole percent above it."""
        return ceil(100 * self.candidate.device_bytes / self.limit.memory_bytes) / 100


def priced(workload: Workload, published: Published) -> PricedLayout | str:
    """Return a published layout as predicted, or the rule of the backend that refuses it."""
    setting = workload.setting(NO_TECHNIQUES | dispatcher_of(workload) | dict(published.layout))
    result = search(setting)
    if not len(result.points):
        return ", ".join(sorted(result.refused)) or "no such split"
    candidate = result.candidate(setting.recipe, 0)
    return PricedLayout(candidate, setting.limit, terms_of(setting, candidate))


def dispatcher_of(workload: Workload) -> dict[str, Any]:
    """Return the dispatcher of a mixture whose published recipe names none."""
    setting = workload.setting({})
    return {} if setting.recipe.model.moe is None else {"token_dispatcher": "alltoall"}


@dataclass(frozen=True)
class Choice:
    """What the planner takes: the candidate, and the seconds of its step by what they are spent on."""

    candidate: Candidate
    terms: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The published layout of a workload beside the planner's choices under one limit of memory: `fastest` with the
    preference switched off, `chosen` with it; None where nothing is safe. `limit` is the share of device memory, None
    for the margin by measured runs."""

    workload: Workload
    theirs: PricedLayout
    limit: float | None
    fastest: Choice | None
    chosen: Choice | None

    @property
    def fair(self) -> bool:
        """Whether the published layout is safe under this limit, too."""
        return self.limit is not None or not self.theirs.bytes_beyond

    def slower(self, ours: Choice | None) -> float | None:
        """Return by what share our choice is predicted slower than theirs; None where nothing is safe."""
        return None if ours is None else ours.candidate.step_seconds / self.theirs.candidate.step_seconds - 1.0


def compared(workload: Workload, theirs: PricedLayout, limit: float | None = None) -> Comparison:
    """Search the workload with and without the preference."""
    fastest = best_choice(workload, {"preference": False}, limit)
    return Comparison(workload, theirs, limit, fastest, best_choice(workload, {}, limit))


def best_choice(workload: Workload, layout: Mapping[str, Any], limit: float | None) -> Choice | None:
    """Return the choice of a search that has everything left open; of dense models the faster of two, the other with
    the switches that the published recipe asks for and that a search does not try by itself."""
    published = workload.published[0].layout
    asked = {} if workload.is_mixture else {n: v for n, v in published.items() if n in SWITCHES}
    recipes = [SAME_KERNEL | layout, *([SAME_KERNEL | asked | layout] if asked else [])]
    choices = [choice for keys in recipes if (choice := first_choice(workload.setting(keys, limit))) is not None]
    return min(choices, key=lambda choice: choice.candidate.step_seconds, default=None)


def first_choice(setting: Setting) -> Choice | None:
    result = search(setting)
    if not result.safe.any():
        return None
    candidate = result.candidate(setting.recipe, 0)
    return Choice(candidate, terms_of(setting, candidate))


def terms_of(setting: Setting, candidate: Candidate) -> dict[str, float]:
    """Return the seconds of the candidate's step by what they are spent on."""
    job = setting.job_of(as_planned(setting.recipe, candidate))
    terms = step_time(job, setting.cluster, LayoutColumns.of([candidate.layout])).terms
    return {name: float(column[0]) for name, column in terms.items()}


def runs(published: Published, candidate: Candidate) -> bool:
    """Whether a published layout has the candidate's sizes; techniques and the cut of the layers are left out."""
    return all(getattr(candidate.layout, n) == published.layout[n] for n in SIZES if n in published.layout)


def summary(rows: Iterable[str]) -> str:
    """Return how much slower the choices are than the published layouts, from the rows of a table in which those are
    safe, too."""
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    fair = [row for row in cells if FILLED in row[0] or BEYOND not in row[4]]
    preferred, fastest = ([max(share, 0.0) for row in fair for share in _shares(row[c])] for c in (6, 8))
    alone = sum(FILLED not in row[0] for row in fair)
    without, with_it = (f"{mean(s):.2%} on average, {max(s):.2%} at most" for s in (fastest, preferred))
    return (
        f"{len(fair)} workloads, {alone} of them by the margin of measured runs. By how much the choice is slower than "
        f"the published layout: without the preference {without}; with it {with_it}"
    )


def _shares(cell: str) -> list[float]:
    """Return the signed share at the end of a cell, if there is one."""
    return [float(share) / 100 for share in re.findall(r"([+-]\d+\.\d+)%\)?$", cell)]


def mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


HEAD = (
    "| workload | NVIDIA's layout (release) | published, s | predicted, s | its memory | our choice | predicted, s | "
    "published, s | without the preference | why they differ |\n|---|---|---|---|---|---|---|---|---|---|\n"
)
FILLED, BEYOND = "of the card filled", "beyond the margin"
BEGIN, END = "<!-- published layouts -->\n", "<!-- end of published layouts -->"


def table_row(each: Comparison) -> str:
    """Return a comparison as a row of Markdown."""
    return f"| {' | '.join(_cells(each))} |\n"


def with_table(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in its table, in place of those of the same workloads, in the order of the data,
    and its summary made anew."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    names = [workload.name for workload in workloads()]
    renewed = {_name(row) for row in rows}
    kept = [line + "\n" for line in old.splitlines() if _name(line) in names and _name(line) not in renewed]
    every = sorted([*kept, *rows], key=lambda row: names.index(_name(row)))
    return f"{before}{BEGIN}{summary(every)}.\n\n{HEAD}{''.join(every)}{END}{after}"


def _name(row: str) -> str:
    return re.sub(rf", \d+ % {FILLED}$", "", row.removeprefix("| ").split(" | ")[0])


def published_cells(workload: Workload) -> list[str]:
    """Return the cells of a row that the data alone decide."""
    best = workload.published[0]
    return [workload.name, f"{layout_text(best.layout)} ({best.release})", f"{workload.seconds(best):.2f}"]


def layout_text(layout: Mapping[str, Any]) -> str:
    """Return a published layout in the words of `Candidate.describe`."""
    parts = [f"{short}{layout[name]}" for name, short in SIZES.items() if layout.get(name, 1) > 1 or short in "TP PP"]
    named = {name: value for name, value in layout.items() if name not in (*SIZES, *IN_ALL) and value is not None}
    return " ".join(parts + [_technique(name, value) for name, value in named.items()])


def _technique(name: str, value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    return name if value is True else f"{name}={text}"


def _cells(each: Comparison) -> list[str]:
    theirs = each.theirs
    beyond = f", {gib(theirs.bytes_beyond)} GiB {BEYOND}" if theirs.bytes_beyond else ""
    name, *published = published_cells(each.workload)
    limit = "" if each.limit is None else f", {100 * each.limit:.0f} % {FILLED}"
    return [
        name + limit,
        *published,
        f"{theirs.candidate.step_seconds:.2f}",
        f"{100 * theirs.share_needed:.0f} %{beyond}",
        *_choice_cells(each),
        "-" if each.fastest is None else f"{each.fastest.candidate.describe()}, {each.slower(each.fastest):+.1%}",
        _why(each),
    ]


def _choice_cells(each: Comparison) -> list[str]:
    if each.chosen is None:
        return ["nothing is safe", "-", "-"]
    candidate, workload = each.chosen.candidate, each.workload
    ran = next((workload.seconds(p) for p in workload.published if runs(p, candidate)), None)
    return [
        candidate.describe(),
        f"{candidate.step_seconds:.2f} ({each.slower(each.chosen):+.1%})",
        "-" if ran is None else f"{ran:.2f}",
    ]


def _why(each: Comparison) -> str:
    """Return the reason of the difference: what of theirs is not safe, and on what the time of a step differs most."""
    if each.chosen is None:
        return f"no layout is predicted to fit: the published one needs {gib(each.theirs.bytes_beyond)} GiB more"
    if runs(each.workload.published[0], each.chosen.candidate):
        return "the same"
    total = each.theirs.candidate.step_seconds
    shares = {name: (each.chosen.terms.get(name, 0.0) - value) / total for name, value in each.theirs.terms.items()}
    shares |= {name: value / total for name, value in each.chosen.terms.items() if name not in shares}
    parts = [f"{share:+.1%} {name.replace('_', ' ')}" for name, share in _largest(shares)]
    refused = "theirs is refused by the margin; " if not each.fair else ""
    return refused + (", ".join(parts) or "nothing the model of time can tell")


def _largest(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    worth = [(name, share) for name, share in shares.items() if abs(share) >= 0.002]
    return sorted(worth, key=lambda item: -abs(item[1]))[:3]
