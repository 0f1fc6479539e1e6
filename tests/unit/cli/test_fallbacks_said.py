"""What a person and a program are told of the layouts that follow out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema

from llmlaunch.assets import asset

ROOT = Path(__file__).resolve().parents[3]
DEEPSPEED = str(asset("recipes", "llama2-7b-deepspeed.yaml"))
SAVING = ("training.checkpoint_path=/ckpt", "training.save_interval=10", "layout.zero_stage=[2, 3]")


def told(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "llmlaunch", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_json_is_in_the_published_shape() -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text())
    for asked, count in (("stop", None), ("fallback", 2)):
        code, out, _ = told("check", DEEPSPEED, f"on_oom={asked}", "--json")
        plan = json.loads(out)
        jsonschema.validate(plan, schema)
        assert code == 0
        assert (None if plan["fallbacks"] is None else len(plan["fallbacks"])) == count


def test_each_has_a_line_with_what_becomes_of_checkpoints() -> None:
    for after, note in (
        ("reshard", "before the first checkpoint only: cannot load one"),
        ("restart", "from step 0, in a checkpoint folder of its own"),
        ("stop", "before the first checkpoint only"),
    ):
        _, out, _ = told("check", DEEPSPEED, *SAVING, f"on_oom={{layouts: 2, after_checkpoint: {after}}}")
        lines = out.splitlines()
        at = lines.index("If a device runs out of memory, the same job continues with")
        assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["1.", "2."]
        assert lines[at + 2].endswith(note)
        again = "before the first checkpoint only" if after == "stop" else "from a checkpoint of the planned layout"
        assert lines[at + 3].endswith(again)
    _, out, _ = told("check", DEEPSPEED, "on_oom=fallback")
    assert "checkpoint only" not in out, "no checkpoints are written"


def test_fewer_than_asked_for_is_a_warning_where_they_are_rendered(tmp_path: Path) -> None:
    fewer = "of 8 layouts; no other has 6.3 GiB more head-room than"
    few = ("on_oom={layouts: 8}", "layout={zero_stage: 3, micro_batch_size: 1}")
    assert fewer in told("check", DEEPSPEED, *few)[1]
    for command in (("render", "-o", str(tmp_path / "run")), ("submit", "--dry-run", "--local")):
        code, _, err = told(command[0], DEEPSPEED, *few, *command[1:])
        assert code == 0, err
        assert err.startswith("warning: on_oom: ")
        assert fewer in err


def test_what_is_not_safe_has_none() -> None:
    code, out, _ = told("check", DEEPSPEED, "on_oom=fallback", "memory.limit=0.05", "--json")
    assert code == 3
    assert json.loads(out)["fallbacks"] is None
