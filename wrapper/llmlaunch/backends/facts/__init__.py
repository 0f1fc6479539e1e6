"""Memory facts of each backend as data, with where each was read.

A row says what one framework at one version keeps per parameter and per activation element. Recipes and measured
records both take their facts from here, so that what `accuracy` scores is what `plan` uses.
"""
