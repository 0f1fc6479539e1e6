"""Megatron-Bridge's own performance presets beside what a recipe and a plan choose: shown, never taken.

`presets.json` has what each preset's function sets (megatron/bridge/perf_recipes, Megatron-Bridge 0.6); a test runs
them and holds the file equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.frameworks.argument import Reason
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe

__all__ = ["PRESETS", "Preset", "preset_for"]

Settings = dict[str, tuple[Any, Reason]]

PRESETS = Path(__file__).with_name("presets.json")
NAME = re.compile(r"(?P<model>\w+)_pretrain_(?P<devices>\d+)gpu_(?P<accelerator>[a-z]+\d+)_(?P<numbers>\w+)_config")
# Models of one shape have one preset.
SHARED_SHAPES = {"llama31_8b": "llama3_8b", "llama31_70b": "llama3_70b", "llama3_405b": "llama31_405b"}
NUMBERS = {None: "bf16", "tensorwise": "fp8cs", "mxfp8": "fp8mx", "nvfp4": "nvfp4"}
UNSET = "nothing"
OF_MIXTURES = ("model.moe_", "model.expert_")


@frozen
class Preset:
    """What one function of Bridge's sets: values by the dotted names of fields."""

    name: str
    fields: Mapping[str, Any]

    def differences(self, settings: Settings) -> dict[str, tuple[Any, Any]]:
        """Return the fields that the preset sets to another value than the job's: (preset's, job's)."""
        mixture = "model.num_moe_experts" in settings
        names = (name for name in self.fields if mixture or not name.startswith(OF_MIXTURES))
        ours = {name: settings[name][0] if name in settings else UNSET for name in names}
        return {name: (value, ours[name]) for name, value in self.fields.items() if value != ours.get(name, value)}

    def beside(self, settings: Settings) -> Settings:
        """Return the settings, those that the preset would set otherwise with that in their reason."""
        explained = dict(settings)
        for name, (value, _) in self.differences(settings).items():
            if name in explained:
                ours, reason = explained[name]
                reasons = (reason.why, f"Bridge's preset {self.name} would set {json.dumps(value)}")
                explained[name] = (ours, replace(reason, why="; ".join(filter(None, reasons))))
        return explained

    def note(self, settings: Settings) -> str:
        unlike = self.differences(settings)
        pairs = (f"{name} {_shown(value)} (here {_shown(ours)})" for name, (value, ours) in unlike.items())
        differs = f"it would set {', '.join(pairs)}" if unlike else "it would set nothing otherwise"
        return f"Bridge's own preset for this model and GPU, {self.name}, is not taken; {differs}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def preset_for(recipe: Recipe) -> Preset | None:
    """Return the preset of pretraining for the recipe's model, GPU and number format whose number of GPUs is nearest;
    None where there is none, or the recipe finetunes."""
    if recipe.data.sft is not None or recipe.techniques.adapters is not None:
        return None
    model = recipe.model.name.replace("-", "_").replace(".", "")
    wanted = (
        SHARED_SHAPES.get(model, model),
        recipe.cluster.accelerator.name.partition("-")[0],
        NUMBERS.get(recipe.training.numbers.narrow),
    )
    named = ((NAME.fullmatch(name), name) for name in _presets())
    fitting = [
        (abs(math.log(int(parts["devices"]) / recipe.world_size)), name)
        for parts, name in named
        if parts is not None and parts.group("model", "accelerator", "numbers") == wanted
    ]
    if not fitting or recipe.workload.precision != "bf16":
        return None
    name = min(fitting)[1]
    return Preset(name, _presets()[name])


@cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    presets: Mapping[str, Mapping[str, Any]] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return presets
