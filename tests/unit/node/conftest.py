"""Fixtures of the node side, shared with the other directory that breaks or watches it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.node.event_loop import EventLoop
from support.node_rig import (  # noqa: F401
    archive,
    cpu_node,
    faulty_disk,
    gpu_node,
    nvml_library,
    old_gpu_node,
    old_nvml_library,
)
from support.watched_step import Watched


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Watched(tmp_path, EventLoop((), lambda number: None, lambda: None))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)
