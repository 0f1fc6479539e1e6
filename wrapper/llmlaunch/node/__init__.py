"""What runs on compute nodes: the monitor, the rank wrapper and the job's last word.

Packed into each run directory as `node.pyz` (see `llmlaunch.runs.node_archive`), so these modules keep to Python
3.8, the standard library and pynvml, and import each other relatively: inside the archive the package is `node`.
"""
