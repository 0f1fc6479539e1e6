"""How much a test tries: a little in `make test`, a lot in `make soak`."""

from __future__ import annotations

from hypothesis import settings

SOAK = settings().max_examples > 100


def examples(few: int, many: int = 200) -> settings:
    """Return settings that draw `few` examples, and `many` in `make soak`."""
    return settings(max_examples=many if SOAK else few, deadline=None)
