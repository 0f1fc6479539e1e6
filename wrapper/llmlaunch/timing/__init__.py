"""Seconds of a training step, by what they are spent on.

The room imports sideways from `memory`: the job, its pipeline ranks, and how many parameters and activations they hold.
`memory` does not import `timing`.
"""
