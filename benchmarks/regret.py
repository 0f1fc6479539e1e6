"""What the planner's choice among measured layouts would have cost, in sample and with each group left out of the fit,
beside a rule of thumb; errors of step times, of mixtures on releases that nothing was fitted on, too; with --fit, the
constants that fit best.

Bars, on the 40 GB and the 94 GB grid: mean regret at most 0.5 %, worst 3 %, no choice that died, at most one group
with nothing safe, with the preference and without it.

    python benchmarks/regret.py [--fit] [--grid FILE.jsonl [--cluster PROFILE]]

A grid is measured records (docs/store.md) that tell a speed (`step_seconds`, `tokens_per_second_per_gpu`, or
`tflops_per_gpu` of a family in accuracy/summary.py) or died; `--cluster` is the machine they ran on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "wrapper")]

from llmlaunch.accuracy.summary import rank_correlation, throughput  # noqa: E402
from llmlaunch.calibration.evidence import JobClass  # noqa: E402
from llmlaunch.calibration.margins import margin_by_evidence  # noqa: E402
from llmlaunch.calibration.records import read_records  # noqa: E402
from llmlaunch.cluster.cards import machines  # noqa: E402
from llmlaunch.cluster.load import load_cluster  # noqa: E402
from llmlaunch.timing.products import replaced  # noqa: E402
from support.regret import Choice, MeasuredLayout, choose, measured_layouts, predicted, preferred, rule_of_thumb  # noqa: E402
from support.switch_pairs import SWITCHES, switch_pairs  # noqa: E402
from validation.scoring import score  # noqa: E402

MEASUREMENTS = ROOT / "tests" / "data" / "measurements"
OUTCOMES, MIXTURES_FILE, STEPS = (MEASUREMENTS / f"{name}.jsonl" for name in ("outcomes", "mixtures", "step_times"))
RELEASED, RELEASED_GRID = MEASUREMENTS / "released_outcomes.jsonl", "fujii-grid-H100-94GB"
GRID, TABLES, MIXTURES = "fujii-grid-A100-40GB", "nvidia-perf-dense", "nvidia-perf-mixtures"
PUBLIC, TRAINERS = "public steps", ("qwen-finetune", "stas00-steps", "flagperf-steps", "atorch-steps")
# What is fitted, on which family, and the values tried: the least mean of |ln(predicted / measured)| wins.
FITTED: Mapping[str, Mapping[str, np.ndarray]] = {
    GRID: {
        "matrix_efficiency_8": np.arange(0.70, 0.871, 0.01),
        "mask_entry_seconds": np.arange(5.0e-9, 7.01e-9, 0.25e-9),
    },
    TABLES: {
        "narrow_matrix_efficiency_9": np.arange(0.60, 0.861, 0.02),
        "narrow_matrix_efficiency_10": np.arange(0.50, 0.861, 0.02),
        "narrow_matrix_efficiency_gb300": np.arange(0.65, 0.951, 0.02),
        "block_scaled_efficiency": np.arange(0.80, 1.001, 0.02),
        "four_bit_matrix_efficiency_10": np.arange(0.40, 0.861, 0.02),
        "four_bit_matrix_efficiency_gb300": np.arange(0.40, 0.861, 0.02),
    },
    PUBLIC: {
        "kernel_host_seconds": np.arange(8e-6, 2.01e-5, 2e-6),
        "gather_host_seconds": np.arange(2e-4, 8.01e-4, 1e-4),
        "host_optimizer_efficiency": np.arange(0.2, 0.81, 0.1),
        "attention_forward_efficiency_9": np.arange(0.60, 0.761, 0.05),
        "attention_backward_efficiency_9": np.arange(0.45, 0.651, 0.05),
        "attention_forward_efficiency_10": np.arange(0.55, 0.761, 0.05),
        "attention_backward_efficiency_10": np.arange(0.35, 0.601, 0.05),
    },
    MIXTURES: {
        "module_kernel_host_seconds": np.arange(4.5e-5, 7.1e-5, 0.5e-5),
        "expert_kernel_host_seconds": np.arange(0.8e-5, 1.5e-5, 0.2e-5),
        "overlapped_schedule_host_factor": np.arange(1.4, 2.01, 0.2),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--cluster")
    parser.add_argument("--fit", action="store_true")
    told = parser.parse_args()
    clusters = machines()
    if told.grid:
        records = list(read_records(told.grid))
        if told.cluster:
            clusters = {record["gpu"]: load_cluster(told.cluster, Path()) for record in records}
        show(measured_layouts(records, clusters), str(told.grid))
        return
    released = [record for record in read_records(RELEASED) if record["family"] == RELEASED_GRID]
    show(measured_layouts(released, clusters), RELEASED_GRID)
    records = [record for record in read_records(OUTCOMES) if record.get("split") == "fit"]
    grid, tables = (measured_layouts(of_family(records, name), clusters) for name in (GRID, TABLES))
    show(grid, GRID)
    left_out(grid)
    for name in (GRID, TABLES):
        print(name, summary([score(record, clusters) for record in of_family(records, name)]))
    published, steps = list(read_records(MIXTURES_FILE)), list(read_records(STEPS))
    mixtures(published, clusters)
    switches(clusters)
    for name in sorted({record["family"] for record in steps}):
        print(name, summary([score(record, clusters) for record in of_family(steps, name)]))
    for split in ("fit", "test"):
        part = [score(record, clusters) for record in steps if record["split"] == split]
        print("public steps,", split, summary(part))
    if told.fit:
        fitted = {
            MIXTURES: [record for record in published if record["split"] == "fit"],
            PUBLIC: [record for record in steps if record["split"] == "fit" and record["family"] in TRAINERS],
        }
        others = {name: measured_layouts(some, clusters) for name, some in fitted.items()}
        for name, runs in {GRID: grid, TABLES: tables, **others}.items():
            print("fitted on", name, {key: f"{value:.3g}" for key, value in fit(runs, FITTED[name]).items()})
        models_left_out(tables)


def of_family(records: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["family"] == name]


def mixtures(records: Sequence[Mapping[str, Any]], clusters: Mapping[str, Any]) -> None:
    """Print the errors on the releases that constants were fitted on and on the others, and by model and card."""
    for split, title in (("fit", "releases fitted on"), ("test", "other releases")):
        scores = [score(record, clusters) for record in records if record["split"] == split]
        print(MIXTURES, f"({title})", summary(scores))
        for part in ("model", "gpu"):
            for name in sorted({_part(found.record, part) for found in scores}):
                print(f"  {name}:", summary([found for found in scores if _part(found.record, part) == name]))


def switches(clusters: Mapping[str, Any]) -> None:
    """Print the errors of public runs that show what switches bring, and by what a switch changes a step."""
    print("switches of mixtures", summary([score(record, clusters) for record in read_records(SWITCHES)]))
    print("| model | card | what the second run changed | measured | predicted |\n|---|---|---|---|---|")
    for pair in switch_pairs():
        change = f"{pair.measured - 1.0:+.0%} | {pair.predicted - 1.0:+.0%}"
        print(f"| {pair.model} | {pair.card} | {pair.change} | {change} |")


def _part(record: Mapping[str, Any], part: str) -> str:
    return str(record["model"]["name"] if part == "model" else record[part])


def summary(found: Sequence[Any]) -> str:
    speeds = throughput(found)
    order = speeds.pop("rank_correlation")
    shares = " ".join(f"{name} {value:+.1%}" for name, value in speeds.items() if isinstance(value, float))
    return f"{speeds['records']} timed: {shares} rank correlation {'-' if order is None else f'{order:.3f}'}"


def limits(runs: Sequence[MeasuredLayout], family: str) -> dict[str, float]:
    """Return how far each device may be filled, by the margin without their family's own runs."""
    margins = {}
    for device in {run.cluster.accelerator.name: run.cluster.accelerator for run in runs}.values():
        job = JobClass("megatron", mixture=False, narrow=False, capability=device.compute_capability)
        margin = margin_by_evidence(job, device.memory_bytes, without_source=family)
        assert margin is not None
        margins[device.name] = float(margin.limit_bytes)
    return margins


def show(runs: Sequence[MeasuredLayout], name: str) -> None:
    """Ours and the rule of thumb by group."""
    seconds = predicted(runs)
    ours = choose(runs, seconds, limits(runs, name))
    thumb = choose(runs, rule_of_thumb(runs), limits(runs, name))
    print(f"{name}: what the choice loses of the best measured speed\n")
    print("| tokens, sequences, devices | measured | ours | of the safe | rule of thumb | taken | MAPE | rank corr. |")
    print("|---|---|---|---|---|---|---|---|")
    for group, choice in ours.items():
        mine = [i for i, run in enumerate(runs) if run.group == group and run.seconds]
        real = np.array([runs[i].seconds for i in mine])
        error, order = np.abs(seconds[mine] / real - 1.0).mean(), rank_correlation(seconds[mine], real)
        taken = choice.chosen.case.layout.describe() if choice.chosen else "nothing is safe"
        losses = [said(choice.regret), said(choice.of_time_alone), said(thumb[group].regret)]
        correlation = "-" if order is None else f"{order:.2f}"
        row = [", ".join(map(str, group[1:])), str(len(mine)), *losses, taken, f"{error:.1%}", correlation]
        print(f"| {' | '.join(row)} |")
    plain = choose(runs, preferred(runs), limits(runs, name))
    for who, choices in (("ours", ours), ("ours with the preference", plain), ("rule of thumb", thumb)):
        print(f"\n{who}: {total(choices.values())}", end="")
    print("\n")


def said(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def total(choices: Iterable[Choice]) -> str:
    all_of = list(choices)
    lost = [choice.regret for choice in all_of if choice.regret is not None]
    alone = [choice.of_time_alone for choice in all_of if choice.of_time_alone is not None]
    dead, nothing = sum(choice.dead for choice in all_of), sum(choice.chosen is None for choice in all_of)
    return (
        f"mean {np.mean(lost):.2%}, worst {max(lost):.2%}; of the safe alone {np.mean(alone):.2%}, {max(alone):.2%}; "
        f"died {dead}, nothing safe {nothing}"
    )


def left_out(runs: Sequence[MeasuredLayout]) -> None:
    """Each group chosen with constants fitted on the others."""
    print("each group left out of the fit:")
    choices = []
    for group in sorted({run.group for run in runs}):
        values = fit([run for run in runs if run.group != group], FITTED[GRID])
        with replaced(values):
            mine = [run for run in runs if run.group == group]
            choice = choose(mine, predicted(mine), limits(mine, GRID))[group]
        choices.append(choice)
        print(f"  {group[-1]} devices: {said(choice.regret)}", {name: f"{value:.3g}" for name, value in values.items()})
    print(f"  {total(choices)}\n")


def models_left_out(runs: Sequence[MeasuredLayout]) -> None:
    """Each model of NVIDIA's tables timed with constants fitted on the others."""
    for model in sorted({run.group[0] for run in runs}):
        mine = [run for run in runs if run.group[0] == model and run.seconds]
        with replaced(fit([run for run in runs if run.group[0] != model], FITTED[TABLES])):
            error = predicted(mine) / np.array([run.seconds for run in mine]) - 1.0
        print(f"{model} left out of the fit: MAPE {np.abs(error).mean():.1%}, bias {error.mean():+.1%}")


def fit(runs: Sequence[MeasuredLayout], grids: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The values of the constants that fit best: one after the other, until none changes any more."""
    timed = [run for run in runs if run.seconds]
    real = np.array([run.seconds for run in timed])

    def error(values: Mapping[str, float]) -> float:
        with replaced(values):
            return float(np.abs(np.log(predicted(timed) / real)).mean())

    best = {name: float(grid[len(grid) // 2]) for name, grid in grids.items()}
    before: dict[str, float] = {}
    while before != best:
        before = dict(best)
        for name, grid in grids.items():
            best[name] = min(map(float, grid), key=lambda value, name=name: error({**best, name: value}))
    return best


if __name__ == "__main__":
    main()
