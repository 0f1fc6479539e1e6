"""The frozen corpus: recipes and scripts, and everything llmlaunch answered to them when the corpus was written."""
