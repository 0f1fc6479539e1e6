"""Which version of its framework a job will run: the recipe says it, or the checkout, or a probe of the container."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, NEWEST, known_version
from llmlaunch.recipe.types import Recipe

CHECKOUT_VARIABLE = "MEGATRON_LM_PATH"
PACKAGE_INFO = Path("megatron", "core", "package_info.py")
MOST_BYTES = 65536
_NUMBER = r"^{}\s*=\s*(\d{{1,4}})\s*(?:#.*)?$"
_PRE_RELEASE = re.compile(r"^PRE_RELEASE\s*=\s*([\"'])([0-9A-Za-z.+-]{0,20})\1\s*(?:#.*)?$", re.MULTILINE)


def with_framework_version(
    recipe: Recipe, environment: Mapping[str, str], probed: Callable[[Recipe], Mapping[str, str] | None]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with its framework version settled (its assumptions say how), and warnings for the person.

    `probed` gives the packages of the training environment by name, where a probe has looked at it
    (`llmlaunch doctor --container`), else None. Nothing here fails: what cannot be read says nothing.
    """
    if recipe.backend.name != "megatron-lm":
        return _with_probed(recipe, probed, recipe.backend.name), ()
    checkout, version = _checkout(recipe, environment)
    if version is not None:
        warnings = _disagreement(recipe, version, str(checkout))
        versioned = _noted(recipe, version, f"as {checkout} says")
        return versioned, (*warnings, *_unknown(versioned))
    versioned = _with_probed(recipe, probed, "megatron-core")
    if versioned.backend.runs_version is None:
        note = f"Megatron core {NEWEST} (set backend.version to change it)"
        return replace(recipe, assumptions=(*recipe.assumptions, note)), ()
    return versioned, _unknown(versioned)


def _checkout(recipe: Recipe, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the checkout that the job imports from, and its version, each None where not known. Python looks beside
    the script first, so a fork's own script runs that fork."""
    script, checkout = recipe.backend.script, recipe.backend.path or environment.get(CHECKOUT_VARIABLE)
    fork = str(Path(script).parent) if script is not None else None
    version = checkout_version(Path(fork)) if fork else None
    if version is not None:
        return fork, version
    return checkout, checkout_version(Path(checkout)) if checkout else None


def checkout_version(checkout: Path) -> str | None:
    """What a Megatron-LM checkout calls itself ("0.16.1", "0.20.0rc0"); None where it cannot be read.

    Its package_info.py is read as text: rendering runs nothing of a checkout.
    """
    try:
        with (checkout / PACKAGE_INFO).open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    numbers = [re.search(_NUMBER.format(name), text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        return None
    pre_release = _PRE_RELEASE.search(text)
    return ".".join(number[1] for number in numbers if number) + (pre_release[2] if pre_release else "")


def _with_probed(recipe: Recipe, probed: Callable[[Recipe], Mapping[str, str] | None], package: str) -> Recipe:
    packages = None if recipe.backend.version else probed(recipe)
    version = (packages or {}).get(package)
    return recipe if version is None else _noted(recipe, version, "as llmlaunch doctor saw in its environment")


def _noted(recipe: Recipe, version: str, why: str) -> Recipe:
    if recipe.backend.version:
        return recipe
    name = "Megatron core" if recipe.backend.name == "megatron-lm" else recipe.backend.framework
    backend = replace(recipe.backend, found_version=version)
    return replace(recipe, backend=backend, assumptions=(*recipe.assumptions, f"{name} {version}, {why}"))


def _disagreement(recipe: Recipe, version: str, checkout: str) -> tuple[str, ...]:
    stated = recipe.backend.version
    if stated is None or version == stated or version.startswith(f"{stated}."):
        return ()
    return (
        f"backend.version says {stated}, but {checkout} is Megatron core {version}; its arguments follow the recipe",
    )


def _unknown(recipe: Recipe) -> tuple[str, ...]:
    version = recipe.backend.runs_version
    if version is None or known_version(version) is not None:
        return ()
    return (
        f"Megatron core {version} is none of those llmlaunch knows ({', '.join(KNOWN_VERSIONS)}); its arguments are "
        f"rendered as for {NEWEST}",
    )


def minor(version: str | None) -> tuple[int, int] | None:
    """Return (0, 19) for "0.19.2", "v0.19" or "core_v0.19.0", and None for a commit or a phrase."""
    match = re.fullmatch(r"(?:core_)?v?(\d+)\.(\d+)(?:[.+a-z\d-].*)?", version.strip()) if version else None
    return (int(match[1]), int(match[2])) if match else None
