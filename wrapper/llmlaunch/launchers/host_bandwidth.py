"""What the devices of a node copy to and from its memory, and its network adapters: measured on one node of the
allocation this process runs in, or on this machine. And the lines of a cluster profile that say so.

The script travels in an environment variable and the answer on stdout, as in `bandwidth`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.launchers.bandwidth import BandwidthProbe, last_lines, reported, run_probe
from llmlaunch.rundir.values import counted
from llmlaunch.trainers import HOST_BANDWIDTH
from llmlaunch.units import GB

# $0 is the interpreter
_ON_THE_NODE = 'exec "$0" -c "$LLMLAUNCH_HOST_SCRIPT" "$@"'
FABRIC_LATENCY_MICROSECONDS = 10  # as in the shipped profiles: nothing here measures it
SHARED = 1.4  # times as fast alone as with all others: at least two devices have a link in common


@dataclass(frozen=True)
class HostReport:
    """The answer of one node (trainers/host_bandwidth.py), as it is printed with --json."""

    content: Mapping[str, Any]

    @property
    def problem(self) -> str | None:
        """Why no copies were measured; None where they were."""
        problem: str | None = self.content["problem"]
        return problem

    @property
    def bytes_per_second(self) -> float | None:
        """What each device copies in the slower direction while all copy, at the median of the devices."""
        together = self.content.get("together")
        return None if together is None else min(median(rates) for rates in together.values())

    @property
    def devices_per_uplink(self) -> int:
        """How many devices seem to share a link: how much faster the median device is alone."""
        if not self.content.get("together"):
            return 1
        ratios = [median(self.content["alone"][way]) / median(rates) for way, rates in self.content["together"].items()]
        return round(max(ratios)) if max(ratios) >= SHARED else 1

    @property
    def adapters(self) -> tuple[int, float]:
        """How many adapters are of the fastest kind, and the gigabits a second of one: slower ones are for storage or
        for logging in."""
        rates = [float(adapter["gigabits_per_second"]) for adapter in self.content["adapters"]]
        fastest = max(rates, default=0.0)
        return rates.count(fastest), fastest

    def profile_lines(self) -> list[str]:
        """Return what a cluster profile would say of this node; nothing where nothing was seen."""
        lines = []
        speed, (count, rate) = self.bytes_per_second, self.adapters
        devices = int(self.content["devices"])
        if speed is not None:
            lines.append(f"  host: {{gigabytes_per_second: {speed / GB:.3g}}}   # measured, all devices at once")
        if count and devices:
            share = count * rate / 8 / devices
            lines.append(
                f"  fabric: {{gigabytes_per_second: {share:.3g}, latency_microseconds: {FABRIC_LATENCY_MICROSECONDS}}}"
                f"   # {counted(count, 'adapter')} of {rate:g} Gb/s for {counted(devices, 'device')}, nominal"
            )
        return ["links:", *lines] if lines else []

    def text(self) -> str:
        """Return the report for a person, with the lines for a profile."""
        content, (count, rate) = self.content, self.adapters
        lines = [f"{content['node']}: {counted(content['devices'], 'device')}"]
        if self.problem is not None:
            lines.append(f"  copies to and from the host were not measured: {self.problem}")
        for kind, what in (("alone", "one device alone"), ("together", "each device while all copy")):
            if kind in content:
                rates = [f"{median(content[kind][way]) / GB:.1f} GB/s {way.replace('_', ' ')}" for way in content[kind]]
                lines.append(f"  {what}: {', '.join(rates)}")
        if self.devices_per_uplink > 1:
            lines.append(f"  about {self.devices_per_uplink} devices share a link to the host")
        seen = f"{counted(count, 'adapter')} of {rate:g} Gb/s" if count else "no adapter that is up"
        lines.append(f"  network: {seen}")
        profile = self.profile_lines()
        return "\n".join([*lines, *(["for a cluster profile:", *(f"  {line}" for line in profile)] if profile else [])])


def measure_host(local: bool, probe: BandwidthProbe, say: Callable[[str], None]) -> HostReport:
    """Measure one node of the allocation, or this machine where `local`. Raises UserError where nothing can be started
    there."""
    if local:
        say("Measuring copies to and from the devices of this machine...")
        return _measured([], probe)
    if shutil.which("srun") is None:
        raise UserError("srun: not found on this host; run it where SLURM's commands are, or look here with --local")
    say(f"Measuring copies to and from the devices of one node of job {os.environ['SLURM_JOB_ID']}...")
    return _measured(["srun", "--nodes=1", "--ntasks=1", "--overlap", "--export=ALL"], probe)


def _measured(before: Sequence[str], probe: BandwidthProbe) -> HostReport:
    variables = {"LLMLAUNCH_HOST_SCRIPT": HOST_BANDWIDTH.read_text(encoding="utf-8")}
    answer = run_probe([*before, "bash", "-c", _ON_THE_NODE, probe.python, *probe.words], variables)
    report = reported(answer, "adapters")
    if report is None:
        raise UserError(
            f"the measurement failed with exit code {answer.returncode}; its last words:\n{last_lines(answer)}"
        )
    return HostReport(report)
