"""What ended an attempt, for the job's last word: `llmlaunch.causes`, where it meets the node side."""

from __future__ import annotations

from ..causes.attempt import cause_of

__all__ = ["cause_of"]
