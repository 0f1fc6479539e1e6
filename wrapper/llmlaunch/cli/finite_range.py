"""An option's number within bounds; unlike click.FloatRange, which compares and so lets NaN pass, a finite one."""

from __future__ import annotations

from typing import Any

import click

from llmlaunch.rundir.foreign_values import number_in


class FiniteRange(click.FloatRange):
    """A finite decimal number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and number_in(value) is None:
            self.fail(f"{value[:40]!r} is no finite number", param, ctx)
        return super().convert(value, param, ctx)
