"""What every test shares: a home of its own, and repeatable property tests in CI."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell's background job is started with SIGINT ignored, and so is all it starts: the tests about Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the store, the cache or the settings of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    for variable, folder in (("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(variable, str(home / folder))
    for variable in ("LLMLAUNCH_STORE", "LLMLAUNCH_TEMPLATES", "LLMLAUNCH_RUNS"):
        monkeypatch.delenv(variable, raising=False)
    return home
