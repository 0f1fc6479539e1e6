"""Recipes, plans, runs and measurements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _recipes_and_plans()
    _runs()
    _measurements()


def downgrade() -> None:
    for table in ("measurements", "runs", "plans", "recipes"):
        op.drop_table(table)


def _recipes_and_plans() -> None:
    op.create_table(
        "recipes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("overrides", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_recipes"),
        sa.UniqueConstraint("name", "digest", name="uq_recipes_name_digest"),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("recipe_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
        sa.ForeignKeyConstraint(["recipe_id"], ["recipes.id"], name="fk_plans_recipe_id"),
        sa.UniqueConstraint("recipe_id", "digest", name="uq_plans_recipe_id_digest"),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.Integer(), nullable=True),
        sa.Column("plan_id", sa.Integer(), nullable=True),
        sa.Column("launcher", sa.String(), nullable=True),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("cluster", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("launcher_state", sa.String(), nullable=True),
        sa.Column("launcher_said_at", sa.Double(), nullable=True),
        sa.Column("attempt", sa.String(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("peak_kind", sa.String(), nullable=True),
        sa.Column("predicted_bytes", sa.BigInteger(), nullable=True),
        sa.Column("no_peak_reason", sa.Text(), nullable=True),
        sa.Column("files", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
        sa.ForeignKeyConstraint(["recipe_id"], ["recipes.id"], name="fk_runs_recipe_id"),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name="fk_runs_plan_id"),
    )
    op.create_index("ix_runs_recipe_id", "runs", ["recipe_id"])


def _measurements() -> None:
    op.create_table(
        "measurements",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("family", sa.String(), nullable=True),
        sa.Column("backend", sa.String(), nullable=True),
        sa.Column("gpu", sa.String(), nullable=True),
        sa.Column("peak_kind", sa.String(), nullable=True),
        sa.Column("run_id", sa.String(), nullable=True),
        sa.Column("attempt", sa.String(), nullable=True),
        sa.Column("pipeline_rank", sa.BigInteger(), nullable=True),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
        sa.UniqueConstraint("position", name="uq_measurements_position"),
    )
    op.create_index("ix_measurements_family", "measurements", ["family"])
    op.create_index("ix_measurements_run_id", "measurements", ["run_id"])
