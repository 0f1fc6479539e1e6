"""What runs on compute nodes: the monitor, the rank wrapper, the order of the nodes, what ended their trainers and the
job's last word.

Packed into each run directory as `node.pyz` (see `llmlaunch.rendering.node_archive`), so these modules keep to Python
3.8, the standard library, pynvml, `llmlaunch.causes` and `llmlaunch.placement`, which are packed with them. All
imports are relative.
"""
