"""Where templates, recipes and slurm profiles lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "assets"  # laid there by the wheel build (pyproject.toml, force-include)
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent.parent


def asset(*parts: str) -> Path:
    """The path of a shipped file or folder, e.g. `asset("recipes", "llama3-70b.yaml")`. It may not exist."""
    return _ROOT.joinpath(*parts)
