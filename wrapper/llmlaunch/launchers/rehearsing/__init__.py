"""Ranks run alone: where, what is needed for it, and the running of them, traced or on one GPU."""
