"""What a job reads that must be there when it is submitted: data, tokenizer, weights to start from, secrets.

A path is looked for on this machine, which sees the job's file systems where it is a login node. What the container
mounts from another place of the host is looked for there. Where not even the topmost folder of a path exists here, its
file system is not mounted here, and nothing can be said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from llmlaunch.recipe.overrides import place_of
from llmlaunch.recipe.types import Recipe

__all__ = ["Inputs", "inputs_of"]

_ADDRESS = re.compile(r"(?:^|/)[a-z][a-z0-9+.-]*:/")  # s3://bucket, whose two slashes a path has made one
_INDEXED = (".bin", ".idx")


@dataclass(frozen=True)
class Inputs:
    """`missing` are inputs without which the job would fail, `unseen` those that cannot be seen from this machine; a
    sentence each."""

    missing: tuple[str, ...]
    unseen: tuple[str, ...]


def inputs_of(recipe: Recipe, environment: Mapping[str, str]) -> Inputs:
    """Look for everything the job reads. `environment` is that of the person who submits."""
    missing = [
        f"{place_of(recipe, ('secrets',))}: secrets: {name} is not set here; export it where you submit"
        for name in recipe.secrets
        if not environment.get(name)
    ]
    unseen = []
    for key, files in _paths(recipe):
        states = {file: _state(_on_the_host(recipe, file)) for file in files}
        place = f"{place_of(recipe, key)}: {'.'.join(map(str, key))}: "
        absent = [file for file, state in states.items() if state == "absent"]
        if absent:
            missing.append(f"{place}{absent[0]} is not there; name what is, or make it first")
        elif "unseen" in states.values():
            unseen.append(f"{place}{files[0]} cannot be seen from here, so whether it is there is not known")
    return Inputs(tuple(missing), tuple(unseen))


def _paths(recipe: Recipe) -> Iterator[tuple[tuple[str | int, ...], list[str]]]:
    """By the key that names them, the files that must be there."""
    data = recipe.data
    if recipe.backend.reads_data_keys:
        if data.path is not None:
            yield ("data", "path"), _files_of(recipe, data.path)
        for index, part in enumerate(data.blend):
            yield ("data", "blend", index, "path"), _files_of(recipe, part.path)
        if data.tokenizer is not None and data.tokenizer.startswith(("/", "~")):
            yield ("data", "tokenizer"), [str(Path(data.tokenizer).expanduser())]
    if recipe.training.start_from is not None:
        yield ("training", "start_from"), [recipe.training.start_from]


def _files_of(recipe: Recipe, path: str) -> list[str]:
    """Megatron-LM reads an indexed dataset, both of its files. The DeepSpeed trainer does so where there is an index,
    and text otherwise."""
    indexed = [f"{path}{ending}" for ending in _INDEXED]
    script = recipe.backend.script
    if recipe.backend.name == "megatron-lm" or script is not None:
        return indexed
    return indexed if _state(_on_the_host(recipe, indexed[1])) == "here" else [path]


def _on_the_host(recipe: Recipe, path: str) -> Path:
    """The place on the host of what the container's mounts show at `path`; the last mount over it wins."""
    mounts = () if recipe.container is None else recipe.container.mounts
    for mount in reversed(mounts):
        source, place = mount.split(":")[:2]
        if PurePath(path).is_relative_to(place):
            return Path(source) / PurePath(path).relative_to(place)
    return Path(path)


def _state(path: Path) -> str:
    """Return "here", "absent", or "unseen" for an address, a file system that is not mounted here, and a folder that
    may not be looked into."""
    if _ADDRESS.search(str(path)):
        return "unseen"
    try:
        path.stat()
    except FileNotFoundError:
        mounted = Path(*path.parts[:2]).exists()
        return "absent" if mounted else "unseen"
    except NotADirectoryError:
        return "absent"
    except (OSError, ValueError):
        return "unseen"
    return "here"
