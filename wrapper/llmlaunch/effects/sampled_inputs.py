"""Linear layers that keep a share of their inputs' rows for an unbiased weight gradient (WTA-CRS). What-if."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layers.block import Saved
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.layer import Branch
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job


class SampledInputsEffect(Effect):
    """A share of the rows (WTA-CRS, Liu et al. 2023, section 3)."""

    order = 3  # of what linear layers save

    def on(self, job: Job) -> bool:
        return job.techniques.sampled_share < 1.0

    def columns(self, c: LayerColumns) -> LayerColumns:
        """Their backward passes let go of so much less."""
        return replace(c, kept_rows=c.techniques.sampled_share)

    def saved(self, c: LayerColumns, branch: Branch, tensors: dict[str, Saved]) -> dict[str, Saved]:
        """The attention keeps the whole of what the projection after it reads."""
        share = c.techniques.sampled_share
        return {
            name: replace(each, bytes=share * each.bytes) if each.read_by else each for name, each in tensors.items()
        }
