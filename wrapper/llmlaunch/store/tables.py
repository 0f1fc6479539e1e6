"""The tables of the store. Whoever changes them raises `store.database.REVISION`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

version = Table("llmlaunch_version", metadata, Column("version_num", String(32), primary_key=True))

# Times are unix seconds, amounts of memory bytes.

recipes = Table(
    "recipes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("text", Text, nullable=False),
    Column("overrides", Text, nullable=False),  # a JSON list of key=value words
    UniqueConstraint("name", "digest"),
)

plans = Table(
    "plans",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("recipe_id", ForeignKey("recipes.id"), nullable=False),
    Column("digest", String, nullable=False),  # sha256 of the content
    Column("content", Text, nullable=False),  # what `check --json` prints
    UniqueConstraint("recipe_id", "digest"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("directory", Text, nullable=False),
    Column("recipe_id", ForeignKey("recipes.id"), index=True),
    Column("plan_id", ForeignKey("plans.id")),
    Column("launcher", String),
    Column("job_id", String),
    Column("cluster", String),
    Column("state", String, nullable=False),
    Column("why", Text),  # what status.json or the launcher said of a run that did not succeed
    Column("cause", String),  # what ended its newest attempt, a word of docs/causes.md
    Column("launcher_state", String),  # the launcher's word on how the job ended, where it has one
    Column("launcher_said_at", Double),  # it does not hold for what started later
    Column("attempt", String),  # the newest one
    Column("submitted_at", Double),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("exit_code", Integer),
    Column("peak_kind", String),
    Column("predicted_bytes", BigInteger),  # the worst pipeline rank's
    Column("no_peak_reason", Text),  # why a collected run has no measurement
    Column("accelerator", String),
    Column("device_hours", Double),  # of all attempts that made steps; null = not known
    Column("unplanned_stops", Integer),  # attempts among them that nobody planned to end (run_stops.UNPLANNED)
    Column("files", String),  # digest of the files as last collected; null = not collected to the end
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", String, primary_key=True),
    Column("position", BigInteger, nullable=False, unique=True),  # the order of import
    Column("content", Text, nullable=False),  # the record's own text, as it was read
    # What is asked for often, taken out of `content`; null where the record has no such plain value.
    Column("family", String, index=True),
    Column("backend", String),
    Column("gpu", String),
    Column("peak_kind", String),
    Column("run_id", String, index=True),
    Column("attempt", String),
    Column("pipeline_rank", BigInteger),
    Column("peak_bytes", BigInteger),
    Column("started_at", Double),
)

sick_nodes = Table(
    "sick_nodes",
    metadata,
    Column("cluster", String, primary_key=True),  # its ClusterName; empty where nothing says
    Column("node", String, primary_key=True),
    Column("run_id", String, primary_key=True),
    Column("attempt", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("reason", Text, nullable=False),  # the telling line
    Column("since", Double, nullable=False),
    Column("forgiven_at", Double),
    Column("signs", Integer, nullable=False, server_default="2"),  # independent ones; causes.suspects.ENOUGH_SIGNS
)

calibrations = Table(
    "calibrations",
    metadata,
    Column("id", String, primary_key=True),
    Column("backend", String, nullable=False),  # a value of frameworks.recorded.TABLES
    Column("accelerator", String, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("content", Text, nullable=False),  # docs/schemas/calibration.schema.json
)

# Of a backend and accelerator the newest row says what is in use; rows are only added.
calibration_uses = Table(
    "calibration_uses",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("backend", String, nullable=False),
    Column("accelerator", String, nullable=False),
    Column("calibration_id", ForeignKey("calibrations.id")),  # null: none
    Column("since", Double, nullable=False),
)
