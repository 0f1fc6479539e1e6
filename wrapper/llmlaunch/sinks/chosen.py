"""Which sinks a person has turned on, and where they lie."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.errors import UserError

__all__ = ["KINDS", "Chosen", "Kind", "chosen_sinks", "harmless"]

_USER = re.compile(r"://\S*@")  # up to the last @: a password may hold one
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


@dataclass(frozen=True)
class Kind:
    """`package` is the module that must be there, `place` what a person names."""

    name: str
    variable: str
    package: str
    place: str

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("prometheus", "LLMLAUNCH_PROMETHEUS", "prometheus_client", "the folder of node_exporter's textfiles"),
        Kind("mlflow", "LLMLAUNCH_MLFLOW", "mlflow", "a tracking URI, or a folder"),
        Kind("wandb", "LLMLAUNCH_WANDB", "wandb", "a folder for offline runs"),
    )
}


@dataclass(frozen=True)
class Chosen:
    """A sink and its place, which may hold a password: left out of `repr`; messages use `shown`."""

    kind: Kind
    place: str = field(repr=False)

    @property
    def shown(self) -> str:
        return f"{self.kind.name} ({harmless(self.place)})"


def chosen_sinks(words: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> list[Chosen]:
    """Those that `words` name (`NAME=PLACE`, or `NAME` with the place in the environment), else all that the
    environment names. Raises UserError for a word that is none, and for a named one that is not installed."""
    env = os.environ if environment is None else environment
    named = [_named(word, env) for word in words]
    for chosen in named:
        if not chosen.kind.installed:
            raise UserError(missing(chosen.kind))
    return named or [_placed(kind, place) for kind in KINDS.values() if (place := env.get(kind.variable, "").strip())]


def missing(kind: Kind) -> str:
    return f"{kind.name}: its package is not installed here; type: pip install 'llmlaunch[{kind.name}]'"


def harmless(text: str) -> str:
    """The text without what may be a secret: user and password of an address, and what follows its question mark."""
    return _QUERY.sub(r"\1", _USER.sub("://", text))


def _named(word: str, env: Mapping[str, str]) -> Chosen:
    name, _, place = word.partition("=")
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"--sink {harmless(name)!r}: is no sink; there are {', '.join(KINDS)}")
    place = place.strip() or env.get(kind.variable, "").strip()
    if not place:
        raise UserError(f"--sink {name}: say where: {name}=PLACE ({kind.place}), or set {kind.variable}")
    return _placed(kind, place)


def _placed(kind: Kind, place: str) -> Chosen:
    """A path is made absolute: the sink's process need not stand where we do."""
    is_address = "://" in place or (kind.name == "mlflow" and place.partition(":")[0] in ("databricks", "file"))
    return Chosen(kind, place if is_address else str(Path(place).expanduser().absolute()))
