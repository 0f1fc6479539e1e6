"""`slurm:` of a recipe takes the options and the forms of values that sbatch takes, and says what is wrong with others.

tests/slurm/test_sbatch_options.py asks a real sbatch the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.errors import UserError
from support.recipes import recipe_of

VALUES = json.loads((Path(__file__).parents[2] / "data" / "sbatch_values.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("option", "value"), VALUES["taken"])
def test_a_value_that_sbatch_takes_passes(option: str, value: str) -> None:
    assert recipe_of("quickstart", f"slurm={{{option}: '{value}'}}").slurm[option] == value


@pytest.mark.parametrize(("option", "value"), VALUES["refused"])
def test_a_value_that_sbatch_refuses_is_refused_with_its_place(option: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_of("quickstart", f"slurm={{{option}: '{value}'}}")
    assert f"slurm.{option}: " in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_option_of_a_plugin_passes_under_its_own_key_from_recipe_and_profile(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("base: cpu-x1\nslurm_plugins: {bee-ond: 4, tunnel: a}\n", encoding="utf-8")
    overrides = [f"cluster={tmp_path / 'site.yaml'}", "slurm_plugins={tunnel: b, no-proxy: true}"]
    assert recipe_of("quickstart", *overrides).slurm == {"bee-ond": 4, "tunnel": "b", "no-proxy": True}


def test_every_option_that_came_with_a_release_is_known() -> None:
    options = json.loads(asset("slurm", "sbatch-options.json").read_text(encoding="utf-8"))["options"]
    features = json.loads(asset("slurm", "versions.json").read_text(encoding="utf-8"))["features"]
    assert {entry["option"] for entry in features if entry["option"]} - {"checkpoint"} <= set(options)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (30, 1800), ("5:30", 330), ("2-0", 172800), ("1-12:30", 131400), ("1-00:00:01", 86401), ("UNLIMITED", None),
        ("0", None), ("0-00", None), (None, None), ("tomorrow", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(written: object, seconds: int | None) -> None:
    assert limit_seconds(written) == seconds
