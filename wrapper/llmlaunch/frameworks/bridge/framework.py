"""Megatron-Bridge as the rooms above see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.framework import FRAMEWORK as MEGATRON_LM
from llmlaunch.frameworks.megatron.framework import OnMegatronCore

if TYPE_CHECKING:
    from llmlaunch.frameworks.base import Backend
    from llmlaunch.recipe.types import Recipe


FIELDS_UNREAD = "fields of Bridge's that backend.extra_args sets are not in the trace"


class MegatronBridgeFramework(OnMegatronCore):
    """Megatron-Bridge: the same Megatron core, configured by a file of settings."""

    name: ClassVar = "megatron-bridge"
    requirement: ClassVar = "Megatron-Bridge"
    traced_title: ClassVar = "Megatron core"

    def backend(self) -> Backend:
        from llmlaunch.frameworks.bridge.backend import MegatronBridge

        return MegatronBridge()

    def has_own_weights(self, folder: Path) -> bool:
        """Megatron-Bridge reads both kinds (is_hf_checkpoint_dir, training/utils/checkpoint_utils.py, 0.6)."""
        return not (folder / "config.json").exists()

    def gpu_refusal(self, recipe: Recipe) -> str:
        why = "backend: a rank of megatron-bridge is traced (--on trace); on a GPU rehearse runs Megatron-LM's script, "
        if recipe.techniques.adapters is not None:
            return f"{why}which has no adapters"
        behind = f"backend={MEGATRON_LM.name}" + ("" if recipe.data.format is None else " 'data={mock: true}'")
        return f"{why}which configures the same Megatron core with {behind} behind the recipe"

    def compared_version(self, versions: Mapping[str, str]) -> str | None:
        return versions.get(self.name)

    def trace_notes(
        self, recipe: Recipe, folder: Path, versions: Mapping[str, str], how_to_get_one: str
    ) -> tuple[str, ...]:
        """Say that settings of the person's own are not traced. Raises UserError where Bridge's own package, which
        adapters alone need, is missing."""
        if self.name not in versions and recipe.techniques.adapters is not None:
            raise UserError(
                f"{recipe.path}: training.adapters: {folder} holds no {self.name}, whose LoRA stands beside the "
                f"layers; {how_to_get_one}"
            )
        return (FIELDS_UNREAD,) if recipe.backend.extra_args else ()


FRAMEWORK = MegatronBridgeFramework()
