"""`llmlaunch` in this process, and a store filled with records or with runs of a site that is off by a bias."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmlaunch.assets import asset
from support.command_line import CommandLine
from support.hidden_bias import GIB, Bias, runs

__all__ = ["BIAS", "RECIPE", "StoreCommandLine"]

BIAS = Bias(share=0.05, outside_bytes=0.8 * GIB)
RECIPE = str(asset("recipes", "llama3-8b.yaml"))


class StoreCommandLine(CommandLine):
    def import_records(self, records: list[dict[str, Any]]) -> None:
        path = Path(os.environ["XDG_DATA_HOME"]).with_name("records.jsonl")
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        self("measurements", "import", path)

    def import_runs(self, seed: int, count: int, bias: Bias = BIAS) -> None:
        """Import measured runs of a site with that bias."""
        self.import_records(
            [
                {**record, "id": f"{seed}/{record['id']}", "run_id": f"{seed}/{record['run_id']}"}
                for run in runs(seed, bias, count)
                for record in run
            ]
        )
