"""The run directory as untrusted input: its files are read within bounds, and what they name is checked by form.

Login side and compute nodes share this room: it is packed into node.pyz, so it needs Python 3.8 and the standard
library alone.
"""
