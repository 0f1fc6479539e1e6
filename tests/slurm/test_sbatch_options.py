"""What llmlaunch knows of sbatch's options, asked of a real sbatch."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from one_machine import Cluster

from llmlaunch.assets import asset
from llmlaunch.documents.slurm_options import sbatch_value_problem
from llmlaunch.launchers.slurm.commands import features, release

VALUES = json.loads((Path(__file__).parents[1] / "data" / "sbatch_values.json").read_text(encoding="utf-8"))
OPTIONS = json.loads(asset("slurm", "sbatch-options.json").read_text(encoding="utf-8"))["options"]

pytestmark = pytest.mark.slurm


def form_refused(cluster: Cluster, option: str, value: str) -> str:
    """Return what sbatch says against the form of the value, "" if it takes the form."""
    argv = ["sbatch", "--test-only", f"--{option}={value}", "--wrap=true"]
    done = subprocess.run(argv, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False)
    words = re.search(r".*(?i:invalid|unrecognized|must be >=).*", done.stderr)
    return words[0] if words and done.returncode else ""


def test_llmlaunch_rejects_the_same_values_as_sbatch(slurm: Cluster) -> None:
    wrong = []
    for verdict, refused in (("taken", False), ("refused", True)):
        for option, value in VALUES[verdict]:
            theirs, ours = form_refused(slurm, option, value), sbatch_value_problem({option: value})
            if (bool(theirs), bool(ours)) != (refused, refused):
                wrong.append(f"--{option}={value} is listed as {verdict}; sbatch: {theirs!r}; llmlaunch: {ours}")
    assert not wrong, "\n".join(wrong)


def test_llmlaunch_knows_every_option_of_this_sbatch(slurm: Cluster) -> None:
    shown = set(re.findall(r"--([a-z][a-z0-9-]+)", slurm.ask("sbatch", "--help").partition("Parallel run options")[2]))
    assert shown - {"mem-per-cpu"} <= set(OPTIONS)
    assert len(shown) > 70


def options_wrongly_listed(cluster: Cluster) -> list[str]:
    """What slurm/versions.json says of this release's options of sbatch, and sbatch does not."""
    here = release(cluster.ask("sbatch", "--version"))
    assert here is not None
    wrong = []
    for feature in features():
        if feature.option is not None:
            # Without a value, or else without a script: nothing is submitted.
            argv = [*cluster.inside, "sbatch", f"--{feature.option}"]
            done = subprocess.run(
                argv, env=cluster.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
            )
            named = re.search(r"option '--([a-z-]+)'", done.stderr)  # maybe another that begins so
            has = "unrecognized option" not in done.stderr and (named is None or named[1] == feature.option)
            if has != ((feature.since or here) <= here <= (feature.until or here)):
                wrong.append(f"{feature.feature}: {done.stderr}")
    return wrong


def test_sbatch_has_the_options_that_versions_json_lists(slurm: Cluster) -> None:
    assert options_wrongly_listed(slurm) == []
