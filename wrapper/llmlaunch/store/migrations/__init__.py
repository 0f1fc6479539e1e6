"""Alembic's folder: `env.py` runs the scripts of `versions/` on the connection that `store/database.py` hands it."""
