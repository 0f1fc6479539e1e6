"""A measured matrix into a cluster profile: the file beside it, and the line that names it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.assets import asset
from llmlaunch.cluster.load import profile_path
from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.cluster.profile import cluster_form
from llmlaunch.documents.validate import validate
from llmlaunch.documents.writing import new_place, write_whole
from llmlaunch.documents.yaml_strict import Document, parse_document, read_text
from llmlaunch.errors import UserError

__all__ = ["Destination", "destination", "merged"]


@dataclass(frozen=True)
class Destination:
    """Where a matrix goes. `profile_text` is what the profile will be; None: it names the file already."""

    profile: Path
    matrix: Path
    profile_text: str | None

    def save(self, text: str) -> None:
        """The matrix first, then the profile that names it, each whole or not at all. Raises `UserError`."""
        write_whole(self.matrix, text)
        if self.profile_text is not None:
            write_whole(self.profile, self.profile_text)


def destination(spec: str, base_dir: Path = Path()) -> Destination:
    """For a profile by path, that file; for a shipped one by name, a new profile in `base_dir` that starts from it.

    Raises:
        UserError: no such profile, one that cannot be read or changed, or a file in the way.
    """
    path = profile_path(spec, base_dir)
    if path.is_relative_to(asset("slurm", "clusters")):
        path, text = base_dir / f"{spec}.yaml", None
        if path.exists():
            raise UserError(f"{path}: exists already; save into it with --save ./{path.name}")
    else:
        text = read_text(path)
    name = f"{path.stem}.links.json"
    if text is None:
        found = Destination(path, path.with_name(name), f"base: {spec}\nlinks: {{matrix: {name}}}\n")
    else:
        found = _of_profile(path, text, name)
    for path in (found.profile, found.matrix):
        new_place(path)
    for folder in {found.profile.parent, found.matrix.parent}:
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder}: cannot be written to; copy the profile to a folder of yours")
    return found


def merged(old: BandwidthMatrix, new: BandwidthMatrix) -> BandwidthMatrix:
    """`new`; where the old matrix knows all its nodes and more, the old one with the new links in it."""
    place = {name: index for index, name in enumerate(old.nodes)}
    if not set(new.nodes) <= set(place):
        return new
    rows = [list(row) for row in old.bytes_per_second]
    for i, sender in enumerate(new.nodes):
        for j, receiver in enumerate(new.nodes):
            rows[place[sender]][place[receiver]] = new.bytes_per_second[i][j]
    return BandwidthMatrix(old.nodes, tuple(map(tuple, rows)))


def _of_profile(path: Path, text: str, name: str) -> Destination:
    document = parse_document(text, str(path))
    validate(cluster_form(), document)
    links = document.value.get("links") or {}
    if links.get("matrix"):
        return Destination(path, path.parent / Path(links["matrix"]).expanduser(), None)
    changed = _with_matrix(text, document, name)
    wanted = {**document.value, "links": {**links, "matrix": name}}
    if parse_document(changed, str(path)).value != wanted:
        raise UserError(f"{path}: is written so that no line can be added safely; add under links: `matrix: {name}`")
    return Destination(path, path.with_name(name), changed)


def _with_matrix(text: str, document: Document, name: str) -> str:
    """The profile's own text with one more line, comments and order as they were; unchanged where that cannot be."""
    lines = text.splitlines(keepends=True)
    if "links" not in document.value:
        end = "" if text.endswith("\n") else "\n"
        return f"{text}{end}links: {{matrix: {name}}}\n"
    at = next((number for number, line in enumerate(lines) if line.startswith("links:")), None)
    if at is None:  # written in a way of its own
        return text
    head, brace, rest = lines[at].partition("{")
    if brace:
        lines[at] = f"{head}{{matrix: {name}, {rest.lstrip()}"
    else:
        below = lines[at + 1] if at + 1 < len(lines) else ""
        indent = below[: len(below) - len(below.lstrip())] or "  "
        lines.insert(at + 1, f"{indent}matrix: {name}\n")
    return "".join(lines)
