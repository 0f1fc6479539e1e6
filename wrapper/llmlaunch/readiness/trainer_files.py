"""What runs the training: the person's script, a checkout of Megatron-LM, the interpreter and its packages, the
container's image and mounts, and the source tree that is recorded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.backends.framework_version import CHECKOUT_VARIABLE, checkout_version
from llmlaunch.backends.megatron.backend import shipped_script
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.layout import Layout
from llmlaunch.readiness.findings import (
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    host_path,
    missing,
    note,
    path_state,
    unseen,
)
from llmlaunch.recipe.containers import Container, is_path
from llmlaunch.recipe.types import Recipe

__all__ = ["trainer_findings"]

# Folders that each node has for itself: what is not in them here may be there.
OF_EACH_NODE = [f"/{name}" for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sys", "tmp", "usr")]
SQUASHFS = b"hsqs"  # fs/squashfs/squashfs_fs.h, little endian
SIF, SIF_OFFSET = b"SIF_MAGIC", 32  # sylabs/sif, pkg/sif/sif.go: after the launch script
MISTYPED_URL = re.compile(r"(docker|dockerd|oras|library|shub|http|https):?/{1,2}(?=\w)|(docker|oras|library):(?=\w)")
REGISTRY_HOST = re.compile(r"[\w-]+(?:\.[\w-]+)+(?::\d+)?")


def trainer_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the trainer and where it runs."""
    if recipe.backend.script is not None:
        yield from _script(recipe, recipe.backend.script)
    if recipe.backend.name == "megatron-lm":
        yield from _checkout(recipe, environment)
    if recipe.code.path is not None and path_state(Path(recipe.code.path)) == "absent":
        yield doubtful(
            ("code", "path"), f"{recipe.code.path} is not there, so the code's commit is not recorded; name the tree"
        )
    if recipe.container is not None:
        yield from _image(recipe.container)
        yield from _mounts(recipe, recipe.container)
    elif recipe.python is not None:
        yield from _interpreter(recipe, Path(recipe.python).expanduser())


def _script(recipe: Recipe, script: str) -> Iterator[Finding]:
    key, place = ("backend", "script"), host_path(recipe, script)
    state = path_state(place)
    if state == "absent":
        yield missing(key, f"{script} is not there; name the script that trains")
    elif state == "unseen":
        yield unseen(key, script)
    elif (problem := file_problem(place)) is not None:
        yield missing(key, f"{script} {problem}; name the script that trains")


def _checkout(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The checkout that the recipe names, or the variable that names it where the job is submitted."""
    named, variable = recipe.backend.path, environment.get(CHECKOUT_VARIABLE)
    if named is None and not variable:
        yield from _no_checkout(recipe)
        return
    key: KeyPath = ("backend", "path") if named is not None else ("backend",)
    which = "" if named is not None else f"{CHECKOUT_VARIABLE}="
    checkout, trainer = host_path(recipe, str(named or variable)), shipped_script(recipe)
    state, has_own_script = path_state(checkout), recipe.backend.script is not None
    # what the variable names here need not be what it names in the container
    wrong = missing if named is not None and recipe.container is None else doubtful
    if state == "unseen":
        yield unseen(key, checkout)
    elif state == "absent":
        yield wrong(key, f"{which}{checkout} is not there; name a checkout of Megatron-LM")
    elif not (checkout / "megatron" / "core").is_dir() or not (has_own_script or (checkout / trainer).is_file()):
        above = next((folder for folder in checkout.parents if (folder / trainer).is_file()), None)
        advice = f"name {above}" if above is not None else "name the top folder of a checkout of Megatron-LM"
        yield wrong(
            key, f"{which}{checkout} is no checkout of Megatron-LM: it lacks {trainer} or megatron/core; {advice}"
        )
    elif checkout_version(checkout) is None and recipe.backend.version is None:
        yield doubtful(
            key,
            f"{which}{checkout}: its megatron/core/package_info.py tells no version; name it in backend.version",
        )


def _no_checkout(recipe: Recipe) -> Iterator[Finding]:
    variables = {**recipe.cluster.environment, **recipe.environment}
    if CHECKOUT_VARIABLE in variables or recipe.setup or recipe.cluster.site.setup or recipe.cluster.site.modules:
        return
    where = "" if recipe.container is None else "where its image does not set it, "
    yield note(
        ("backend",),
        f"{CHECKOUT_VARIABLE} is not set here; {where}the job ends when it starts: name a checkout of Megatron-LM in "
        "backend.path, or export it where you submit",
    )


def _interpreter(recipe: Recipe, python: Path) -> Iterator[Finding]:
    """The interpreter of the training environment, and whether torch and the framework lie beside it."""
    key = ("python",)
    state = path_state(python)
    if not python.is_absolute():
        return  # a name that PATH has on the nodes
    if state == "unseen":
        yield unseen(key, python)
    elif state == "absent":
        yield missing(key, f"{python} is not there; name the interpreter of the training environment")
    elif not python.is_file() or not os.access(python, os.X_OK):
        yield missing(key, f"{python} cannot be run; name the interpreter itself, such as .../bin/python")
    else:
        yield from _packages(recipe, python)


def _packages(recipe: Recipe, python: Path) -> Iterator[Finding]:
    """What an environment's own folder of packages lacks, where it is no part of another's."""
    root = python.parent.parent
    folders = sorted(root.glob("lib/python3*/site-packages"))
    settings = (first_bytes(root / "pyvenv.cfg", 4096) or b"").decode("utf-8", "replace")
    inherits = re.search(r"(?m)^include-system-site-packages\s*=\s*true", settings)
    if not folders or not settings or inherits or "PYTHONPATH" in recipe.environment:
        return
    needed = ("torch", "deepspeed") if recipe.backend.name == "deepspeed" else ("torch",)
    lacking = [name for name in needed if not any((folder / name).is_dir() for folder in folders)]
    if lacking:
        yield doubtful(("python",), f"{python} has no {' and no '.join(lacking)}; install what lacks, or name another")
    stated = recipe.backend.version
    distributions = [path for folder in folders for path in folder.glob("deepspeed-*.dist-info")]
    if recipe.backend.name == "deepspeed" and stated is not None and distributions:
        version = distributions[0].name.removeprefix("deepspeed-").removesuffix(".dist-info")
        if not f"{version}.".startswith(f"{stated}."):
            yield doubtful(
                ("backend", "version"), f"says {stated}, and {python} has DeepSpeed {version}; write the one that runs"
            )


def _image(container: Container) -> Iterator[Finding]:
    key, image = ("container", "image"), container.image
    if not is_path(image):
        yield from _reference(container)
        return
    place = Path(image)
    state = path_state(place)
    if state == "absent":
        yield missing(key, f"{image} is not there; name the image, or import it first")
    elif state == "unseen":
        yield unseen(key, image)
    elif place.is_dir():
        if container.runtime != "apptainer":
            yield missing(
                key, f"{image} is a folder; pyxis takes a .sqsh file (enroot import -o box.sqsh docker://...)"
            )
    elif (problem := file_problem(place)) is not None:
        yield missing(key, f"{image} {problem}")
    elif image.endswith(".sqsh") and first_bytes(place, len(SQUASHFS)) != SQUASHFS:
        yield missing(key, f"{image} is no squashfs image, whatever its name says; import it again (enroot import)")
    elif image.endswith(".sif") and first_bytes(place, len(SIF), SIF_OFFSET) != SIF:
        yield missing(key, f"{image} is no SIF image, whatever its name says; build it again (apptainer build)")


def _reference(container: Container) -> Iterator[Finding]:
    """An image of a registry, of which only the form can be judged here."""
    key, image = ("container", "image"), container.image
    if "://" not in image and MISTYPED_URL.match(image):
        rest = MISTYPED_URL.sub("", image, count=1)
        yield missing(key, f"{image} is neither a path nor a reference; write docker://{rest}")
        return
    reference = image.removeprefix("docker://").removeprefix("dockerd://")
    host, slash, name = reference.partition("/")
    if container.runtime == "pyxis" and slash and "#" not in reference and REGISTRY_HOST.fullmatch(host):
        yield doubtful(key, f"enroot looks for {image} on Docker Hub; a registry stands before a #: {host}#{name}")
    yield note(key, f"{image} is in a registry, so whether it is there is not known here")


def _mounts(recipe: Recipe, container: Container) -> Iterator[Finding]:
    """The host's side of each mount: a container whose mount has no source does not start."""
    for index, mount in enumerate(container.mounts):
        source = mount.split(":")[0]
        written = mount not in recipe.cluster.site.container.mounts
        key: KeyPath = ("container", "mounts", index) if written else ("cluster",)
        state = path_state(Path(source))
        if state == "absent":
            each_node = any(Path(source).is_relative_to(folder) for folder in OF_EACH_NODE) or not written
            wrong = doubtful if each_node else missing
            where = "is not there on this machine" if each_node else "is not there"
            yield wrong(key, f"{source}, the source of {mount}, {where}; the container does not start without it")
        elif state == "unseen":
            yield unseen(key, source)
