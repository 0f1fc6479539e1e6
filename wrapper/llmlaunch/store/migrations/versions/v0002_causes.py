"""What ended a run, and the nodes at fault."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("runs", sa.Column("cause", sa.String(), nullable=True))
    op.create_table(
        "sick_nodes",
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("forgiven_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node", "run_id", "attempt", name="pk_sick_nodes"),
    )


def downgrade() -> None:
    op.drop_table("sick_nodes")
    op.drop_column("runs", "cause")
