"""`llmlaunch doctor --container` and `--frameworks`: what a training environment holds, said and kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.printed import print_json

if TYPE_CHECKING:
    from llmlaunch.launchers.frameworks import Environment

__all__ = ["look_at"]

RECIPES = (".yaml", ".yml")
SHOWN = ("torch", "megatron-core", "transformer-engine", "deepspeed", "transformers")


def look_at(container: str | None, frameworks: str | None, python: str | None, local: bool, as_json: bool) -> int:
    """`container` is an image or a recipe, `frameworks` an interpreter, a recipe or empty. Raises UserError."""
    from llmlaunch.launchers.frameworks import probe_environment
    from llmlaunch.launchers.probed import environment_key, keep_probe

    def say(line: str) -> None:
        click.echo(line, err=True)

    place = _environment(container, frameworks, python)
    key = environment_key(place.container, place.python)  # an image that changes meanwhile was not seen
    seen = probe_environment(place, local, say)
    seen["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if as_json:
        print_json(seen)
    else:
        click.echo(_text(seen))
    if key is None:
        say("not kept: a recipe that names neither container nor python may run anywhere")
        return 0
    try:
        keep_probe(key, seen)
    except OSError as failure:
        say(f"warning: not kept: {failure.strerror}")
    return 0


def _environment(container: str | None, frameworks: str | None, python: str | None) -> Environment:
    from llmlaunch.launchers.frameworks import environment_named, environment_of
    from llmlaunch.launchers.network import default_python

    word = container or frameworks or ""
    if word.endswith(RECIPES):
        from llmlaunch.recipe.load import load_recipe

        return environment_of(load_recipe(word))
    if container is not None:
        return environment_named(container, python)
    return environment_named(None, frameworks or python or default_python())


def _text(seen: dict[str, Any]) -> str:
    packages = seen["packages"]
    width = max(map(len, SHOWN))
    lines = [f"{seen['interpreter']} (Python {seen['python']}) on {seen['node']}"]
    lines += [f"  {name:<{width}}  {packages.get(name, '-')}" for name in SHOWN]
    lines += [f"  {'CUDA of torch':<{width}}  {seen['cuda'] or '-'}", f"  {'driver':<{width}}  {seen['driver'] or '-'}"]
    devices = seen["devices"]
    lines += [f"  {'devices':<{width}}  {len(devices)} x {devices[0]}"] if devices else []
    return "\n".join([*lines, *([f"  {seen['problem']}"] if seen["problem"] else [])])
