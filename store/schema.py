"""The spec of an artifact: its JSON read strictly, and judged by a schema with limits on every length and number.

`artifact.schema.json` is the contract, in JSON Schema (Draft 2020-12); what it cannot say is checked in
`mmfact.store.format`.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

_DEEPEST = 8  # a spec needs 4
_LONGEST_NUMBER = 40  # characters; a float64 needs 24 at most
_LARGEST_INTEGER = 2**63 - 1
# A text may lack its end, so that no quote is ever scanned twice.
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def shown(value: Any, most: int = 80) -> str:
    """A value from a file as it may stand in a message: its repr, which escapes what steers a terminal, cut."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}.."


def parse(data: bytes) -> Any:
    """The value of a JSON text in ASCII, with nothing in it that readers could take in different ways.

    Raises
    ------
    ValueError
        Not such a text: not JSON, a key twice in one object, a number that is not finite or too long, nested too
        deep. The message says what, and where it quotes the text it is safe to print.
    """
    text = data.decode("ascii")
    depth = 0
    for found in _TEXT_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {shown(key)} appears twice")
        values[key] = value
    return values


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that an artifact may hold")


def _float(text: str) -> float:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"the number {shown(text)} has {len(text)} characters; {_LONGEST_NUMBER} are allowed")
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a number that an artifact may hold: it is not finite as a float64")
    return value


def _integer(text: str) -> int:
    if len(text) > _LONGEST_NUMBER or abs(value := int(text)) > _LARGEST_INTEGER:
        raise ValueError(f"the whole number {shown(text)} is larger than {_LARGEST_INTEGER}")
    return value


def breach(spec: Any) -> str | None:
    """In words, the first rule of the schema that `spec` breaks, where, and by what value; None if it breaks none."""
    error = next(_validator().iter_errors(spec), None)
    return None if error is None else f"its spec at {shown(error.json_path)} {_words(error)}"


def _words(error: ValidationError) -> str:
    rule = error.validator_value
    if error.validator == "required":
        return f"lacks {shown([name for name in rule if name not in error.instance])}"
    if error.validator == "additionalProperties" and rule is False:
        known = error.schema.get("properties", {})
        return f"has unknown fields {shown([name for name in error.instance if name not in known])}"
    if error.validator is None:  # the schema `false`
        return f"is {shown(error.instance)}, where nothing is allowed"
    return f"is {shown(error.instance)}, against the rule {error.validator} {shown(rule)}"


@cache
def _validator() -> Validator:
    """Built at the first spec: importing jsonschema takes 40 ms."""
    from jsonschema import validators

    plain = validators.Draft202012Validator
    # In JSON Schema 3.0 is an integer; here it would become a float where a count belongs.
    types = plain.TYPE_CHECKER.redefine(
        "integer", lambda checker, value: isinstance(value, int) and not isinstance(value, bool)
    )
    strict = validators.extend(plain, type_checker=types)
    return strict(json.loads(resources.files("mmfact.store").joinpath("artifact.schema.json").read_text("utf-8")))
