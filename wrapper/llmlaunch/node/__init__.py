"""What runs on compute nodes: the job, its nodes and their ranks, the monitor, the watchdog, the order of the nodes,
the cause of a failure and the end of an attempt.

Packed into each run directory as `node.pyz` (see `llmlaunch.rendering.node_archive`), so these modules keep to Python
3.8, the standard library, pynvml, and the packages packed with them. All imports are relative. `__main__`
has the commands of `node.pyz` (`python3 node.pyz finish ...`).
"""
