"""What differs between two artifacts: known changes, one at a time, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd
from mmfact.store.difference import ArrayDifference, difference
from mmfact.store.format import from_factorization


@pytest.fixture(scope="module")
def buffered():
    return from_factorization(compile(momentum(6), Options(buffers=2)))


@pytest.fixture(scope="module")
def dense():
    return from_factorization(compile(prefix_sum(4), Options(strategy="dense")))


def names(found):
    return {field.name for field in found.fields}, {array.name for array in found.arrays}


def test_an_artifact_does_not_differ_from_itself(buffered, dense):
    for artifact in (buffered, dense):
        found = difference(artifact, artifact)
        assert found.equal
        assert names(found) == (set(), set())
    assert set(difference(buffered, buffered).equal_arrays) == {
        "learning_rates",
        "multipliers",
        "strategy.c",
        "strategy.g",
        "strategy.decay",
        "strategy.q",
    }


def test_one_value_of_one_array(buffered):
    """q[3, 1] made half as large again: one of twelve values, by a third, at step 3."""
    q = buffered.strategy.q.copy()
    q[3, 1] *= 1.5
    strategy = buffered.strategy
    other = replace(buffered, strategy=BufferedStrategy(c=strategy.c, g=strategy.g, decay=strategy.decay, q=q))
    for pair, sign in (((buffered, other), 1), ((other, buffered), -1)):
        found = difference(*pair)
        assert not found.equal, sign
        assert names(found) == (set(), {"strategy.q"})
        (array,) = found.arrays
        assert (array.count, array.differing, array.step) == (12, 1, 3)
        assert array.largest == pytest.approx(1 / 3, rel=1e-6)


def test_the_row_of_a_triangle(dense):
    """The packed triangle's values 6 to 9 are row 3; opposite signs are a relative difference of 2."""
    packed = dense.strategy.packed.copy()
    packed[7] *= -1
    (array,) = difference(dense, replace(dense, strategy=DenseStrategy(packed))).arrays
    assert array == ArrayDifference("strategy.packed", ((10,), (10,)), 10, 1, 2.0, 3)


def test_learning_rates_from_the_first_step_that_differs():
    rates = np.linspace(1, 0.5, 8)
    others = rates.copy()
    others[5:] *= 2
    one, two = (
        from_factorization(compile(sgd(8, learning_rates=r), Options(strategy="dense"))) for r in (rates, others)
    )
    found = difference(one, two)
    (array,) = [array for array in found.arrays if array.name == "learning_rates"]
    assert (array.differing, array.step, array.largest) == (3, 5, 0.5)
    assert {"workload.schedule", "certificate.loss", "certificate.excess"} <= names(found)[0]
    assert "workload.beta" not in names(found)[0]


def test_another_precision_is_a_difference_though_values_agree(dense):
    """Small whole numbers are the same in float32 and float64."""
    packed = np.round(dense.strategy.packed * 4) + 1
    wide, narrow = (replace(dense, strategy=DenseStrategy(packed.astype(t))) for t in ("float64", "float32"))
    found = difference(wide, narrow)
    assert names(found) == ({"strategy.dtype"}, set())
    assert (found.fields[0].first, found.fields[0].second) == ("float64", "float32")


def test_options_and_versions_by_name(buffered):
    provenance = {**buffered.provenance, "options": {**buffered.provenance["options"], "rank": 3}}
    provenance["versions"] = {**buffered.provenance["versions"], "numpy": "1.0"}
    found = difference(buffered, replace(buffered, provenance=provenance))
    assert names(found) == ({"provenance.options.rank", "provenance.versions.numpy"}, set())
    (field,) = [field for field in found.fields if field.name == "provenance.options.rank"]
    assert (field.first, field.second) == (None, 3)


def test_other_forms_and_horizons(buffered, dense):
    """Arrays that only one has, or that have another shape, are counted, not compared."""
    found = difference(buffered, dense)
    assert {"workload.kind", "workload.n", "strategy.kind", "strategy.buffers", "certificate.n"} <= names(found)[0]
    by_name = {array.name: array for array in found.arrays}
    assert by_name["strategy.packed"].shapes == (None, (10,))
    assert by_name["strategy.g"].shapes == ((6, 2), None)
    assert by_name["multipliers"] == ArrayDifference("multipliers", ((6,), (4,)), 6, None, None, None)


def test_custom_matrices():
    A = np.tri(4) + np.eye(4)
    A_other = A.copy()
    A_other[2, 0] = 1.25
    one, two = (from_factorization(compile(custom(matrix), Options(strategy="dense"))) for matrix in (A, A_other))
    (array,) = [array for array in difference(one, two).arrays if array.name == "matrix"]
    assert (array.differing, array.step, array.largest) == (1, 2, pytest.approx(0.2))
    assert "learning_rates" not in difference(one, two).equal_arrays


def test_what_only_digests_tell_apart(dense):
    """The sign of a zero, say: no value differs, and yet the two are not the same."""
    found = difference(dense, replace(dense, digest="0" * 64))
    assert not found.equal
    assert names(found) == ({"digest"}, set())


def test_the_format_is_a_difference(dense):
    assert names(difference(dense, replace(dense, schema_version=1))) == ({"schema_version"}, set())
