"""The container of a job: the recipe's image and mounts, and what its site says of containers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmlaunch.cluster.profile import Site
from llmlaunch.documents.text import Mount, PathText
from llmlaunch.documents.validate import StrictModel
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.types import Container

__all__ = ["ContainerFile", "container", "container_problems", "is_path"]

DEFAULT_RUNTIME = "pyxis"

_ENROOT_FILE, _APPTAINER_FILE = ".sqsh", ".sif"
_URL = re.compile(r"([a-z][a-z0-9+-]*)://|(docker-archive|docker-daemon|oci|oci-archive):")
_PYXIS_URLS = ("docker", "dockerd")


class ContainerFile(StrictModel):
    """A container."""

    image: PathText = Field(
        description="A .sqsh file or a registry reference (pyxis), a .sif file or docker://... (apptainer)"
    )
    mounts: list[Mount] = Field([], description="/source:/destination[:flags], each")
    runtime: Literal["pyxis", "apptainer"] | None = Field(
        None, description="What runs it; absent = as the cluster profile says, else pyxis"
    )


def container(file: ContainerFile | None, site: Site, base_dir: Path) -> Container | None:
    """The site's mounts, but for those where the recipe mounts something of its own, and the recipe's. An image that is
    a relative path is looked for in `base_dir`."""
    if file is None:
        return None
    taken = {mount.split(":")[1] for mount in file.mounts}
    mounts = (*(mount for mount in site.container_mounts if mount.split(":")[1] not in taken), *file.mounts)
    runtime = file.runtime or site.container_runtime or DEFAULT_RUNTIME
    return Container(_found(file.image, base_dir), mounts, runtime)


def container_problems(wanted: Container | None, cluster: str) -> Iterator[tuple[KeyPath, str]]:
    """What this site's runtime cannot run."""
    if wanted is None:
        return
    if wanted.runtime == "none":
        yield (
            ("container",),
            f"cluster {cluster} runs no containers (container.runtime: none in its profile); remove it, or name the "
            "runtime here",
        )
        return
    problem = _PROBLEM[wanted.runtime](wanted.image)
    if problem is not None:
        yield ("container", "image"), problem


def _pyxis_problem(image: str) -> str | None:
    if is_path(image) and image.endswith(_APPTAINER_FILE):
        return "a .sif file is Apptainer's; write runtime: apptainer, or import the image with enroot (.sqsh)"
    url = _URL.match(image)
    if url is not None and url[1] not in _PYXIS_URLS:
        return f"pyxis takes a registry reference or the path of a .sqsh file, not {url[0]}...; or runtime: apptainer"
    return None


def _apptainer_problem(image: str) -> str | None:
    if is_path(image):
        if image.endswith(_ENROOT_FILE):
            return (
                "a .sqsh file is enroot's; write runtime: pyxis, or build a .sif (apptainer build x.sif docker://...)"
            )
        return None
    reference = image.removeprefix("docker://")
    if _URL.match(image) is None or "#" in reference:
        return f"apptainer takes the path of a .sif file or docker://{reference.replace('#', '/', 1)}"
    return None


_PROBLEM = {"pyxis": _pyxis_problem, "apptainer": _apptainer_problem}


def is_path(image: str) -> bool:
    """Whether an image is a file or folder of the cluster, and not a registry's."""
    return _URL.match(image) is None and (
        image.startswith(("/", "./", "../", "~")) or image.endswith((_ENROOT_FILE, _APPTAINER_FILE))
    )


def _found(image: str, base_dir: Path) -> str:
    return str((base_dir / Path(image).expanduser()).absolute()) if is_path(image) else image
