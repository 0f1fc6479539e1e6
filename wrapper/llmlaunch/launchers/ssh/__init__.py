"""A host behind ssh, where `--on HOST` has a command run (docs/laptop.md)."""

ON_VARIABLE = "LLMLAUNCH_ON"
"""Tells llmlaunch on the host what the person typed behind --on."""
