"""What each technique does to the time of a step: a module for each, with one `TimeEffect` (timing/effects.py)."""
