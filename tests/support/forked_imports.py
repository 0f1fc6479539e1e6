"""What forked commands need not do again: the server they are forked from imports this."""

import psycopg  # noqa: F401
import pytest  # noqa: F401

from llmlaunch.app import planned_run  # noqa: F401
from llmlaunch.cli import jobs, measurements, runs, submit  # noqa: F401
from llmlaunch.rendering.node_archive import node_archive

node_archive()
