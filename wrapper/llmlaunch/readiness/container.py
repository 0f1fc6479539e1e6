"""The container that runs the training: its image, as far as this machine can see it, and the sources of its mounts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import Finding, doubtful, file_problem, first_bytes, missing, note, path_state, unseen
from llmlaunch.recipe.containers import Container, is_path
from llmlaunch.recipe.types import Recipe

# Folders that each node has for itself: what is missing from them here may exist there.
OF_EACH_NODE = [f"/{name}" for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sys", "tmp", "usr")]
SQUASHFS = b"hsqs"  # fs/squashfs/squashfs_fs.h, little endian
SIF, SIF_OFFSET = b"SIF_MAGIC", 32  # sylabs/sif, pkg/sif/sif.go: after the launch script
MISTYPED_URL = re.compile(r"(docker|dockerd|oras|library|shub|http|https):?/{1,2}(?=\w)|(docker|oras|library):(?=\w)")
REGISTRY_HOST = re.compile(r"[\w-]+(?:\.[\w-]+)+(?::\d+)?")


def container_findings(recipe: Recipe, container: Container) -> Iterator[Finding]:
    """Yield what would prevent the container from starting."""
    yield from _image(container)
    yield from _mounts(recipe, container)


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
    """Yield findings about an image in a registry. Only its form can be judged here."""
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
    """Yield findings about the host's side of each mount. A container does not start if the source of a mount is
    missing."""
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
