"""`llmlaunch doctor`: what this site has: the bandwidth between its nodes, and what a training environment holds."""

from __future__ import annotations

import os
import shlex
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.output import notify, print_json, say_next
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.units import GB

if TYPE_CHECKING:
    from llmlaunch.cluster.profile_text import Destination
    from llmlaunch.launchers.bandwidth import MeasuredBandwidth
    from llmlaunch.launchers.frameworks import Environment


RECIPES = (".yaml", ".yml")
ONE_THING = "look at one thing at a time: --network, --container, --frameworks or --rehearsal"


@click.command("doctor")
@click.option("--network", is_flag=True, help="Measure the bandwidth between every two nodes of this allocation.")
@click.option("--container", metavar="IMAGE|RECIPE", help="Say which versions are in a container, on one node.")
@click.option(
    "--frameworks", is_flag=False, flag_value="", metavar="[PYTHON|RECIPE]", help="The same of an interpreter."
)
@click.option("--rehearsal", is_flag=True, help="Say what `rehearse` can trace ranks with here, and in which versions.")
@click.option("--save", metavar="PROFILE", help="Save it to a cluster profile: a path, or a shipped one by name.")
@click.option("--nodes", metavar="LIST", help="Only these nodes of the allocation, as SLURM writes them: n[1-4].")
@click.option(
    "--local",
    metavar="[N]",
    type=click.IntRange(2, 64),
    is_flag=False,
    flag_value=4,
    help="On this machine, without SLURM; with --network between N processes [4].",
)
@click.option("--devices", metavar="N", type=click.IntRange(1), help="Devices a node; those SLURM gave unless said.")
@click.option("--python", metavar="PATH", help="Python with torch; LLMLAUNCH_PYTHON unless said, else this one.")
@click.option("--message-mib", metavar="N", type=click.IntRange(1, 4096), default=64, help="Size of a message [64].")
@click.option(
    "--repeats", metavar="N", type=click.IntRange(1, 1000), default=5, help="Messages, their median counts [5]."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def doctor_command(
    network: bool,
    container: str | None,
    frameworks: str | None,
    rehearsal: bool,
    save: str | None,
    nodes: str | None,
    local: int | None,
    devices: int | None,
    python: str | None,
    message_mib: int,
    repeats: int,
    as_json: bool,
) -> int:
    """Look at the site.

    With --network: measure the links between nodes, and with --save keep what was measured for placing jobs.

    With --container or --frameworks: start one process where a training would run, and say which torch, CUDA,
    Megatron core, Transformer Engine, DeepSpeed and Transformers are there. It is kept, and recipes that run there are
    rendered for those versions.

    With --rehearsal: say where the environment is that `llmlaunch rehearse` traces ranks in, or how to get one.

    \b
    llmlaunch doctor --container recipe.yaml
    llmlaunch doctor --network --save mine.yaml
    """
    looks = [network, container is not None, frameworks is not None, rehearsal]
    if sum(looks) > 1:
        raise UserError(ONE_THING)
    if rehearsal:
        return _show_trace_environment(as_json)
    if network:
        return _show_network(save, nodes, local, devices, python, message_mib * 2**20, repeats, as_json)
    if any(looks):
        return _show_environment(container, frameworks, python, local is not None, as_json)
    raise UserError("say what to look at: --network, --container IMAGE, --frameworks or --rehearsal")


def _show_network(
    save: str | None,
    nodes: str | None,
    local: int | None,
    devices: int | None,
    python: str | None,
    message_bytes: int,
    repeats: int,
    as_json: bool,
) -> int:
    from llmlaunch.cluster.profile_text import destination
    from llmlaunch.launchers import bandwidth

    where = None if save is None else destination(save)  # mistakes first, then the minutes of measuring
    count = devices or int(os.environ.get("SLURM_GPUS_ON_NODE") or 1)
    probe = bandwidth.BandwidthProbe(python or bandwidth.default_python(), count, message_bytes, repeats)
    if local is not None:
        measured = bandwidth.measure_locally(local, probe, notify)
    elif not os.environ.get("SLURM_JOB_ID"):
        raise UserError(_how_to_run(save))
    else:
        measured = bandwidth.measure_allocation(bandwidth.allocated_nodes(dict(os.environ), nodes), probe, notify)
    if where is not None:
        _save(measured, where)
    if as_json:
        print_json(_json(measured))
    else:
        click.echo(_summary(measured))
        priced = (to_type("check", "RECIPE", f"cluster={save}"), "priced with the measured links")
        say_next(priced if save else (to_type("doctor", "--network", "--save", "PROFILE"), "keeps it for placing jobs"))
    return 0


def _show_trace_environment(as_json: bool) -> int:
    from llmlaunch.rehearsal.place import find_trace_environment, how_to_get_one

    environment = find_trace_environment()
    if as_json:
        folder, versions = (None, {}) if environment is None else (str(environment.folder), dict(environment.versions))
        print_json({"folder": folder, "versions": versions})
    elif environment is None:
        click.echo(f"nothing to trace ranks with: {how_to_get_one()}")
        say_next((to_type("rehearse", "--install-frameworks"), ""))
    else:
        versions_said = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        click.echo(f"ranks are traced in {environment.folder}: {versions_said}")
        say_next((to_type("rehearse", "RECIPE", "--on", "trace"), ""))
    return 0


def _show_environment(
    container: str | None, frameworks: str | None, python: str | None, local: bool, as_json: bool
) -> int:
    """Show what a training environment holds, and keep it. `container` is an image or a recipe, `frameworks` an
    interpreter, a recipe or empty. Raises UserError."""
    from llmlaunch.launchers.environment_cache import cache_probe, environment_key
    from llmlaunch.launchers.frameworks import probe_environment

    place = _environment(container, frameworks, python)
    key = environment_key(place.container, place.python)  # an image that changes meanwhile was not probed
    probe = probe_environment(place, local, notify)
    probe["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if as_json:
        print_json(probe)
    else:
        click.echo(_environment_text(probe))
    if key is None:
        notify("not kept: a recipe that names neither container nor python may run anywhere")
    else:
        try:
            cache_probe(key, probe)
        except OSError as failure:
            notify(f"warning: not kept: {failure.strerror}")
    if not as_json:
        recipe = next((word for word in (container, frameworks) if word and word.endswith(RECIPES)), None)
        say_next((to_type("check", Path(recipe) if recipe else "RECIPE"), "plans for these versions"))
    return 0


def _environment(container: str | None, frameworks: str | None, python: str | None) -> Environment:
    from llmlaunch.launchers.bandwidth import default_python
    from llmlaunch.launchers.frameworks import environment_named, environment_of

    word = container or frameworks or ""
    if word.endswith(RECIPES):
        from llmlaunch.recipe.load import load_recipe

        return environment_of(load_recipe(word))
    if container is not None:
        return environment_named(container, python)
    return environment_named(None, frameworks or python or default_python())


def _environment_text(probe: dict[str, Any]) -> str:
    from llmlaunch.frameworks.framework import trained_with

    packages = probe["packages"]
    shown = trained_with()
    width = max(map(len, shown))
    lines = [f"{probe['interpreter']} (Python {probe['python']}) on {probe['node']}"]
    lines += [f"  {name:<{width}}  {packages.get(name, '-')}" for name in shown]
    lines += [
        f"  {'CUDA of torch':<{width}}  {probe['cuda'] or '-'}",
        f"  {'driver':<{width}}  {probe['driver'] or '-'}",
    ]
    devices = probe["devices"]
    lines += [f"  {'devices':<{width}}  {len(devices)} x {devices[0]}"] if devices else []
    return "\n".join([*lines, *([f"  {probe['problem']}"] if probe["problem"] else [])])


def _how_to_run(save: str | None) -> str:
    typed = to_type("doctor", "--network", "--save", save or "PROFILE")
    return (
        "not inside a SLURM allocation; give it whole nodes and all their devices:\n"
        f"  salloc --nodes=N --exclusive --gpus-per-node=G {typed}\n"
        f"  sbatch --nodes=N --ntasks-per-node=1 --exclusive --gpus-per-node=G --wrap {shlex.quote(typed)}\n"
        "or try it between processes of this machine: --local 4"
    )


def _save(measured: MeasuredBandwidth, where: Destination) -> None:
    from llmlaunch.cluster.matrix import BandwidthMatrix, matrix_text, merged, read_matrix

    matrix = BandwidthMatrix(measured.nodes, measured.bytes_per_second)
    if where.profile_text is None and where.matrix.exists():
        try:
            matrix = merged(read_matrix(where.matrix), matrix)
        except UserError as old:
            notify(f"replacing what cannot be read: {old}")
    where.save(matrix_text(matrix.nodes, matrix.bytes_per_second, _how(measured)))
    notify(f"saved to {where.matrix}, named by {where.profile}")


def _how(measured: MeasuredBandwidth) -> dict[str, Any]:
    return {**measured.how, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _json(measured: MeasuredBandwidth) -> dict[str, Any]:
    """The shape of the file (docs/placement.md)."""
    rows = [
        [None if i == j else speed / GB for j, speed in enumerate(row)]
        for i, row in enumerate(measured.bytes_per_second)
    ]
    return {"schema": 1, "measured": _how(measured), "nodes": list(measured.nodes), "gigabytes_per_second": rows}


def _summary(measured: MeasuredBandwidth) -> str:
    """The spread, and the links at its ends."""
    names = measured.nodes
    links = sorted(
        (speed / GB, f"{names[i]} to {names[j]}")
        for i, row in enumerate(measured.bytes_per_second)
        for j, speed in enumerate(row)
        if i != j
    )
    median = statistics.median(speed for speed, _ in links)
    (least, slow), (most, fast) = links[0], links[-1]
    how = measured.how
    return (
        f"{counted(len(names), 'node')}, {counted(how['devices_per_node'], 'device')} each, {how['backend']}, "
        f"messages of {how['message_bytes'] / 2**20:g} MiB\n"
        f"GB/s for each device: median {median:.3g}, from {least:.3g} ({slow}) to {most:.3g} ({fast})"
    )
