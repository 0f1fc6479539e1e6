"""What a recipe says about coming back: after a time limit, out of memory, a hang."""

from __future__ import annotations

import pytest

from llmlaunch.errors import UserError
from llmlaunch.recipe.types import OnOom, Recipe, Restart, WatchdogPolicy
from support.recipes import recipe_of

CHECKPOINTS = ("training.save_interval=5", "training.checkpoint_path=/checkpoints/a")


def recipe(*overrides: str) -> Recipe:
    return recipe_of("quickstart", *overrides)


def test_a_job_comes_back_where_there_is_a_checkpoint_to_come_back_to() -> None:
    assert recipe().restart is None
    assert recipe(*CHECKPOINTS).restart == Restart(times=20, fruitless=2, backoff_seconds=60.0)
    assert recipe(*CHECKPOINTS, "restart=none").restart is None
    assert recipe(*CHECKPOINTS, "restart={times: 3, by: chain}").restart == Restart(times=3, by="chain")


def test_restarts_without_checkpoints_are_refused() -> None:
    with pytest.raises(UserError, match=r"restart: there is nothing to come back to"):
        recipe("restart={times: 3}")


def test_other_layouts_are_tried_only_where_asked_for() -> None:
    assert recipe().on_oom == OnOom(layouts=0)
    assert recipe("on_oom=fallback").on_oom == OnOom(layouts=2, after_checkpoint="reshard")
    assert recipe("on_oom={layouts: 4, after_checkpoint: restart}").on_oom == OnOom(4, "restart")


def test_the_watchdog_can_be_told_its_patience_or_switched_off() -> None:
    assert recipe().watchdog == WatchdogPolicy()
    assert recipe("watchdog={floor_seconds: 5}").watchdog == WatchdogPolicy(5.0, 3600.0)
    assert recipe("watchdog=false").watchdog is None


def test_spare_nodes_are_what_a_preflight_is_for() -> None:
    assert not recipe().preflight
    assert recipe("spare_nodes=2").preflight
    assert recipe("spare_nodes=2").spare_nodes == 2


def test_saying_the_default_leaves_the_digest_as_it_is() -> None:
    plain = recipe(*CHECKPOINTS).digest
    assert recipe(*CHECKPOINTS, "on_oom=stop", "watchdog=true", "restart={times: 20}").digest == plain
    assert recipe(*CHECKPOINTS, "restart=none").digest == plain
    assert recipe(*CHECKPOINTS, "restart={times: 3}").digest != plain
