"""Pages to look at in a browser: one HTML file that loads nothing, from the templates under `report/`.

What a recipe or a run directory says is text wherever it stands: Jinja escapes it, the data of the pictures is JSON
without `<`, and the page's policy lets nothing run but the one script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmlaunch import __version__
from llmlaunch.documents.templates import render
from llmlaunch.documents.writing import write_whole
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import with_escapes
from llmlaunch.units import gib

# What a term of memory belongs to, in the order in which bars stack them; a term of no family is a buffer.
FAMILIES = {
    "weights": ("parameters", "weight_copies", "embedding"),
    "gradients": ("gradients", "weight_gradient_stubs", "gradient_buffers", "gradient_norm"),
    "optimizer": ("optimizer_states", "optimizer_step"),
    "activations": (
        "activations",
        "encoder_activations",
        "recomputed_layer",
        "layer_backward",
        "head_backward",
        "logits_and_loss",
    ),
    "buffers": (),
    "outside": ("allocator_cache", "context", "communicators", "measured_residual"),
}
_FAMILY = {term: family for family, terms in FAMILIES.items() for term in terms}
BAR_UNITS = 1000  # a bar's whole width in the picture


def page(template: str, title: str, values: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return the page of `report/<template>.html.j2`; `data` is what its script draws from."""
    script, style = (render(f"report/page.{kind}", {}, {}) for kind in ("js", "css"))
    shared = {
        "title": title,
        "version": __version__,
        "script": Markup(script),
        "script_hash": _digest(script),
        "style": Markup(style),
        "style_hash": _digest(style),
        "data": Markup(_json_in_html(data)),
    }
    return with_escapes(render(f"report/{template}.html.j2", {**values, **shared}, {}, autoescape=True))


def write_page(path: Path, drawn: Callable[[], str]) -> None:
    """Draw and write to `path`, whose name ends in .html; nothing is drawn for another.

    Raises:
        UserError: another ending, or a file that cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{path}: --html writes a page for a browser; give a name that ends in .html")
    write_whole(path, drawn())


def families_of(terms: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by family, from bytes by term; what is negative takes nothing of a bar."""
    sums = dict.fromkeys(FAMILIES, 0.0)
    for term, size in terms.items():
        sums[_FAMILY.get(term, "buffers")] += max(size, 0)
    return sums


def spread_of(parts: Sequence[tuple[str, float]], whole: float) -> list[dict[str, Any]]:
    """Return the pieces of a bar, one after the other: the look of each, with its place of BAR_UNITS."""
    pieces, at = [], 0.0
    for look, size in parts:
        width = BAR_UNITS * size / whole if whole else 0.0
        if width > 0:
            pieces.append({"look": look, "x": round(at, 2), "width": round(max(width - 1.5, 0.5), 2)})
        at += width
    return pieces


def looks(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    """Return a legend: each look with its name."""
    return [{"look": look, "name": name} for look, name in pairs]


def tile(name: str, value: str, unit: str = "", note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "unit": unit, "note": note}


def bar(
    name: str,
    value: str,
    pieces: Sequence[Mapping[str, Any]],
    rows: Sequence[tuple[str, str]],
    title: str,
    spoken: str,
    between: str = ", ",
    lines: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a bar of a chart. `title` and `rows` are its tooltip; a screen reader says `spoken` and the rows."""
    label = spoken + between.join(" ".join(row) for row in rows)
    shown = {"name": name, "value": value, "pieces": pieces, "lines": lines}
    return {**shown, "label": label, "tip": _tip(title, rows)}


def _tip(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return the text of a tooltip as the page's script reads it: the title, then a line for each name and value."""
    flat = [(name.replace("\t", " ").replace("\n", " "), value.replace("\n", " ")) for name, value in rows]
    return "\n".join([title.replace("\n", " "), *(f"{name}\t{value}" for name, value in flat)])


def term_rows(terms: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the terms that take anything, the largest first, as names and GiB for a person."""
    ordered = sorted(terms.items(), key=lambda item: -abs(item[1]))
    return [(name.replace("_", " "), f"{gib(size)} GiB") for name, size in ordered if abs(size) >= 0.005 * 2**30]


def _digest(text: str) -> str:
    """The source expression of a policy that lets this very text through."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _escaped(value: Any) -> Any:
    """Return the data of a picture with the texts that its script may draw."""
    if isinstance(value, str):
        return with_escapes(value)
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, (list, tuple)) else value


def _json_in_html(data: Mapping[str, Any]) -> str:
    """JSON that no reader of HTML can take for markup."""
    text = json.dumps(_escaped(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
