"""What each technique does to memory: a module for each, which holds one `Effect` (memory/effects.py)."""
