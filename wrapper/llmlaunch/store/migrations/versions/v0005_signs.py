"""How many independent signs an attempt gave against a node. What was recorded before counted at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("sick_nodes", sa.Column("signs", sa.Integer(), nullable=False, server_default="2"))


def downgrade() -> None:
    op.drop_column("sick_nodes", "signs")
