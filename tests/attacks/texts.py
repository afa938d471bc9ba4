"""Attacks by the spec: JSON that parsers choke on or read differently, and statements that the content denies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from attacks.forgery import banded, buffered, dense, removing, setting
from attacks.generators import attack
from mmfact.factorize.errors import ArtifactVersionError

Built = tuple[bytes, str | None]


def written(old: str, new: str) -> Callable[[bytes], bytes]:
    """A change of the JSON text, for what no JSON writer would write."""

    def change(text: bytes) -> bytes:
        if text.count(old.encode()) != 1:
            raise ValueError(f"{old} is not once in the spec")
        return text.replace(old.encode(), new.encode())

    return change


def stated(field: str, value: str, section: str = "certificate") -> Callable[[bytes], bytes]:
    """The JSON text with this field written so."""

    def change(text: bytes) -> bytes:
        spec = json.loads(text)
        spec[section][field] = "here"
        return json.dumps(spec, sort_keys=True, separators=(",", ":")).replace('"here"', value).encode()

    return change


# --- JSON ----------------------------------------------------------------------------------------------


@attack("its spec is not JSON .*Expecting value")
def no_json() -> Built:
    return dense().build(text=lambda text: b"<xml/>")


@attack("its spec is not JSON .*can't decode byte 0xff")
def not_ascii() -> Built:
    return dense().build(text=lambda text: text.decode().encode("utf-16"))


@attack("its spec is not JSON .*nested deeper than 8 levels")
def half_a_million_brackets() -> Built:
    """A parser that calls itself for each of them runs out of stack."""
    return dense().build(text=lambda text: b"[" * 500_000)


@attack("its spec is not JSON .*nested deeper than 8 levels")
def deep_objects_in_the_options() -> Built:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    return dense().build(setting("provenance", "options", deep))


@attack("its spec is not JSON .*Unterminated string")
def a_megabyte_of_quotes_that_never_close() -> Built:
    """Quadratic for whoever looks for the end of a text from every quote in it."""
    return dense().build(text=lambda text: b'"' + b'\\"' * 500_000)


@attack("its spec is not JSON .*the key 'sensitivity' appears twice")
def a_key_twice() -> Built:
    """One reader takes the first, another the last."""
    return dense().build(text=written('"sensitivity":', '"sensitivity":0.5,"sensitivity":'))


@attack(r"its spec is not JSON .*the key '\\x1b\[31m' appears twice")
def a_key_that_steers_a_terminal() -> Built:
    return dense().build(text=written('{"kind":"single"}', '{"\\u001b[31m":1,"\\u001b[31m":2}'))


@attack("its spec is not JSON .*NaN is not a number")
def not_a_number() -> Built:
    """It compares false with everything, so it passes checks that are written the wrong way round."""
    return dense().build(text=stated("loss", "NaN"))


@attack("its spec is not JSON .*-Infinity is not a number")
def minus_infinity() -> Built:
    return dense().build(text=stated("residual", "-Infinity"))


@attack("its spec is not JSON .*1e999 is not a number")
def a_number_that_overflows_to_infinity() -> Built:
    return dense().build(text=stated("max_error", "1e999"))


@attack("its spec is not JSON .*the whole number '1{70,}.*is larger than 9223372036854775807")
def a_whole_number_of_a_hundred_thousand_digits() -> Built:
    """Quadratic to read, or a ValueError of Python's own."""
    return dense().build(text=stated("iterations", "1" * 100_000))


@attack("its spec is not JSON .*the number '1.1{70,}.* has 100002 characters")
def a_number_of_a_hundred_thousand_digits() -> Built:
    return dense().build(text=stated("loss", "1." + "1" * 100_000))


@attack("its spec is not JSON .*the whole number '9223372036854775808' is larger")
def a_whole_number_past_64_bits() -> Built:
    return dense().build(text=stated("products", str(2**63)))


# --- the schema ----------------------------------------------------------------------------------------


@attack("has schema version 999; .*Upgrade mmfact", ArtifactVersionError)
def version_999() -> Built:
    """Not damage: the message says what to do."""
    return dense().build(setting("schema_version", 999))


@attack("its schema version is True")
def version_true() -> Built:
    return dense().build(setting("schema_version", True))


@attack("its spec is not that of an mmfact artifact")
def another_format() -> Built:
    return dense().build(setting("format", "mmfact-artefact"))


@attack("its spec is not that of an mmfact artifact")
def a_list_for_a_spec() -> Built:
    return dense().build(text=lambda text: b"[" + text + b"]")


@attack("against the rule const 'dense'")
def a_strategy_that_its_version_did_not_have() -> Built:
    return buffered().build(setting("schema_version", 1))


@attack(r"its spec at '\$' has unknown fields \['nested'\]")
def an_unknown_field() -> Built:
    """An older reader would pass over what a newer writer meant."""
    return dense().build(setting("nested", {}))


@attack(r"its spec at '\$.workload' has unknown fields \['nesterov'\]")
def an_unknown_parameter() -> Built:
    return dense().build(setting("workload", "nesterov", True))


@attack(r"its spec at '\$.provenance' has unknown fields \['\\x1b\]0;owned\\x07'\]")
def a_field_that_steers_a_terminal() -> Built:
    return dense().build(setting("provenance", "\x1b]0;owned\x07", 1))


@attack(r"its spec at '\$.workload.schedule' is 'a\\nb\\r\\x1b\[2J', against the rule pattern")
def a_schedule_that_steers_a_terminal() -> Built:
    return dense().build(setting("workload", "schedule", "a\nb\r\x1b[2J"))


@attack(r"its spec at '\$.provenance.versions.numpy' is 'x{79}.., against the rule maxLength 300")
def a_version_of_half_a_megabyte() -> Built:
    return dense().build(setting("provenance", "versions", "numpy", "x" * 500_000))


@attack(r"its spec at '\$.provenance.options' is .*, against the rule maxProperties 32")
def fifty_thousand_options() -> Built:
    return dense().build(setting("provenance", "options", {f"o{i}": i for i in range(50_000)}))


@attack(r"its spec at '\$.datasets' has unknown fields \['\.\./\.\./etc/passwd'\]")
def a_dataset_that_is_a_path() -> Built:
    return dense().build(setting("datasets", "../../etc/passwd", {"shape": [1], "dtype": "<f8", "sha256": "0" * 64}))


@attack(r"its spec at '\$.certificate' lacks \['lower_bound'\]")
def a_certificate_with_a_gap() -> Built:
    return dense().build(removing("certificate", "lower_bound"))


@attack(r"its spec at '\$.workload.n' is True, against the rule type 'integer'")
def a_horizon_that_is_true() -> Built:
    """In Python True is 1."""
    return dense().build(setting("workload", "n", True))


@attack(r"its spec at '\$.workload.n' is 3.0, against the rule type 'integer'")
def a_horizon_with_a_point() -> Built:
    return dense().build(setting("workload", "n", 3.0))


@attack(r"its spec at '\$.certificate.fell_back' is 0, against the rule type 'boolean'")
def a_number_for_a_truth_value() -> Built:
    return dense().build(setting("certificate", "fell_back", 0))


@attack(r"its spec at '\$.certificate.loss' is True, against the rule type 'number'")
def a_truth_value_for_a_number() -> Built:
    return dense().build(setting("certificate", "loss", True))


@attack(r"its spec at '\$.participation.kind' is 'cyclic', against the rule const 'single'")
def another_participation() -> Built:
    """The sensitivity of several participations is larger."""
    return dense().build(setting("participation", "kind", "cyclic"))


@attack(r"its spec at '\$.workload.beta' is -0.1, against the rule minimum 0")
def a_negative_momentum() -> Built:
    return dense().build(setting("workload", "beta", -0.1))


@attack(r"its spec at '\$.datasets.multipliers.sha256' is '0{64}\\n', against the rule maxLength 64")
def a_digest_with_a_line_break() -> Built:
    return dense().build(setting("datasets", "multipliers", "sha256", "0" * 64 + "\n"))


# --- what the content denies ---------------------------------------------------------------------------


@attack("its spec lists other datasets than its workload and strategy need: .*'matrix'")
def a_custom_workload_without_its_matrix() -> Built:
    return dense().build(setting("workload", "kind", "custom"))


@attack("its spec lists other datasets than its workload and strategy need: .*'learning_rates'")
def a_horizon_that_its_arrays_do_not_have() -> Built:
    return dense().build(setting("workload", "n", 4))


@attack("its certificate is for 4 steps but its workload has 3")
def a_certificate_for_another_horizon() -> Built:
    return dense().build(setting("certificate", "n", 4))


@attack("its content has digest [0-9a-f]{16}.. but its name says")
def the_content_of_another_artifact() -> Built:
    """Two files swapped, each whole."""
    return buffered().data, dense().artifact.digest


@attack("its certificate says sensitivity 0.5")
def half_the_sensitivity() -> Built:
    """The noise would be halved."""
    return dense().build(setting("certificate", "sensitivity", 0.5))


def lying(forger: Any, name: str, factor: float) -> Built:
    """A figure off by a factor, with an excess that fits the loss."""

    def edit(spec: dict[str, Any]) -> None:
        certificate = spec["certificate"]
        certificate[name] *= factor
        certificate["excess"] = certificate["loss"] / certificate["lower_bound"] - 1

    return forger.build(edit)


@attack("its certificate says loss [0-9.]+ but its coefficients have")
def a_loss_that_its_coefficients_do_not_have() -> Built:
    return lying(dense(), "loss", 1.001)


@attack("its certificate says loss [0-9.]+ but its coefficients have")
def a_loss_of_buffers_that_they_do_not_have() -> Built:
    return lying(buffered(), "loss", 1 + 1e-5)


@attack("its certificate says loss [0-9.]+ but its coefficients have")
def a_loss_of_a_band_that_it_does_not_have() -> Built:
    return lying(banded(), "loss", 1 + 1e-5)


@attack("its certificate says max error [0-9.]+ but its coefficients have")
def a_max_error_that_its_coefficients_do_not_have() -> Built:
    return lying(buffered(), "max_error", 0.99)


@attack("its certificate has a lower bound [0-9.]+ above its loss")
def a_lower_bound_above_the_loss() -> Built:
    """No factorization can beat the bound, so one of the two is wrong."""
    forger = dense()
    higher = forger.spec["certificate"]["loss"] * 1.1
    return forger.build(lambda spec: spec["certificate"].update(lower_bound=higher, excess=0.0))


@attack("its certificate says excess 1e-12 but its loss and lower bound give")
def an_excess_that_flatters() -> Built:
    return buffered().build(setting("certificate", "excess", 1e-12))


@attack("its multipliers are not 3 positive numbers")
def a_multiplier_that_is_not_a_number() -> Built:
    return dense().build(arrays={"multipliers": np.array([1.0, np.nan, 1.0])})


@attack("its content makes no artifact .*finite")
def a_coefficient_that_is_not_a_number() -> Built:
    return dense().build(arrays={"strategy.packed": np.array([1.0, np.nan, 1.0, 0.5, 0.5, 1.0])})


@attack("its content makes no artifact .*diagonal must be positive")
def a_step_without_noise() -> Built:
    """A zero on C's diagonal: that step's gradient would go out bare."""
    return dense().build(arrays={"strategy.packed": np.array([1.0, 0.5, 0.0, 0.5, 0.5, 1.0])})


@attack("its content makes no artifact .*learning rate")
def a_learning_rate_of_zero() -> Built:
    return dense().build(arrays={"learning_rates": np.array([1.0, 0.0, 1.0])})


@attack("its certificate says sensitivity [0-9.]+ but its coefficients have (inf|nan)")
def decays_that_overflow() -> Built:
    arrays = {**buffered().arrays}
    arrays["strategy.decay"] = np.full_like(arrays["strategy.decay"], 1e30)
    arrays["strategy.g"] = np.full_like(arrays["strategy.g"], 1e30)
    arrays["strategy.q"] = np.full_like(arrays["strategy.q"], 1e30)
    return buffered().build(arrays=arrays)
