"""Keys of a document, each defined once by a field: validated, constructed, shown in the JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from llmlaunch.documents.keys import form, form_of, key, key_names, keys_in, keys_of, narrowed, section
from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError


@section
class Oven:
    """Where it is baked."""

    degrees: int = key("Heat", ge=50, le=300)
    fan: bool = key("Moves the air", default=True)


@section
class Cake:
    """What is baked."""

    eggs: int = key("Eggs", ge=1)
    layers: tuple[str, ...] = key("From the bottom up", default=())
    oven: Oven = key("Where", default=Oven(180), words={"slow": Oven(100), "fast": Oven(250)})
    shape: str = key("Shape; absent = as the tin", default="tin", written=Literal["round", "square"] | None)
    sugar: int = key("Grams of sugar", default=0, place="filling")
    eaten: bool = False

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        if len(keys.get("layers", ())) > keys["eggs"]:
            raise ValueError("give each layer an egg")


def cake(text: str) -> Any:
    return Cake(**validate(form_of(Cake), parse_document(text, "cake.yaml")))


def test_a_section_is_constructed_from_its_keys() -> None:
    assert cake("{eggs: 2, layers: [nut], oven: {degrees: 90}}") == Cake(2, ("nut",), Oven(90))
    assert cake("{eggs: 1, oven: fast, shape: round}") == Cake(1, oven=Oven(250), shape="round")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{eggs: 0}", "cake.yaml:1: eggs: must be a whole number, at least 1, not 0"),
        ("{}", "eggs: is missing; add `eggs:` (Eggs)"),
        ("{eggs: 1, eaten: true}", "eaten: is not a known key"),  # filled in by the program
        ("{eggs: 1, sugar: 5}", "sugar: is not a known key"),  # stands in another mapping
        ("{eggs: 1, oven: {degrees: 9}}", "oven.degrees: must be a whole number, at least 50 and at most 300, not 9"),
        ("{eggs: 1, oven: {heat: 9}}", "oven.heat: is not a known key; known: degrees, fan"),
        ("{eggs: 1, oven: hot}", "oven: must be one of slow, fast or a mapping, not 'hot'"),
        ("{eggs: 1, shape: heart}", "shape: must be one of round, square, not 'heart'"),
        ("{eggs: 1, layers: [nut, nut]}", "cake.yaml:1: give each layer an egg"),
    ],
)
def test_a_wrong_key_is_named_with_its_range(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        cake(text)
    assert message in str(caught.value)


def test_keys_of_another_mapping_and_keys_over_a_base_stand_apart() -> None:
    assert key_names(Cake) == ("eggs", "layers", "oven", "shape")
    assert key_names(Cake, "filling") == ("sugar",)
    over_base = form("Cake", keys_of(Cake, over_base=True))
    document = parse_document("{shape: square, eggs: null}", "cake.yaml")
    assert validate(over_base, document) == {"shape": "square", "eggs": None}


def test_descriptions_limits_and_defaults_stand_in_the_json_schema() -> None:
    schema = TypeAdapter(form_of(Cake)).json_schema()
    assert schema["required"] == ["eggs"]
    assert schema["properties"]["eggs"]["description"] == "Eggs"
    assert schema["properties"]["eggs"]["minimum"] == 1
    assert schema["$defs"]["Oven"]["properties"]["fan"]["default"] is True
    assert "default" not in schema["properties"]["shape"]  # absent has a meaning of its own


VALUES = st.sampled_from([None, 0, 1, 300, "fast", "round", ["nut"], ["nut", "milk"], {"degrees": 90}, {"heat": 1}, {}])
TRAY = form("Tray", {**keys_of(Oven), "cake": form_of(Cake)}, check=lambda keys: None)


def judged(mapping: Any, written: Any) -> Any:
    try:
        return TypeAdapter(mapping).validate_python(written)
    except ValidationError as error:
        return [(one["loc"], one["type"], one["msg"]) for one in error.errors()]


@given(st.dictionaries(st.sampled_from(["degrees", "fan", "cake", "other", "eggs"]), VALUES), st.booleans())
def test_the_keys_that_are_written_are_judged_as_with_all_keys(written: dict[str, Any], nested: bool) -> None:
    document = {"degrees": 200, "cake": written} if nested else written
    assert judged(narrowed(TRAY, keys_in(document)), document) == judged(TRAY, document)


def test_keys_that_are_neither_written_nor_required_are_left_out() -> None:
    left = narrowed(form_of(Cake), keys_in({"eggs": 2, "oven": {"degrees": 90}})).__origin__
    assert list(left.__annotations__) == ["eggs", "oven"]
