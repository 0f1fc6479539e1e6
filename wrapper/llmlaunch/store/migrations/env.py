"""Alembic runs this file for every migration.

The caller has begun a transaction that shuts other writers out, so all migrations are applied or none.
"""

from __future__ import annotations

from alembic import context

from llmlaunch.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=context.config.attributes["version_table"],
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
