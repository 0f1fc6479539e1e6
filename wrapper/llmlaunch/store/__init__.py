"""The recipe store: recipes, plans, runs and measurements in one SQL database, an index over the run directories.

Importing this package imports no database library; `llmlaunch.store.location` alone tells whether a store exists.
"""
