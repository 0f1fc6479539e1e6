"""What llmlaunch can do with the jobs that others publish: docs/coverage.md, made from tests/data/published_rows.json.

`make coverage-table` writes the tables; tests/unit/planner/test_coverage_table.py keeps page and code equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.cluster.load import load_cluster
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_plan
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.types import Recipe
from support.plans import setting_for

DATA = Path(__file__).resolve().parents[1] / "data" / "published_rows.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
MARK = "<!-- coverage -->\n"
HEAD = (
    "| row | said | priced | rendered | memory | tokens a second and GPU: predicted | published | what is missing |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Coverage:
    """How far a published row comes: to a recipe, to a plan, to a job; `missing` is the first refusal."""

    row: Mapping[str, Any]
    recipe: Recipe | None = None
    run: PlannedRun | None = None
    rendered: bool = False
    missing: str = ""

    @property
    def steps(self) -> tuple[bool, bool, bool]:
        """Whether it can be said, is priced, is rendered."""
        return self.recipe is not None, self.run is not None, self.rendered


def published_pages() -> list[dict[str, Any]]:
    """Return the published pages with the facts of their rows."""
    pages: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))
    return pages


def coverage(row: Mapping[str, Any]) -> Coverage:
    """Load, plan and render a row with the published sizes; techniques not named there are the planner's."""
    reached = Coverage(row)
    try:
        recipe = recipe_of_row(row)
        reached = Coverage(row, recipe)
        setting = setting_for(recipe)
        plan = make_plan(setting)
        run = PlannedRun(as_planned(setting.recipe, plan.chosen), plan, setting)
        reached = Coverage(row, recipe, run)
        run.refuse_unsafe()
        run.refuse_unrenderable()
        return Coverage(row, recipe, run, rendered=bool(run.rendered.program and run.job_script()))
    except UserError as error:
        return Coverage(row, reached.recipe, reached.run, missing=_first_reason(str(error), row["name"]))


def recipe_of_row(row: Mapping[str, Any]) -> Recipe:
    recipe = {
        "schema": 1,
        "name": "published",
        "model": row["model"],
        "backend": row.get("backend", "megatron-lm"),
        "cluster": row["cluster"],
        "nodes": row["devices"] // load_cluster(row["cluster"]).devices_per_node,
        "training": {**row["training"], "steps": 100},
        "data": {"mock": True},
        "layout": row["layout"],
    }
    return recipe_from(parse_document(json.dumps(recipe), row["name"]))


def _first_reason(message: str, name: str) -> str:
    line = message.splitlines()[0].removeprefix(f"{name}:1: ").removeprefix(f"{name}: ")
    return "; ".join(line.split("; ")[:2]).replace("|", "\\|")


def page_with_tables() -> str:
    """Return docs/coverage.md with its tables made anew."""
    before, _, after = PAGE.read_text("utf-8").split(MARK)
    return f"{before}{MARK}{''.join(_section(page) for page in published_pages())}\n{MARK}{after}"


def _section(page: Mapping[str, Any]) -> str:
    reached = [coverage(row) for row in page["rows"]]
    said, priced, rendered = (sum(each.steps[place] for each in reached) for place in range(3))
    return (
        f"\n## {page['title']}\n\nAs of {page['date']}: {page['source']}.\n\n"
        f"Of {len(reached)} rows, {said} can be said, {priced} are priced and {rendered} rendered.\n\n"
        f"{HEAD}{''.join(_line(each) for each in reached)}"
    )


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    return _line(coverage(row))


def _line(each: Coverage) -> str:
    memory, speed = "-", "-"
    if each.run is not None:
        chosen, limit = each.run.plan.chosen, each.run.plan.limit
        memory = f"{chosen.device_bytes / limit.memory_bytes:.0%}, {each.run.verdict}"
        speed = f"{chosen.tokens_per_second_per_gpu:,.0f}"
    published = each.row.get("tokens_per_second_per_gpu")
    cells = [
        each.row["name"],
        *("yes" if step else "no" for step in each.steps),
        memory,
        speed,
        "-" if published is None else f"{published:,}",
        each.missing or "-",
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
