"""What was learned from measured runs, every version of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("accelerator", sa.String(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_calibrations"),
    )
    op.create_table(
        "calibration_uses",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("accelerator", sa.String(), nullable=False),
        sa.Column("calibration_id", sa.String(), nullable=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["calibration_id"], ["calibrations.id"], name="fk_calibration_uses_calibration_id"),
        sa.PrimaryKeyConstraint("id", name="pk_calibration_uses"),
    )


def downgrade() -> None:
    op.drop_table("calibration_uses")
    op.drop_table("calibrations")
