"""JSON documents against a JSON Schema whose validator is made once: `jsonschema.validate` checks the schema each time,
which takes longer than what it then says of a document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema


def validate(document: Any, schema: Mapping[str, Any]) -> None:
    """Raises ValidationError where the document is not as the schema says, SchemaError where that is none."""
    _validator(json.dumps(schema)).validate(document)


@cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    return jsonschema.Draft202012Validator(json.loads(schema))
