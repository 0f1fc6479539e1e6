"""The container of a job: the recipe's image and mounts, and what its site says of containers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from llmlaunch.cluster.profile import Site
from llmlaunch.documents.keys import key, section
from llmlaunch.documents.text import Mount, PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.user_data import with_home

_ENROOT_FILE, _APPTAINER_FILE = ".sqsh", ".sif"
_URL = re.compile(r"([a-z][a-z0-9+-]*)://|(docker-archive|docker-daemon|oci|oci-archive):")
_PYXIS_URLS = ("docker", "dockerd")


@section
class Container:
    """The container of a job; the site's mounts are among its mounts."""

    image: PathText = key("A .sqsh file or a registry reference (pyxis), a .sif file or docker://... (apptainer)")
    mounts: tuple[Mount, ...] = key("/source:/destination[:flags], each", default=())
    runtime: str = key(
        "What runs it; absent = as the cluster profile says, else pyxis",
        default="pyxis",
        written=Literal["pyxis", "apptainer"] | None,
    )


def container_at(site: Site, keys: Mapping[str, Any], base_dir: Path) -> Container:
    """Return the container that these keys of a recipe describe, at `site`.

    It has the site's mounts, but for those where the recipe mounts something of its own. An image that is a relative
    path starts in `base_dir`.
    """
    own = keys.get("mounts", ())
    destinations = {mount.split(":")[1] for mount in own}
    mounts = (*(mount for mount in site.container.mounts if mount.split(":")[1] not in destinations), *own)
    runtime = keys.get("runtime") or site.container.runtime or Container.runtime
    image = keys["image"]
    absolute = str((base_dir / with_home(image)).absolute()) if is_path(image) else image
    return Container(absolute, mounts, runtime)


def container_problems(container: Container | None, cluster: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield why the runtime of this site cannot run the container."""
    if container is None:
        return
    if container.runtime == "none":
        yield (
            ("container",),
            f"cluster {cluster} runs no containers (container.runtime: none in its profile); remove it, or name the "
            "runtime here",
        )
        return
    problem = _PROBLEM[container.runtime](container.image)
    if problem is not None:
        yield ("container", "image"), problem


def is_imported(container: Container | None) -> bool:
    """Whether pyxis imports the image from a registry, which the job then has done once on each node."""
    return container is not None and container.runtime == "pyxis" and not is_path(container.image)


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
    """Whether an image is a file or folder of the cluster, and not a reference to a registry."""
    return _URL.match(image) is None and (
        image.startswith(("/", "./", "../", "~")) or image.endswith((_ENROOT_FILE, _APPTAINER_FILE))
    )
