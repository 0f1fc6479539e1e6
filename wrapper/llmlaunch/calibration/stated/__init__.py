"""Records that state their job by sections, as public runs are written down, and not by a recipe."""
