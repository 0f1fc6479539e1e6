"""The commented starter that `llmlaunch init` writes: a recipe of the gallery with the meaning of each line, what a job
needs that trains for real, and what SLURM says of this site.

The gallery holds the values, the published JSON Schema the meanings, and templates/starter.yaml.j2 the rest; a starter
means what its recipe of the gallery means, but for the cluster, partition and account that a site fills in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile_text import SiteOffer, quoted
from llmlaunch.documents.templates import render
from llmlaunch.families.hub_ids import hub_id_of
from llmlaunch.frameworks.framework import framework_named
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.recipe.key_reference import recipe_keys
from llmlaunch.report.text import one_line
from llmlaunch.rundir.values import to_type

EDITOR_SCHEMA = "llmlaunch.schema.json"
"""The recipe's JSON Schema beside a starter, which its first line names: an editor needs no network for it, and the
line stays true in another checkout and on another machine."""
_KEY = re.compile(r"( *)([a-z_]+):(?: (.*))?")
_COLUMN, _WIDTH = 33, 100
_SHORT = {
    "schema": "version of this format",
    "name": "name of the recipe and of its jobs",
    "model": "a preset, a Hugging Face id, or a folder with a config.json",
    "cluster": "a shipped profile; llmlaunch init --site drafts one of your site",
    "nodes": "or auto: the fewest that fit",
}
"""Meanings that fit behind their keys, where those of the reference are longer."""
_DATA = {
    "mock": ("mock: true", "made-up tokens: speed and memory are real, the loss is not"),
    "python_source": ("python_source: true", "the source files of Python's standard library"),
}
_IN_TEMPLATE = ("training", "data", "slurm")


def starter_text(recipe: Path, target: Path, offer: SiteOffer | None) -> str:
    """Return the starter of a recipe of the gallery, to be written to `target`; `offer` is what a site's SLURM has."""
    text = recipe.read_text(encoding="utf-8")
    values: Mapping[str, Any] = yaml.safe_load(text)
    head, sections = _sections(text)
    if offer is not None:
        sections["cluster"] = _site_cluster(values["cluster"], offer)
    framework = framework_named(values["backend"])
    if framework.starter_lines:
        sections["backend"] = list(framework.starter_lines)
    context = {
        "schema": EDITOR_SCHEMA,
        "head": head,
        "check": to_type("check", target),
        "submit": to_type("submit", target),
        "name": values["name"],
        "model": values["model"] if isinstance(values["model"], str) else values["name"],
        "has_checkout": FRAMEWORKS[framework.name].has_checkout,
        "cpu": load_cluster(values["cluster"]).accelerator.kind == "cpu",
        "tokenizer": hub_id_of(values["model"]) if isinstance(values["model"], str) else None,
        "data": "  # ".join(f"{part:<{_COLUMN - 4}}" for part in _DATA[next(iter(values["data"]))]).rstrip(),
        "sections": [_annotated(lines) for key, lines in sections.items() if key not in _IN_TEMPLATE],
        "has_rate": "learning_rate" in values["training"],
        "training": _annotated(sections["training"]),
        "slurm": sections.get("slurm", [])[1:],
        "partition": None if offer is None or offer.partition is None else quoted(offer.partition.name),
        "account": quoted(offer.accounts[0]) if offer is not None and len(offer.accounts) == 1 else None,
        "site_notes": [] if offer is None else [one_line(note) for note in offer.notes(values["nodes"])],
    }
    return render("starter.yaml.j2", context, {}, keep_trailing_newline=True)


def gpu_cluster_of(recipe: Path) -> str | None:
    """Return the cluster of a recipe of the gallery, None where it needs no GPU."""
    cluster = str(yaml.safe_load(recipe.read_text(encoding="utf-8"))["cluster"])
    return cluster if load_cluster(cluster).accelerator.kind == "gpu" else None


def _sections(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the first paragraph of comments, and the lines of each key at the margin with the comments above it."""
    lines = text.splitlines()
    paragraph = next(number for number, line in enumerate(lines) if line == "#" or not line.startswith("#"))
    sections: dict[str, list[str]] = {}
    above: list[str] = []
    key = ""
    for line in lines[next(number for number, line in enumerate(lines) if not line.startswith("#")) :]:
        if line.startswith("#"):
            above.append(line)
        elif line.strip():
            if not line.startswith(" "):
                key = line.partition(":")[0]
                sections[key], above = above, []
            sections[key].append(line)
    return lines[:paragraph], sections


def _annotated(lines: list[str]) -> str:
    """Return lines of a recipe with the meaning of each key that has no comment of its own."""
    return "\n".join(_with_meanings(lines))


def _with_meanings(lines: list[str]) -> Iterator[str]:
    parent = ""
    explained = lines[0].startswith("#")
    for line in lines:
        match = _KEY.fullmatch(line)
        if match is None or "#" in line:
            yield line
            continue
        indent, key, _ = match.groups()
        parent = parent if indent else f"{key}."
        path = f"{parent}{key}" if indent else key
        entry = recipe_keys().get(path)
        if entry is None or (explained and not indent):
            yield line
            continue
        annotated = f"{line:<{_COLUMN - 2}}  # {_SHORT.get(path, entry.meaning)}"
        if len(annotated) <= _WIDTH:
            yield annotated
        else:
            yield f"{indent}# {entry.meaning}"
            yield line


def _site_cluster(cluster: str, offer: SiteOffer) -> list[str]:
    if offer.base is None or offer.suits(cluster):
        return [f"cluster: {cluster}"]
    line = f"cluster: {offer.base}"
    if offer.devices != load_cluster(offer.base).devices_per_node:
        line = f"cluster: {{base: {offer.base}, devices_per_node: {offer.devices}}}"
    return [f"{line:<{_COLUMN - 2}}  # as SLURM shows this site; the gallery's: {cluster}"]
