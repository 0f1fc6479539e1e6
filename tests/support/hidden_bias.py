"""A site whose true peaks differ from what is predicted, by a bias nobody told the launcher, and by noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llmlaunch.calibration.cases import Prediction
from llmlaunch.layout import Layout
from llmlaunch.units import GIB
from support.measured_runs import CARD, predictions, recorded
from support.recipes import recipe_of

# Layers, hidden size, FFN, heads, query groups: sizes of published models.
MODELS = {
    "one-7b": (32, 4096, 11008, 32, 32),
    "two-8b": (32, 4096, 14336, 32, 8),
    "three-13b": (40, 5120, 13824, 40, 40),
    "four-14b": (40, 5120, 17408, 40, 8),
    "five-32b": (64, 5120, 25600, 64, 8),
    "six-70b": (80, 8192, 28672, 64, 8),
}
LAYOUTS = [(t, p, m) for t in (2, 4, 8) for p in (1, 2, 4) for m in (1, 2)]


@dataclass(frozen=True)
class Bias:
    """The truth is reserved (1 + share) + outside + bytes, of a model `by_model` shares more; each part with noise."""

    share: float = 0.0
    outside_bytes: float = 0.0
    noise: float = 0.01
    outside_noise_bytes: float = 0.1 * GIB
    by_model: Callable[[str], float] = lambda model: 0.0


BIAS = Bias(share=0.05, outside_bytes=0.8 * GIB)  # of the site whose measured runs are imported


def configuration(model: str, layout: tuple[int, int, int], sequence_length: int) -> dict[str, Any]:
    """A record without a peak: 64 devices, Megatron-LM with its distributed optimizer."""
    layers, hidden, ffn, heads, groups = MODELS[model]
    tensor, pipeline, micro = layout
    recipe = recipe_of("llama3-8b")
    shape = replace(
        recipe.model,
        name=model,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=128,
    )
    training = replace(recipe.training, sequence_length=sequence_length, global_batch_size=512)
    split = Layout(
        tensor, pipeline, data=64 // (tensor * pipeline), micro_batch_size=micro, sequence_parallel=1, zero_stage=1
    )
    return {**recorded(replace(recipe, model=shape, training=training), split), "backend_version": "0.19.0"}


@cache
def space() -> list[tuple[dict[str, Any], Prediction]]:
    """All configurations of the site that are predicted to fit the card, with their predictions."""
    records = [
        configuration(model, layout, length) for model in MODELS for layout in LAYOUTS for length in (2048, 4096, 8192)
    ]
    found = [
        (record, one) for record, one in zip(records, predictions(records), strict=True) if isinstance(one, Prediction)
    ]
    return [(record, one) for record, one in found if (one.reserved + one.outside).max() <= CARD]


def ran(
    rng: random.Random, bias: Bias, chosen: tuple[dict[str, Any], Prediction], number: int, apart: bool = True
) -> list[dict[str, Any]]:
    """The records that a run leaves: one for each pipeline rank, or one death. `apart`: torch's part is known, too."""
    record, one = chosen
    name = record["recipe"]["model"]["name"]
    # What is the same of all ranks of a run, and what is not.
    common = rng.gauss(0.0, bias.noise)
    made = []
    for stage in range(len(one.reserved)):
        share = bias.share + bias.by_model(name) + common + rng.gauss(0.0, bias.noise / 4)
        torch = float(one.reserved[stage]) * (1.0 + share)
        outside = max(float(one.outside[stage]) + bias.outside_bytes + rng.gauss(0.0, bias.outside_noise_bytes), 0.0)
        peak = round(torch + outside)
        place = {"run_id": f"run-{number}", "attempt": "1.0", "pipeline_rank": stage, "run_state": "succeeded"}
        said = {**record, **place, "id": f"run-{number}/{stage}", "peak_bytes": peak}
        if apart:
            said["observed"] = {
                "reserved_peak_bytes": round(torch),
                "outside_torch_bytes": round(outside),
                "steps_run": 50,
            }
        made.append(said)
    if max(said["peak_bytes"] for said in made) <= CARD:
        return made
    worst = max(made, key=lambda said: said["peak_bytes"])
    return [
        {
            **worst,
            "id": f"{worst['id']}/oom",
            "peak_kind": "oom",
            "peak_bytes": None,
            "run_state": "failed",
            "observed": None,
        }
    ]


def runs(
    seed: int, bias: Bias, count: int, models: Sequence[str] = tuple(MODELS), apart: bool = True
) -> list[list[dict[str, Any]]]:
    """`count` runs of different configurations, each the list of its records."""
    rng = random.Random(seed)
    mine = [one for one in space() if one[0]["recipe"]["model"]["name"] in models]
    return [ran(rng, bias, one, number, apart) for number, one in enumerate(rng.sample(mine, count))]


def noise_of(bias: Bias) -> float:
    """The mean absolute error of a perfect prediction, about."""
    return bias.noise * math.sqrt(2 / math.pi)


def site_records(seed: int, count: int) -> list[dict[str, Any]]:
    """The records of `count` runs of the site with that BIAS, their ids unlike those of another seed."""
    return [
        {**record, "id": f"{seed}/{record['id']}", "run_id": f"{seed}/{record['run_id']}"}
        for run in runs(seed, BIAS, count)
        for record in run
    ]
