"""The memory probe goes into the run directories of GPU clusters, unless the recipe says no."""

from __future__ import annotations

from dataclasses import replace

from run_samples import H100, cluster, deepspeed_cpu

from llmlaunch.recipe.types import MonitorPolicy
from llmlaunch.rendering.provenance import Provenance
from llmlaunch.rendering.run_directory import run_files

PROBE, HOOK = "hook/llmlaunch_memory_probe.py", "hook/sitecustomize.py"


def hook_files(kind: str, **keys: object) -> set[str]:
    of, plan, rendered = deepspeed_cpu()
    of = replace(of, **({"cluster": cluster(H100, 2)} if kind == "gpu" else {}), **keys)
    return {name for name in run_files(of, plan, {}, rendered, Provenance(code={})) if name.startswith("hook/")}


def test_the_probe_is_for_gpus_and_can_be_turned_off() -> None:
    assert hook_files("gpu") == {HOOK, PROBE}
    assert hook_files("gpu", monitor=MonitorPolicy(probe=False)) == {HOOK}
    assert hook_files("cpu") == {HOOK}


def test_it_brings_its_hook_where_no_watchdog_does() -> None:
    assert hook_files("gpu", watchdog=None) == {HOOK, PROBE}
    assert hook_files("gpu", watchdog=None, monitor=MonitorPolicy(probe=False)) == set()
    assert hook_files("cpu", watchdog=None) == set()
