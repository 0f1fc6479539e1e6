"""What judges the formulas of llmlaunch and is no part of its wheel (validation/README.md)."""
