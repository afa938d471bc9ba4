"""The spec's JSON and its schema: strict where readers could differ, and the same as Python's json where not."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from attacks.forgery import HONEST
from hypothesis import given
from hypothesis import strategies as st

from mmfact.store import schema

SCHEMA = json.loads((Path(__file__).parents[2] / "store" / "artifact.schema.json").read_text(encoding="utf-8"))

scalars = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=20)
values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
).filter(lambda value: depth(value) <= 8)


def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(values)
def test_what_json_writes_is_read_back(value):
    assert schema.parse(json.dumps(value).encode()) == value


@given(st.text(alphabet='[]{}",:\\ae01.-+NIn\n', max_size=40))
def test_nothing_is_read_that_json_does_not_read(text):
    """And the same, where it is read: brackets in texts, escapes, texts without an end."""
    try:
        ours = schema.parse(text.encode())
    except ValueError:
        return
    assert ours == json.loads(text)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(data):
    message = ""
    try:
        schema.parse(data)
    except ValueError as error:
        message = str(error)
    assert message.isprintable()


@pytest.mark.parametrize("n", [8, 9])
def test_eight_levels_are_the_most(n):
    text = b"[" * n + b"]" * n
    if n > 8:
        with pytest.raises(ValueError, match="nested deeper than 8"):
            schema.parse(text)
    else:
        assert schema.parse(text) == json.loads(text)


def test_brackets_in_texts_are_not_nesting():
    assert schema.parse(json.dumps(["[" * 50, '\\"{{{{{{{{{{']).encode()) == ["[" * 50, '\\"{{{{{{{{{{']


@pytest.mark.parametrize("text", [b'{"a":1,"a":1}', b'[{"b":{"a":1,"c":2,"a":3}}]', rb'{"a":1,"\u0061":2}'])
def test_a_key_twice_is_refused(text):
    with pytest.raises(ValueError, match="twice"):
        schema.parse(text)


@given(st.text(max_size=300) | st.integers() | st.floats())
def test_what_is_shown_cannot_steer_a_terminal(value):
    """No control character, no end of line, and bounded."""
    text = schema.shown(value)
    assert text.isprintable()
    assert len(text) <= 82


def test_the_schema_is_one():
    """By the metaschema of its draft."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def objects(node):
    """Every subschema."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from objects(value)
    elif isinstance(node, list):
        for value in node:
            yield from objects(value)


def test_everything_has_a_limit():
    """A field without one would let a spec grow to whatever its writer likes."""
    for node in objects({**SCHEMA, "if": None, "then": None}):
        kind = node.get("type")
        if kind == "string":
            assert node["maxLength"] <= 300
        elif kind == "array":
            assert node["maxItems"] <= 2
        elif kind in ("number", "integer"):
            assert {"minimum", "exclusiveMinimum"} & set(node)
            assert {"maximum", "exclusiveMaximum"} & set(node)
        elif kind == "object":
            assert node["additionalProperties"] is False or node["maxProperties"] <= 32


@pytest.mark.parametrize("name", HONEST)
def test_every_strategy_keeps_it(name):
    """Judged by jsonschema alone, too: what others do with the published file."""
    spec = HONEST[name]().spec
    assert schema.breach(spec) is None
    jsonschema.Draft202012Validator(SCHEMA).validate(spec)


def test_provenance_of_a_migrated_artifact():
    spec = json.loads(json.dumps(HONEST["dense"]().spec))
    spec["provenance"]["migrated_from"] = {"digest": "0123456789abcdef" * 4, "schema_version": 1}
    assert schema.breach(spec) is None
    spec["provenance"]["migrated_from"]["digest"] = "0123"
    assert "$.provenance.migrated_from.digest" in schema.breach(spec)


def test_a_breach_names_place_value_and_rule():
    spec = json.loads(json.dumps(HONEST["dense"]().spec))
    spec["certificate"]["residual"] = -1.5
    assert schema.breach(spec) == "its spec at '$.certificate.residual' is -1.5, against the rule minimum 0"
