"""The gallery: the shipped recipes that `llmlaunch init` starts from, and what each is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.assets import asset

if TYPE_CHECKING:
    from llmlaunch.recipe.types import Recipe


def gallery() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(asset("recipes").glob("*.yaml"))}


@dataclass(frozen=True)
class GalleryEntry:
    """One recipe of the gallery in the fields of `init --list --json`. `devices` is nodes x devices of a node and the
    card."""

    name: str
    size: str
    parameters: int
    nodes: int
    devices_per_node: int
    accelerator: str
    backend: str
    sequence_length: int
    needs: tuple[str, ...]
    about: str

    @property
    def devices(self) -> str:
        return f"{self.nodes}x{self.devices_per_node} {self.accelerator}"


def gallery_entries() -> list[GalleryEntry]:
    """Return what each recipe of the gallery is for, the smallest model first."""
    from llmlaunch.recipe.load import load_recipe

    entries = [_entry(load_recipe(path)) for path in gallery().values()]
    return sorted(entries, key=lambda entry: (entry.parameters, entry.name))


def _entry(recipe: Recipe) -> GalleryEntry:
    from llmlaunch.layers.parameters import count_parameters

    parameters = count_parameters(recipe.model).total
    accelerator = recipe.cluster.accelerator
    return GalleryEntry(
        name=recipe.name,
        size=f"{parameters / 1e9:.0f}B"
        if parameters >= 9.95e9
        else f"{parameters / 1e9:.1f}B"
        if parameters >= 1e8
        else f"{parameters / 1e6:.0f}M",
        parameters=parameters,
        nodes=recipe.nodes,
        devices_per_node=recipe.cluster.devices_per_node,
        accelerator=accelerator.name,
        backend=recipe.backend.name,
        sequence_length=recipe.workload.sequence_length,
        needs=_needs(recipe),
        about=(recipe.text or "").partition("\n")[0].lstrip("# "),
    )


def _needs(recipe: Recipe) -> tuple[str, ...]:
    from llmlaunch.frameworks.framework import framework_of

    """Return what must be there before it can be submitted."""

    if recipe.cluster.accelerator.kind == "cpu":
        return ("torch",)
    return (framework_of(recipe).requirement,)
