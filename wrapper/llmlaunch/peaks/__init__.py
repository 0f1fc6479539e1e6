"""What a run really used: the files that monitors, probes and rank wrappers leave, and one account of each rank.

Also packed into each run directory's `node.pyz`, for the job's own summary: Python 3.8, standard library alone, and
relative imports only.
"""
