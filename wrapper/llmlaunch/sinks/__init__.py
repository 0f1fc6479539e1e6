"""Where collected runs are shown besides the store: Prometheus, MLflow, Weights & Biases.

The store is the truth, a sink a copy of it. A sink's library runs in a process of its own, with a limit on its time,
and only after the store was written: whatever becomes of it, `collect` has collected.
"""
