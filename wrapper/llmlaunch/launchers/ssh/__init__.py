"""Runs that live on a host behind ssh: sent there, submitted there, and looked at from here (docs/laptop.md)."""
