"""What runs the training: the person's script, a checkout of Megatron-LM, the container's image and mounts or the
interpreter, and the source tree that is recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.frameworks.framework_version import CHECKOUT_VARIABLE, checkout_version
from llmlaunch.frameworks.megatron.backend import shipped_script
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
from llmlaunch.readiness.interpreters import interpreter_findings
from llmlaunch.recipe.containers import Container, is_path
from llmlaunch.recipe.types import Recipe

__all__ = ["needs_checkout_variable", "trainer_findings"]

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
    else:
        yield from interpreter_findings(recipe, environment)


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
        if needs_checkout_variable(recipe):
            yield _no_checkout(recipe)
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


def needs_checkout_variable(recipe: Recipe) -> bool:
    """Return whether only a variable where the job is submitted, or an image, can say where Megatron-LM is: the recipe
    names neither a checkout nor a script, exports no variable, and runs no setup lines that might."""
    backend, site = recipe.backend, recipe.cluster.site
    if backend.name != "megatron-lm" or backend.path is not None or backend.script is not None:
        return False
    exported = CHECKOUT_VARIABLE in {**recipe.cluster.environment, **recipe.environment}
    return not (exported or recipe.setup or site.setup or site.modules)


def _no_checkout(recipe: Recipe) -> Finding:
    advice = f"set backend.path to a checkout on the cluster, or export {CHECKOUT_VARIABLE}"
    if recipe.container is not None:
        return doubtful(
            ("backend",),
            f"{CHECKOUT_VARIABLE} is not set here: unless the container's image sets it, the job fails at startup, "
            f"since it finds no checkout of Megatron-LM; {advice}",
        )
    return missing(("backend",), f"no checkout of Megatron-LM is named; {advice} where you submit")


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
