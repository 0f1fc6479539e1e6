"""The margin: what must stay free of a device's or a node's memory, the evidence for it, and the risk that is left.

Three kinds of evidence give it, the best first. The store's own runs give a ratio that a peak is at most of its
prediction. The runs that are shipped with llmlaunch, joined by the store's, give an amount in GiB and a share. Where
neither bounds the risk, Fujii et al.'s rule or the recipe's own share decides. All of them end in one `Margin`, from
which the planner takes its limit, the stated risk, and the words for a person.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from llmlaunch.calibration.evidence import (
    ENOUGH,
    FUJII_SHARE,
    UNIT_SHARE,
    EvidencePool,
    EvidenceRun,
    JobClass,
    evidence_pool,
    job_class,
    no_bound_sentence,
    runs_needed,
    unit_bytes,
)
from llmlaunch.calibration.lessons import NO_LESSONS, Lessons, RatioBound, Support
from llmlaunch.cluster.profile import Accelerator
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import MemoryPolicy, Recipe
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE

DEFAULT_RISK = 0.07  # where the recipe names none: at less, more than 9 % of the runs that fitted would be refused
# Reserved / allocated of a job whose segments do not expand was 1.12 at two peaks (MEMO, SIGMOD 2025: 65.7 to 68.2 GB
# allocated, 73.5 to 76.5 reserved, and a request of 4 GB failed on 80 GB), where the prediction has 1.02.
FRAGMENTS = 0.10
SIZE_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # sbatch: megabytes where no unit is given
SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)


@frozen
class Margin:
    """How far a device or a node may be filled, of its `memory_bytes` (`memory_source` says who knows them): up to
    `limit_bytes`, for the `reason` given, which a share `risk` of comparable runs may exceed. `runs` of them are behind
    that number; both are None where no risk is asked for. `support` counts the store's runs that are like the plan,
    whatever decides; None where nobody looked.

    `fits_bytes` is what a predicted peak may reach if no error of the prediction is allowed for: the card less what is
    known to be missing. None: nothing is between safe and unsafe, as on CPUs and for host memory. `evidence` states the
    risk of a predicted size; None where no measured run can."""

    limit_bytes: int
    memory_bytes: int
    memory_source: str
    reason: str
    risk: float | None = None
    runs: int | None = None
    support: Support | None = None
    fits_bytes: int | None = None
    evidence: EvidencePool | None = None

    @property
    def most_bytes(self) -> int:
        """The bytes up to which a predicted peak is tight; never fewer than those up to which it is safe."""
        return max(self.limit_bytes, self.fits_bytes or 0)

    def verdict_of(self, device_bytes: int) -> str:
        """Return SAFE, TIGHT or UNSAFE for a peak of `device_bytes`."""
        if device_bytes <= self.limit_bytes:
            return SAFE
        return TIGHT if device_bytes <= self.most_bytes else UNSAFE

    def risk_of(self, device_bytes: int) -> float | None:
        """Return the share of comparable runs, predicted to need `device_bytes`, that would need more than fits; None
        where no measured run can tell. It never falls as `device_bytes` grows."""
        if self.evidence is None or self.fits_bytes is None:
            return None
        return self.evidence.risk_of((self.fits_bytes - device_bytes) / unit_bytes(device_bytes))

    def bytes_at(self, risk: float) -> int | None:
        """Return the largest device peak that fits and whose stated risk is at most `risk`; None where there is none,
        or where no measured run can tell."""
        if (least := self.risk_of(0)) is None or least > risk:
            return None
        low, high = 0, self.most_bytes + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if (self.risk_of(middle) or 0.0) <= risk else (low, middle)
        return low


def device_margin(recipe: Recipe, lessons: Lessons = NO_LESSONS) -> Margin:
    """Return the margin of a device.

    The recipe's share of device memory decides where it names one and no risk. Else measured runs do: those of the
    store where they bound the risk, the shipped ones with them where they do not. A bound of the store on jobs that are
    new to its runs never allows more than the shipped ones do. On a CPU, on a card that nobody measured and at a risk
    that nothing bounds the share decides, which is Fujii's 80 % where the recipe names none. What a desktop holds of
    each device is subtracted.
    """
    margin, held_bytes = _margin_of_card(recipe, lessons), int(recipe.cluster.desktop_gib * GIB)
    if not held_bytes:
        return margin
    fits_bytes = None if margin.fits_bytes is None else max(margin.fits_bytes - held_bytes, 0)
    reason = f"a desktop holds {recipe.cluster.desktop_gib:g} GiB of each device (cluster.desktop_gib); {margin.reason}"
    return replace(margin, limit_bytes=max(margin.limit_bytes - held_bytes, 0), fits_bytes=fits_bytes, reason=reason)


def _margin_of_card(recipe: Recipe, lessons: Lessons) -> Margin:
    """Return the margin of a device that only the job uses."""
    accelerator, policy, bound = recipe.cluster.accelerator, recipe.memory, lessons.bound
    on_gpu, memory_bytes = accelerator.kind == "gpu", accelerator.memory_bytes
    by_share = _margin_by_share(accelerator, policy)
    if not (policy.by_runs if on_gpu else policy.risk is not None):
        return by_share
    risk = DEFAULT_RISK if policy.risk is None else policy.risk
    by_evidence = None
    if on_gpu:
        by_evidence = margin_by_evidence(job_class(recipe), memory_bytes, risk, own_runs=lessons.own_runs)
    if by_evidence is not None:
        by_evidence = _on_card(by_evidence, accelerator, policy)
    if bound is not None and bound.ratio is not None:
        return _margin_by_ratio(bound, bound.ratio, risk, by_evidence or by_share, recipe)
    if by_evidence is not None:
        return by_evidence
    return replace(by_share, reason=f"{_why_share(recipe, risk, bound)}: {by_share.reason}", risk=risk, runs=0)


def _margin_by_ratio(bound: RatioBound, ratio: float, risk: float, others: Margin, recipe: Recipe) -> Margin:
    """Return the margin by the store's own runs; by `others` where the plan is new to these runs and the others allow
    less."""
    accelerator, policy = recipe.cluster.accelerator, recipe.memory
    # what the recipe itself wants free; a ratio below 1 never lifts the limit above the card: no comparable run came
    # that close to it
    free_bytes = policy.floor_bytes if accelerator.kind == "gpu" and policy.floor_gib is not None else 0
    most = max(int(accelerator.memory_bytes / max(ratio, 1.0)) - free_bytes, 0)
    if bound.widened is None or most <= others.limit_bytes:
        reason = bound.sentence + (f", and {free_bytes / GIB:.1f} GiB stay free" if free_bytes else "")
        return replace(others, limit_bytes=most, reason=reason, risk=risk, runs=bound.runs)
    return replace(others, reason=f"{bound.sentence}: {others.reason}", risk=risk, runs=bound.runs)


def margin_by_evidence(
    job: JobClass,
    memory_bytes: int,
    risk: float = DEFAULT_RISK,
    without_source: str | None = None,
    own_runs: Sequence[EvidenceRun] = (),
) -> Margin | None:
    """Return the margin of a card of `memory_bytes` at `risk`, by all shipped runs but those `without_source` and by
    `own_runs`; None where these do not bound it."""
    evidence = evidence_pool(job, risk, without_source, own_runs)
    if evidence is None:
        return None
    fits_bytes = int(memory_bytes / (1.0 + FRAGMENTS)) if job.whole_segments else memory_bytes
    units = evidence.units_at(risk)
    reason = (
        f"{units:.1f} GiB and {100.0 * units * UNIT_SHARE:.1f} % stay free, which at most {risk:.0%} of such jobs "
        f"exceed: {evidence.sentence}"
    )
    return Margin(
        limit_bytes=max(int((fits_bytes - units * GIB) / (1.0 + units * UNIT_SHARE)), 0),
        memory_bytes=memory_bytes,
        memory_source="",
        reason=reason,
        risk=risk,
        runs=evidence.runs,
        fits_bytes=fits_bytes,
        evidence=evidence,
    )


def _on_card(margin: Margin, accelerator: Accelerator, policy: MemoryPolicy) -> Margin:
    """Return a margin of measured runs on one card, with what the recipe itself wants free."""
    assert margin.fits_bytes is not None
    most, reason, fits_bytes = margin.limit_bytes, margin.reason, margin.fits_bytes
    if policy.floor_gib is not None and fits_bytes - policy.floor_bytes < most:
        most, reason = max(fits_bytes - policy.floor_bytes, 0), f"{policy.floor_gib:g} GiB stay free; {reason}"
    missing_bytes = margin.memory_bytes - fits_bytes
    if missing_bytes:
        reason = f"{missing_bytes / GIB:.1f} GiB may be lost in fragments of segments that do not expand; {reason}"
    return replace(margin, limit_bytes=most, memory_source=accelerator.memory_source, reason=reason)


def _why_share(recipe: Recipe, risk: float, bound: RatioBound | None) -> str:
    accelerator = recipe.cluster.accelerator
    if accelerator.kind == "cpu":
        return no_bound_sentence(risk, 0) if bound is None else bound.sentence
    if evidence_pool(job_class(recipe), DEFAULT_RISK) is None:
        return f"no measured run is of a card like {accelerator.name}"
    return f"risk {risk:g} needs {ENOUGH * runs_needed(risk)} measured runs"


def _margin_by_share(accelerator: Accelerator, policy: MemoryPolicy) -> Margin:
    """Fujii et al.'s rule: at most 80 % of the device (454 runs on A100 and H100, arXiv 2411.06465), and never less
    free than a fixed floor, because 20 % of a 40 GB card is too thin. A CPU process has no driver beside it: there the
    share alone decides."""
    on_gpu, memory = accelerator.kind == "gpu", accelerator.memory_bytes
    share = FUJII_SHARE if policy.limit is None else policy.limit
    rule = "the 80 % rule of Fujii et al." if share == FUJII_SHARE else "as the recipe says"
    reason = f"{share:.0%} of device memory, {rule}"
    fits_bytes = memory if on_gpu else None
    margin = Margin(int(memory * share), memory, accelerator.memory_source, reason, fits_bytes=fits_bytes)
    if on_gpu and memory - policy.floor_bytes < margin.limit_bytes:
        reason = f"{policy.floor_bytes / GIB:.1f} GiB stay free, more than {share:.0%} of the device would leave"
        return replace(margin, limit_bytes=max(memory - policy.floor_bytes, 0), reason=reason)
    return margin


def host_margin(recipe: Recipe) -> Margin:
    """Return how far a node's host memory may be filled: the recipe's share of what SLURM is asked for
    (`slurm.mem`, `slurm.mem-per-gpu`), or of the node's memory.

    Raises:
        UserError: the request is no size sbatch knows.
    """
    requested, source = _requested_host_bytes(recipe)
    node_bytes = _node_bytes(recipe)
    available = node_bytes if requested is None else min(requested, node_bytes)
    share = FUJII_SHARE if recipe.memory.limit is None else recipe.memory.limit
    where = "the node's host memory" if requested is None or node_bytes < requested else source
    by_request = requested is not None and requested <= node_bytes
    return Margin(
        limit_bytes=int(available * share),
        memory_bytes=available,
        memory_source=source if by_request else f"profile of cluster {recipe.cluster.name}",
        reason=f"{share:.0%} of {where} ({available / GIB:.{0 if available >= GIB else 1}f} GiB)",
    )


def _requested_host_bytes(recipe: Recipe) -> tuple[int | None, str]:
    """Return the bytes of a node that sbatch is asked for (None: all of it), and the recipe key that asks."""
    for option, times in (("mem", 1), ("mem-per-gpu", recipe.cluster.devices_per_node)):
        value = recipe.slurm.get(option)
        if value is None or isinstance(value, bool):
            continue
        size = times * _size_bytes(f"{recipe.path}: slurm.{option}", str(value).strip())
        return (size or None), f"slurm.{option}"
    return None, ""


def _size_bytes(where: str, text: str) -> int:
    size = SIZE.fullmatch(text)
    if size is None:
        raise UserError(f"{where}: {text!r} is no amount of memory; write a whole number with K, M, G or T, e.g. 480G")
    return int(size[1]) * SIZE_UNITS[size[2].upper()]


def _node_bytes(recipe: Recipe) -> int:
    """On a CPU-only machine the devices' memory is the node's own, so a node has at least what its devices have."""
    cluster = recipe.cluster
    if cluster.accelerator.kind == "cpu":
        return max(cluster.host_memory_bytes, cluster.devices_per_node * cluster.accelerator.memory_bytes)
    return cluster.host_memory_bytes
