"""One module for each family that is read and written. Its name is the `model_type` of config.json, and its FAMILY says
what the family is; `families/registry.py` finds it by its name."""
