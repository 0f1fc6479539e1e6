"""llmlaunch: from a recipe to a running job, and from its measured peak back to a better estimate."""

__version__ = "0.1.0"
