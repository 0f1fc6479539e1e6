"""Measurement records (docs/store.md): their type, how they are read from a file, which of them say something of other
runs, and the machine that one says it ran on. Everything here is told from the record alone, before it is priced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypedDict, cast, get_args, get_origin, get_type_hints

from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.documents.json_strict import strict_object
from llmlaunch.errors import UserError
from llmlaunch.frameworks.recorded import TABLES
from llmlaunch.frozen import frozen
from llmlaunch.rundir.foreign_values import MOST_WHOLE
from llmlaunch.rundir.regular_files import read_bytes
from llmlaunch.rundir.values import shortened, to_type
from llmlaunch.units import GB


class MeasurementRecord(TypedDict, total=False):
    """One measurement record, from its import to its score: one configuration on one kind of GPU, one kind of peak and,
    where known, one pipeline rank. The object itself is kept, so that fields beside these stay in it; null means "not
    known", never a default. The last three groups are of runs that llmlaunch measured itself."""

    id: str
    family: str
    split: str
    peak_kind: str  # allocated, reserved, device, resident, host; without bytes: oom, host_oom, fits
    peak_bytes: int | None
    allocator_statistic: str | None
    repeats: dict[str, Any] | None
    pipeline_rank: int | None  # null: the worst one, or not known
    rank_scope: str
    backend: str
    backend_version: str | None
    gpu: str
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None
    devices_per_node: int | None
    world_size: int | None
    sequence_length: int | None
    micro_batch_size: int | None  # sequences
    global_batch_size: int | None
    num_microbatches: int | None  # per pipeline and step
    model: dict[str, Any]
    parallelism: dict[str, Any]
    optimizer: dict[str, Any]
    recompute: dict[str, Any]
    precision: dict[str, Any]
    implementation: dict[str, Any]
    techniques: dict[str, Any] | None
    recipe: dict[str, Any]  # of a run of llmlaunch's own, in place of the sections before: what of it decides bytes
    layout: dict[str, Any]
    source: dict[str, Any]
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    flags_known: bool | None  # false: a published row without its recompute and optimizer flags

    schema: int
    run_id: str
    attempt: str
    run_state: str
    started_at: float | None  # unix seconds
    calibration_id: str

    node: str | None
    global_rank: int | None
    gpu_uuid: str | None
    peak_source: str | None
    peak_at_least: bool  # true: it may have been higher, since whoever measured it was lost; absent otherwise
    predicted_bytes: int | None
    baseline_bytes: int | None
    observed: dict[str, Any]

    line: str
    numbers: dict[str, Any]


Record = Mapping[str, Any]
"""A measurement record as it is read: the store takes over any JSON object with an id."""

SECTIONS = ("model", "parallelism", "optimizer", "recompute", "precision", "implementation")
OF_RECIPE = ("recipe", "layout")
REQUIRED = ("id", "family", "peak_kind", "peak_bytes", "backend", "gpu", "sequence_length", "micro_batch_size")
NAMES = ("id", "family", "peak_kind", "backend", "gpu")  # never null
CONFIGURATION = (
    *("backend", "gpu", "gpu_memory_bytes", "world_size", "model", "sequence_length", "micro_batch_size"),
    *("global_batch_size", "parallelism", "optimizer", "recompute", "precision", "implementation", "techniques"),
    *("recipe", "layout"),
)
CPU = "cpu"  # the `gpu` of records of CPU-only machines
UNFUSED = ("unfused", "eager")  # attention that writes its scores out; the second is Hugging Face's name
REHEARSED = "rehearsed"  # `source.evidence` and `family` of one rank that ran alone: it speaks for its own shape
FULL = 0.9  # a failed run of our own that had filled this share of its card counts as out of memory
FEWEST_STEPS = 2  # the second step is the first with the optimizer's states, and communicators are made on first use


def read_records(path: Path) -> list[MeasurementRecord]:
    """Return all records of a JSON Lines file, in file order.

    Raises:
        UserError: the file cannot be read, or a line is not a measurement record.
    """
    try:
        lines = read_bytes(path, 2**30, follow=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        why = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        written = f"`{to_type('measurements', 'export', path)}` writes those of the store there"
        raise UserError(
            f"{path}: cannot be read: {why}; give a file of measurement records, one JSON object a line; {written}"
        ) from None
    records = [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f"{path}: holds no record; give a file of measurement records, one JSON object a line")
    return records


def _record(path: Path, number: int, line: str) -> MeasurementRecord:
    try:
        record = strict_object(line)
    except RecursionError:
        raise UserError(f"{path}:{number}: is nested too deeply for a measurement record; remove the line") from None
    except TypeError:
        raise UserError(f"{path}:{number}: is not a JSON object; a measurement record is one object a line") from None
    except ValueError as failure:
        raise UserError(f"{path}:{number}: is not JSON ({failure}); mend or remove the line") from None
    defect = problem(record)
    if defect is not None:
        raise UserError(f"{path}:{number}: {defect}")
    return cast(MeasurementRecord, record)


def problem(record: Record) -> str | None:
    """Return why a JSON object is no measurement record, or None if it is one."""
    sections = OF_RECIPE if "recipe" in record else SECTIONS
    missing = [name for name in (*REQUIRED, *sections) if name not in record]
    if missing:
        return f"lacks {', '.join(missing)}; null means not known, absent is refused"
    wrong = [name for name in sections if not isinstance(record[name], dict)]
    if wrong:
        return f"{', '.join(wrong)} must be an object"
    unnamed = [name for name in NAMES if not isinstance(record[name], str)]
    if unnamed:
        return f"{', '.join(unnamed)} must be a text"
    for name, words in _field_words().items():
        value = record.get(name)
        if value is not None and not _FITS[words](value):
            return f"{name} must be {words} or null, not {shortened(repr(value))}"
    repeats = record.get("repeats")
    if repeats and not all(_is_number(repeats.get(name)) for name in ("min_bytes", "max_bytes")):
        return "repeats must name min_bytes and max_bytes, numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_WHOLE


_FITS: Mapping[str, Callable[[object], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": _is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
}
_WORDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


@cache
def _field_words() -> Mapping[str, str]:
    """Return what each field of MeasurementRecord must be, in words."""
    words = {}
    for name, hint in get_type_hints(MeasurementRecord).items():
        form = next((part for part in (hint, *get_args(hint)) if part in _WORDS or get_origin(part) in _WORDS), None)
        if form is not None:
            words[name] = _WORDS[get_origin(form) or form]
    return words


def table_of(record: Record) -> str | None:
    """Return the fact table of the record's backend, or None for an unknown backend."""
    return TABLES.get(str(record.get("backend")))


def accelerator_of(record: Record) -> str:
    """Return the accelerator's name as recipes have it if the record's card is known, else the card's."""
    from llmlaunch.cluster.cards import accelerator_of_card

    return accelerator_of_card(record["gpu"], record.get("gpu_memory_bytes")) or str(record["gpu"])


def machine_of(record: Record, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """Return the machine that stands for the record's card, or None for an unknown card. `clusters` are machines by
    accelerator (`cluster.cards.machines`)."""
    return clusters.get(accelerator_of(record))


def card_bytes(record: Record, clusters: Mapping[str, Cluster]) -> int | None:
    """Return the memory of the record's card: as recorded, else that of its machine; None if neither is known."""
    recorded, cluster = record.get("gpu_memory_bytes"), machine_of(record, clusters)
    if isinstance(recorded, int | float) and recorded > 0:
        return int(recorded)
    return cluster.accelerator.memory_bytes if cluster else None


def exclusion_reason(record: Record) -> str | None:
    """Return in a few words why a record says nothing of other runs, or None if it does.

    The peak of a run that failed is what it reached, not what it needed. A run that goes on, that ended before its
    second step, or whose monitor was lost may need more than its peak. What other programs used of the same card is no
    part of a prediction. A rank that was rehearsed alone speaks for its own shape only.
    """
    source = record.get("source")
    if record.get("flags_known") is False:
        return "flags not known"
    if isinstance(source, Mapping) and source.get("evidence") in ("failed", REHEARSED):
        return str(source["evidence"])
    if ran_out(record):
        return None
    if record.get("peak_kind") == "oom":
        return "ran out of memory that others held, or that its program kept from it"
    return reason_of_no_whole_peak(record)


def reason_of_no_whole_peak(record: Record) -> str | None:
    """Return in a few words why a measured peak is not what its whole run needs, or None if it is."""
    if record.get("run_state") not in (None, "succeeded"):
        return f"{record.get('run_state')}"
    if not ran_long_enough(record):
        return f"fewer than {FEWEST_STEPS} steps"
    if record.get("peak_at_least"):
        return "whoever measured it was lost"
    return "others on the card" if _shared_its_card(record) else None


def ran_out(record: Record) -> bool:
    """Whether the run died because its plan did not fit the card."""
    return _filled_its_card(record) or (record.get("peak_kind") == "oom" and _had_its_card_alone(record))


def ran_long_enough(record: Record) -> bool:
    """Whether the run made the steps that a peak needs. It counts as long enough if its steps were not counted."""
    steps = _observed(record).get("steps_run")
    return not isinstance(steps, int) or steps >= FEWEST_STEPS


def retried_allocations(record: Record) -> bool:
    """Whether torch's allocator returned its cache to the driver to continue. The card was full then, and the peak is
    lower than it would have been on a larger card."""
    retries = _observed(record).get("alloc_retries")
    return isinstance(retries, int) and retries > 0


def _filled_its_card(record: Record) -> bool:
    card, peak = record.get("gpu_memory_bytes"), record.get("peak_bytes")
    of_a_card = record.get("peak_kind") not in ("host", "host_oom")
    return bool(of_a_card and record.get("run_state") == "failed" and card and peak and peak >= FULL * card)


def _had_its_card_alone(record: Record) -> bool:
    """Whether the allocator's message names neither another process with a share of the card nor a limit that the
    program had set itself. If it names one of them, the plan was not what ran out."""
    numbers = record.get("numbers")
    message = numbers if isinstance(numbers, Mapping) else {}
    total, ours = message.get("total_bytes"), message.get("process_bytes")
    others = message.get("other_processes_bytes") if ours else None  # alone, it may be this process under another pid
    return message.get("allowed_bytes") is None and not (total and others and others > (1 - FULL) * total)


def _shared_its_card(record: Record) -> bool:
    """Whether other processes used a share of the card, before the trainer began or beside it."""
    observed = _observed(record)
    total = observed.get("device_total_bytes") or record.get("gpu_memory_bytes")
    before = observed.get("baseline_bytes") or 0
    if not isinstance(total, int) or not isinstance(before, int):
        return False
    peak, process_peak, beside = observed.get("device_peak_bytes"), observed.get("process_peak_bytes"), 0
    if isinstance(peak, int) and isinstance(process_peak, int):
        recorded = record.get("peak_bytes") if record.get("peak_kind") == "device" else None
        beside = peak - before - max(process_peak, recorded if isinstance(recorded, int) else 0)
    return max(before, beside) > (1 - FULL) * total


def _observed(record: Record) -> Record:
    observed = record.get("observed")
    return observed if isinstance(observed, Mapping) else {}


if TYPE_CHECKING:
    from llmlaunch.cluster.matrix import BandwidthMatrix


TIERS = ("node", "domain", "fabric")
OF_MACHINE = (
    *("devices_per_node", "nvlink_domain_devices", "node_mesh", "devices_per_uplink", "host_copy_bytes_per_second"),
)


def machine_json(cluster: Cluster) -> dict[str, Any]:
    """Return what a measurement record says of the machine its step was timed on (`machine`, docs/store.md): what makes
    its class, how its host is reached, and the median link where the network was measured."""
    links = {tier: getattr(cluster, f"{tier}_link") for tier in TIERS}
    return {
        **{name: getattr(cluster, name) for name in OF_MACHINE},
        "links": {tier: [link.bytes_per_second, link.latency_seconds, link.measured] for tier, link in links.items()},
        "network_bytes_per_second": None if cluster.bandwidth is None else median(_speeds(cluster.bandwidth)),
    }


def _speeds(matrix: BandwidthMatrix) -> list[float]:
    return [speed for i, row in enumerate(matrix.bytes_per_second) for j, speed in enumerate(row) if i != j]


def recorded_machine(record: Record, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """Return the machine of a record: the one of its card, as the record describes it; None for an unknown card.
    `clusters` are machines by accelerator (`cluster.cards.machines`). Raises KeyError, TypeError or ValueError for a
    description that is none."""

    known, machine = machine_of(record, clusters), record.get("machine")
    if known is None or machine is None:
        return known
    values: dict[str, Any] = {name: machine[name] for name in OF_MACHINE}
    for tier in TIERS:
        speed, latency, measured = machine["links"][tier]
        values[f"{tier}_link"] = Link(float(speed), float(latency), bool(measured))
    return replace(known, bandwidth=None, **values)


def timed_machine(record: Record, cluster: Cluster) -> Cluster:
    """Return the machine with the median of its measured network, where it has one, in place of the fabric."""
    measured = (record.get("machine") or {}).get("network_bytes_per_second")
    if measured is None:
        return cluster
    return replace(cluster, fabric_link=Link(float(measured), cluster.fabric_link.latency_seconds, measured=True))


@frozen
class TimeClass:
    """What step times are compared by: a backend (a value of `frameworks.recorded.TABLES`), dense or mixture, and the
    machine: its accelerator, the devices of its nodes and NVLink domains, and the speeds of its links. The name of a
    profile does not matter."""

    backend: str
    mixture: bool
    accelerator: str
    machine: str

    @property
    def key(self) -> tuple[str, str]:
        """The backend and the rest in words, by which a calibration is kept."""
        models = "mixtures" if self.mixture else "dense models"
        return self.backend, f"step time of {models} on {self.accelerator} {self.machine}"


def time_class(backend: str, mixture: bool, cluster: Cluster) -> TimeClass:
    """Return the class of the jobs of a backend on `cluster`."""
    domain, devices = cluster.nvlink_domain_devices, cluster.devices_per_node
    links = {"node": cluster.node_link, "domain": cluster.domain_link, "fabric": cluster.fabric_link}
    if domain <= devices:
        del links["domain"]
    speeds = ", ".join(f"{name} {link.bytes_per_second / GB:.4g} GB/s" for name, link in links.items())
    rack = f", {domain} in a domain" if domain > devices else ""
    return TimeClass(backend, mixture, cluster.accelerator.name, f"x{devices}{rack}, {speeds}")
