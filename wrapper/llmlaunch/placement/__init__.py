"""Which node holds which ranks: what a job sends between its nodes, how long that takes in a given order of the
nodes, and the search for the best order.

Also packed into each run directory's `node.pyz`, where the nodes are known: Python 3.8, standard library alone, and
relative imports only.
"""
