"""What was learned from measured step times of one class of jobs on one machine: the factors, the runs they come from,
and the errors on runs they had not seen (docs/calibration.md). And which class a job belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import llmlaunch
from llmlaunch.calibration.calibrations import MODULES, ROOMS, calibration_id, digest_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.frozen import frozen
from llmlaunch.timing.correction import FACTORS, TimeCorrection
from llmlaunch.units import GB

if TYPE_CHECKING:
    from llmlaunch.cluster.matrix import BandwidthMatrix

__all__ = [
    "OF_MACHINE",
    "PREFIX",
    "TIERS",
    "TimeCalibration",
    "TimeClass",
    "TimeErrors",
    "machine_json",
    "time_calibration_id",
    "time_calibration_of_json",
    "time_class",
    "timing_digest",
]

SCHEMA = 2  # of the schema 1 are calibrations of memory, which lie in the same table
PREFIX = "time-"  # of ids, which tells both kinds apart
IDENTITY = ("id", "backend", "machine", "made_at", "llmlaunch", "estimator")
TIERS = ("node", "domain", "fabric")
OF_MACHINE = (
    *("devices_per_node", "nvlink_domain_devices", "node_mesh", "devices_per_uplink", "host_copy_bytes_per_second"),
)


@frozen
class TimeClass:
    """What step times are compared by: a backend (a value of `calibration.records.TABLES`), dense or mixture, and the
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


@frozen
class TimeErrors:
    """Errors of predicted step times: the mean of |predicted / measured - 1|, the mean of predicted / measured - 1, and
    the largest of the former."""

    mape: float
    bias: float
    worst: float


@frozen
class TimeCalibration:
    """Factors with their evidence. `after` are the errors on runs that the factors behind them had not seen, `before`
    those of what was in use when this was made, on the same runs."""

    id: str
    backend: str  # both are the key of a TimeClass
    machine: str
    made_at: float  # unix seconds
    llmlaunch: str  # version
    estimator: str  # `timing_digest` at the time: the factors hold for predictions of that digest only
    runs: int
    models: Mapping[str, int]  # runs by model
    data: str  # digest of what was measured
    correction: TimeCorrection
    before: TimeErrors
    after: TimeErrors

    def as_json(self) -> dict[str, Any]:
        """Return the shape of docs/schemas/time-calibration.schema.json."""
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in IDENTITY},
            "data": {"runs": self.runs, "models": dict(self.models), "digest": self.data},
            "factors": dict(self.correction.factors),
            "errors": {"before": asdict(self.before), "after": asdict(self.after)},
        }


def time_calibration_id(job: TimeClass, made_at: float) -> str:
    """Return an id that is one word of a shell, whatever characters the accelerator's name has."""
    models = "mixture" if job.mixture else "dense"
    return PREFIX + calibration_id(f"{job.backend}-{models}", job.accelerator, made_at)


def time_calibration_of_json(content: Mapping[str, Any]) -> TimeCalibration:
    """Return the calibration that `as_json` wrote. Raises KeyError, TypeError or ValueError for another schema."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"calibration {content['id']} has schema {content['schema']}, this version knows {SCHEMA}")
    data, errors = content["data"], content["errors"]
    factors = {name: float(content["factors"][name]) for name in FACTORS}
    return TimeCalibration(
        **{name: content[name] for name in IDENTITY},
        runs=data["runs"],
        models=data["models"],
        data=data["digest"],
        correction=TimeCorrection(**factors, runs=data["runs"], calibration_id=content["id"]),
        before=TimeErrors(**errors["before"]),
        after=TimeErrors(**errors["after"]),
    )


@cache
def timing_digest() -> str:
    """Return the sha256 over names and contents of the sources that price a step's time. Those that price memory are
    among them: what a device holds decides what it sends."""
    return digest_of(Path(llmlaunch.__file__).parent, (*ROOMS, "timing"), (*MODULES, "calibration/step_times.py"))
