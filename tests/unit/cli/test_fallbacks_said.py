"""What a person and a program are told of the layouts that follow out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from llmlaunch.assets import asset
from support.command_line import CommandLine

ROOT = Path(__file__).resolve().parents[3]
DEEPSPEED = str(asset("recipes", "llama2-7b-deepspeed.yaml"))
SAVING = ("training.checkpoint_path=/ckpt", "training.save_interval=10", "layout.zero_stage=[2, 3]")


def test_the_json_is_in_the_published_shape(llmlaunch: CommandLine) -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text())
    for policy, count in (("stop", None), ("fallback", 2)):
        plan = llmlaunch.json("check", DEEPSPEED, f"on_oom={policy}")
        jsonschema.validate(plan, schema)
        assert (None if plan["fallbacks"] is None else len(plan["fallbacks"])) == count


def test_each_has_a_line_with_what_becomes_of_checkpoints(llmlaunch: CommandLine) -> None:
    for after, note in (
        ("reshard", "before the first checkpoint only: cannot load one"),
        ("restart", "from step 0, in a checkpoint folder of its own"),
        ("stop", "before the first checkpoint only"),
    ):
        policy = f"on_oom={{layouts: 2, after_checkpoint: {after}}}"
        lines = llmlaunch("check", DEEPSPEED, *SAVING, policy).stdout.splitlines()
        at = lines.index("If a device runs out of memory, the same job continues with")
        assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["1.", "2."]
        assert lines[at + 2].endswith(note)
        again = "before the first checkpoint only" if after == "stop" else "from a checkpoint of the planned layout"
        assert lines[at + 3].endswith(again)
    text = llmlaunch("check", DEEPSPEED, "on_oom=fallback").stdout
    assert "checkpoint only" not in text, "no checkpoints are written"


def test_fewer_than_asked_for_is_a_warning_where_they_are_rendered(llmlaunch: CommandLine, tmp_path: Path) -> None:
    fewer = "of 8 layouts; no other has 6.3 GiB more head-room than"
    few = ("on_oom={layouts: 8}", "layout={zero_stage: 3, micro_batch_size: 1}")
    assert fewer in llmlaunch("check", DEEPSPEED, *few).stdout
    for command in (("render", "-o", str(tmp_path / "run")), ("submit", "--dry-run", "--local")):
        _, err = llmlaunch(command[0], DEEPSPEED, *few, *command[1:])
        assert err.startswith("warning: on_oom: ")
        assert fewer in err


def test_what_is_not_safe_has_none(llmlaunch: CommandLine) -> None:
    assert llmlaunch.json("check", DEEPSPEED, "on_oom=fallback", "memory.limit=0.05", code=3)["fallbacks"] is None
