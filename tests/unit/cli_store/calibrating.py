"""`llmlaunch` in this process, with a store of its own and runs of a site that is off by a bias."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.cli.main import main
from support.hidden_bias import GIB, Bias, runs

__all__ = ["BIAS", "RECIPE", "Cli"]

BIAS = Bias(share=0.05, outside_bytes=0.8 * GIB)
RECIPE = str(asset("recipes", "llama3-8b.yaml"))


class Cli:
    """`llmlaunch` with a store of its own, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._capsys, self._monkeypatch = folder, capsys, monkeypatch
        monkeypatch.setenv("LLMLAUNCH_STORE", str(folder / "store.db"))

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """What went to stdout and to stderr."""
        self._monkeypatch.setattr(sys, "argv", ["llmlaunch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, err
        return out, err

    def said(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json")[0])

    def imports(self, name: str, records: list[dict[str, Any]]) -> None:
        path = self._folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.run("measurements", "import", str(path))

    def runs(self, seed: int, count: int, bias: Bias = BIAS) -> None:
        """Measured runs of a site with that bias."""
        found = [record for run in runs(seed, bias, count) for record in run]
        self.imports(
            str(seed),
            [{**record, "id": f"{seed}/{record['id']}", "run_id": f"{seed}/{record['run_id']}"} for record in found],
        )
