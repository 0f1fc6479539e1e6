"""Warnings about how a recipe would run at its site: nothing is wrong, but a person would want to know beforehand."""

from __future__ import annotations

from llmlaunch.recipe.containers import is_path
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.messages import counted

__all__ = ["cautions"]


def cautions(recipe: Recipe) -> list[str]:
    """Return the sentences for `check`, `plan` and `submit`, each with what to write instead."""
    return [sentence for sentence in (_few_cores(recipe), _image_of_a_registry(recipe)) if sentence]


def _few_cores(recipe: Recipe) -> str | None:
    """SLURM gives a task one core unless more are asked for or the job has whole nodes (sbatch, --cpus-per-task)."""
    trainers = recipe.cluster.devices_per_node
    if recipe.cluster.accelerator.kind != "gpu" or recipe.slurm.get("exclusive") in (True, "topo"):
        return None
    mend = "set cpus_per_node in the cluster profile, or slurm: {cpus-per-gpu: N} or {exclusive: true}"
    cores = _cores_asked(recipe)
    if cores is None:
        return (
            f"nothing asks SLURM for CPU cores: where nodes are shared, the {trainers} trainers of a node get 1 core "
            f"between them; {mend}"
        )
    if cores < trainers:
        return f"the {counted(trainers, 'trainer')} of a node get {counted(cores, 'CPU core')} between them; {mend}"
    return None


def _cores_asked(recipe: Recipe) -> int | None:
    """The cores of a node's one task, as far as the recipe and its profile ask for them; None where neither does."""
    asked = recipe.slurm
    if "cpu" in str(asked.get("tres-per-task")):
        return recipe.cluster.devices_per_node  # in a form that only SLURM counts
    for option, times in (("cpus-per-task", 1), ("cpus-per-gpu", recipe.cluster.devices_per_node), ("mincpus", 1)):
        value = asked.get(option)
        if value not in (None, False, True) and str(value).isdigit():
            return int(value) * times
    return recipe.cluster.cpus_per_node


def _image_of_a_registry(recipe: Recipe) -> str | None:
    """Read in pyxis 0.24 (pyxis_slurmstepd.c): every step imports the image on each node, unless the site configures an
    importer that keeps images. Apptainer keeps what it built in a cache folder of each user."""
    box = recipe.container
    if box is None or is_path(box.image):
        return None
    if box.runtime == "apptainer":
        return (
            f"container.image: {box.image}: every node fetches and builds it; build it once (apptainer pull box.sif "
            f"{box.image}) and name the .sif file"
        )
    uri = box.image if "://" in box.image else f"docker://{box.image}"
    return (
        f"container.image: {box.image}: each step of the job (preflight, prepare, training) imports it again on every "
        f"node; import it once (enroot import -o box.sqsh {uri}) and name the .sqsh file"
    )
