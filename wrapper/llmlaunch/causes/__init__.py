"""What ended a run: the telling lines of logs, one cause for each node, and which of them came first.

Also packed into each run directory's `node.pyz`, for the nodes and the job's own verdict: Python 3.8, standard library
alone, and relative imports only.
"""
