"""A folder that is recognized as a checkout of Megatron-LM."""

from __future__ import annotations

from pathlib import Path


def megatron_checkout(folder: Path) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\n")
    (folder / "pretrain_gpt.py").touch()
    return folder
