"""How long runs had their devices, and how often they were stopped unplanned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("runs", sa.Column("accelerator", sa.String(), nullable=True))
    op.add_column("runs", sa.Column("device_hours", sa.Double(), nullable=True))
    op.add_column("runs", sa.Column("unplanned_stops", sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in ("unplanned_stops", "device_hours", "accelerator"):
        op.drop_column("runs", name)
