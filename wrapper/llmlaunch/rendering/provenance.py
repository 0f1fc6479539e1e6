"""Which code a run trains with: commit, uncommitted changes, container digest, or the plain reason why not known.

Reading, not judging: whatever cannot be found out becomes a note in code.json. Only a snapshot that was asked for
and cannot be taken is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from llmlaunch import __version__
from llmlaunch.recipe.types import Container, Recipe
from llmlaunch.rendering.git import GitState, listed, read_git
from llmlaunch.rendering.snapshot import Snapshot, list_snapshot

__all__ = ["Provenance", "gather_provenance"]

_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_IMAGE_FILES = (".sqsh", ".sif")


@dataclass(frozen=True)
class Provenance:
    """`code` is code.json as a value, `diff` the bytes of code.diff (empty = no such file), `snapshot` the files to
    copy into code/ (None = none asked for)."""

    code: dict[str, object]
    diff: bytes = b""
    snapshot: Snapshot | None = None
    left_out: tuple[str, ...] = ()  # files of the tree that look as if they held secrets

    @property
    def notes(self) -> list[str]:
        """What the person who renders should know, in sentences."""
        if not self.left_out:
            return []
        return [
            "these files of the trainer's code look as if they held secrets, and the run directory leaves them or "
            f"their changes out: {listed(self.left_out)} (where that is wrong, name them under not_secrets:)"
        ]


def gather_provenance(recipe: Recipe) -> Provenance:
    """Reads the trainer's source tree and the container image, where they are on this machine.

    A local image is read whole for its sha256. Raises UserError where a snapshot was asked for and there is no
    tree, or one too large.
    """
    root, why_not = _code_root(recipe)
    state = read_git(root, recipe.not_secrets) if root is not None else GitState(note=why_not)
    # our own trainer is copied into every run directory as it is
    wanted = recipe.code.snapshot and (root is not None or not _ours(recipe))
    snapshot = list_snapshot(recipe, root, why_not) if wanted else None
    code: dict[str, object] = {
        "schema": 1,
        "llmlaunch_version": __version__,
        "path": None if root is None else str(root),
        "git": state.as_json(),
        "note": state.note,
        "container": _container(recipe.container),
        "snapshot": None if snapshot is None else snapshot.as_json(),
    }
    left_out = {*state.left_out, *(snapshot.left_out if snapshot is not None else ())}
    return Provenance(code=code, diff=state.diff, snapshot=snapshot, left_out=tuple(sorted(left_out)))


def code_json(provenance: Provenance) -> bytes:
    return (json.dumps(provenance.code, indent=2) + "\n").encode()


def _ours(recipe: Recipe) -> bool:
    return recipe.backend.name == "deepspeed" and recipe.backend.script is None and recipe.code.path is None


def _code_root(recipe: Recipe) -> tuple[Path | None, str]:
    """The tree the trainer comes from, as an absolute path, else the reason why there is none to read."""
    if recipe.code.path is not None:
        named, key = recipe.code.path, "code.path"
    elif recipe.backend.path is not None:
        named, key = recipe.backend.path, "backend.path"
    elif recipe.backend.script is not None:
        named, key = str(Path(recipe.backend.script).parent), "backend.script"
    elif recipe.backend.name == "megatron-lm":
        return None, "MEGATRON_LM_PATH is set on the nodes; name backend.path or code.path to have its commit recorded"
    else:
        return None, "the trainer is llmlaunch's own and lies in trainer/"
    root = Path(recipe.path).parent / Path(named).expanduser()
    root = Path(str(root.absolute()))
    if not root.is_dir():
        return None, f"{key} names {root}, which is no folder on the machine that rendered this"
    return root, ""


def _container(container: Container | None) -> dict[str, object] | None:
    if container is None:
        return None
    digest, note = _image_digest(container.image)
    return {"image": container.image, "digest": digest, "note": note}


def _image_digest(image: str) -> tuple[str | None, str]:
    """The image's sha256 and a note where it is not known."""
    if match := _DIGEST.search(image):
        return match.group(1), ""
    if not image.endswith(_IMAGE_FILES):
        return None, "the reference names no digest; write image@sha256:... to pin one"
    try:
        with Path(image).open("rb") as file:
            sha256 = hashlib.sha256()
            while block := file.read(1 << 20):
                sha256.update(block)
    except OSError as error:
        return None, f"cannot be read on the machine that rendered this: {error.strerror}"
    return f"sha256:{sha256.hexdigest()}", ""
