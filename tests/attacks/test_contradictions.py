"""Specs and arrays that contradict themselves or each other, under digests that fit: refused with a typed error.

Digests that fit prove nothing about sense; a reader that trusts them trains with another workload. `format.decode` may
raise nothing but ArtifactCorrupt and ArtifactVersionError.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from attacks.forgery import BAND, BUFFERS, RANK, removing, setting
from attacks.forgery import STEPS as N
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError
from mmfact.store import format

HERE = Path("foreign.h5")
NAN, INF = math.nan, math.inf

recursive = pytest.mark.parametrize("kind", ["buffered", "banded-low-rank"])


def refused(data, logical, **options):
    with pytest.raises(ArtifactCorrupt, **options):
        format.decode(data, HERE, logical)


# --- any strategy: the spec ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        b" ",
        b"{}",
        b"null",
        b"[]",
        b'"mmfact-artifact"',
        b"\xff\xfe\x00",
        b'{"format": "mmfact-artifact"}',
        b'{"format": "mmfact-artifact", "schema_version": 1}',
        b'{"format": "mmfact-artifact", "schema_version": 1, "datasets": {}}',
        b'{"format": "mmfact-artifact", "schema_version": 1, "datasets": []}',
        b'{"format": "something else", "schema_version": 1, "datasets": {}}',
        b"[" * 500_000,
        b'{"format": "mmfact-artifact", "schema_version": ' + b"1" * 5000 + b"}",
        b" " * (2 << 20),
    ],
    ids=lambda spec: f"{spec[:60]!r}, {len(spec)}",
)
def test_spec_that_is_no_spec(forger, spec):
    with pytest.raises(ArtifactCorrupt):
        format.decode(forger.write(spec, {}), HERE)


@pytest.mark.parametrize("version", [3, 999, 10**18])
def test_newer_schema_of_a_dense_one(forger, version):
    """A file of a later mmfact is not damage: the message says to upgrade."""
    data, logical = forger.build(setting("schema_version", version))
    with pytest.raises(ArtifactVersionError, match="Upgrade mmfact"):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize("version", ["1", True, 1.0, 0, -1, None, [1], NAN])
def test_schema_version_that_is_no_version(forger, version):
    data, logical = forger.build(setting("schema_version", version))
    with pytest.raises(ArtifactCorrupt, match=r"schema version|NaN"):
        format.decode(data, HERE, logical)


SPECS = {
    "workload missing": removing("workload"),
    "certificate missing": removing("certificate"),
    "participation missing": removing("participation"),
    "strategy missing": removing("strategy"),
    "provenance missing": removing("provenance"),
    "workload a list": setting("workload", []),
    "unknown workload": setting("workload", "kind", "nesterov"),
    "another workload": setting("workload", "kind", "sgd"),
    "custom without matrix": setting("workload", "kind", "custom"),
    "horizon too long": setting("workload", "n", 4),
    "horizon too short": setting("workload", "n", 2),
    "horizon zero": setting("workload", "n", 0),
    "horizon not whole": setting("workload", "n", 3.0),
    "horizon true": setting("workload", "n", True),
    "horizon immense": setting("workload", "n", 10**400),
    "beta one": setting("workload", "beta", 1.0),
    "beta negative": setting("workload", "beta", -0.1),
    "beta text": setting("workload", "beta", "0.9"),
    "beta immense": setting("workload", "beta", 10**400),
    "weight decay negative": setting("workload", "weight_decay", -1.0),
    "weight decay immense": setting("workload", "weight_decay", 10**400),
    "ema one": setting("workload", "ema", 1.0),
    "schedule no text": setting("workload", "schedule", ["cooldown"]),
    "schedule number": setting("workload", "schedule", 5),
    "unknown decay kind": setting("workload", "weight_decay_kind", "both"),
    "extra parameter": setting("workload", "nesterov", True),
    "matrix smuggled in": setting("workload", "matrix", [[1.0]]),
    "unknown participation": setting("participation", "kind", "cyclic"),
    "participation extra": setting("participation", "separation", 4),
    "unknown strategy": setting("strategy", "kind", "buffered"),
    "strategy text": setting("strategy", "dense"),
    "provenance no object": setting("provenance", 5),
    "dataset without digest": removing("datasets", "multipliers", "sha256"),
    "dataset wrong digest": setting("datasets", "multipliers", "sha256", "0" * 64),
    "dataset wrong shape": setting("datasets", "multipliers", "shape", [4]),
    "dataset no object": setting("datasets", "multipliers", 3),
    "dataset unlisted": removing("datasets", "multipliers"),
    "dataset not there": setting("datasets", "matrix", {"shape": [6], "dtype": "<f8", "sha256": "0" * 64}),
}


@pytest.mark.parametrize("name", SPECS)
def test_spec_that_contradicts_itself_or_its_data(forger, name):
    """Digests that fit prove nothing about sense; a reader that trusts them trains with another workload."""
    data, logical = forger.build(SPECS[name])
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


NUMBERS = [
    ("certificate", "loss"),
    ("certificate", "lower_bound"),
    ("certificate", "excess"),
    ("certificate", "sensitivity"),
    ("certificate", "max_error"),
    ("certificate", "residual"),
    ("certificate", "quadrature_error"),
    ("certificate", "rounding"),
    ("workload", "beta"),
    ("workload", "ema"),
    ("workload", "weight_decay"),
    ("workload", "n"),
    ("provenance", "options"),
]


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", NUMBERS, ids=".".join)
def test_numbers_that_are_none(forger, where, value):
    """NaN compares false with everything, so it passes checks written the wrong way round (and breaks --json)."""
    data, logical = forger.build(setting(*where, value))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-8, 1 + 1e-8, 2.0, -1.0])
def test_wrong_sensitivity_of_a_dense_one(forger, factor):
    """An understated sensitivity would scale the noise down."""
    value = forger.spec["certificate"]["sensitivity"] * factor
    data, logical = forger.build(setting("certificate", "sensitivity", value))
    with pytest.raises(ArtifactCorrupt, match="sensitivity"):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "certificate",
    [
        {"excess": 0.0},
        {"excess": 1.0},
        {"excess": None},
        {"lower_bound": 1e9},
        {"lower_bound": 0.0},
        {"lower_bound": -1.0},
        {"lower_bound": 5e-324, "excess": INF},
        {"loss": 1.0},
        {"loss": 1e9},
        {"n": 4},
        {"n": 3.0},
        {"loss": "20"},
        {"iterations": 1.5},
        {"iterations": True},
        {"fell_back": 0},
        {"method": 3},
        {"unknown": 3},
    ],
    ids=str,
)
def test_certificate_that_contradicts_itself(forger, certificate):
    """Loss, lower bound and excess belong together; a certificate that disagrees with itself is none."""
    data, logical = forger.build(lambda spec: spec["certificate"].update(certificate))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "name",
    ["n", "loss", "lower_bound", "excess", "sensitivity", "sensitivity_kind", "max_error", "residual", "fell_back"],
)
def test_certificate_with_a_gap(forger, name):
    data, logical = forger.build(removing("certificate", name))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


# --- any strategy: the arrays ----------------------------------------------------------------------

ARRAYS = {
    "zero rate": {"learning_rates": np.array([1.0, 0.0, 1.0])},
    "negative rate": {"learning_rates": np.array([1.0, -1.0, 1.0])},
    "NaN rate": {"learning_rates": np.array([1.0, NAN, 1.0])},
    "infinite rate": {"learning_rates": np.array([1.0, INF, 1.0])},
    "too few rates": {"learning_rates": np.ones(2)},
    "zero multiplier": {"multipliers": np.array([1.0, 0.0, 1.0])},
    "negative multiplier": {"multipliers": np.array([1.0, -1.0, 1.0])},
    "NaN multiplier": {"multipliers": np.array([1.0, NAN, 1.0])},
    "infinite multiplier": {"multipliers": np.array([1.0, INF, 1.0])},
    "too many multipliers": {"multipliers": np.ones(4)},
    "no triangle": {"strategy.packed": np.ones(5)},
    "smaller triangle": {"strategy.packed": np.array([1.0, 0.0, 1.0])},
    "zero diagonal": {"strategy.packed": np.array([1.0, 0.5, 0.0, 0.5, 0.5, 1.0])},
    "negative diagonal": {"strategy.packed": np.array([1.0, 0.5, -1.0, 0.5, 0.5, 1.0])},
    "NaN coefficient": {"strategy.packed": np.array([1.0, NAN, 1.0, 0.5, 0.5, 1.0])},
    "bytes for coefficients": {"strategy.packed": np.ones(6, np.uint8)},
    "no strategy": {"strategy.packed": None},
    "no rates": {"learning_rates": None},
    "no multipliers": {"multipliers": None},
    "both matrix and rates": {"matrix": np.ones(6)},
    "data nothing refers to": {"strategy.lambda": np.ones(3)},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_dense_one_that_make_no_sense(forger, name):
    """Every array is re-validated: a rate of zero divides by zero, a zero on C's diagonal cannot be streamed."""
    data, logical = forger.build(arrays=ARRAYS[name])
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "matrix",
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 5],
    ids=["2 x 2", "singular", "NaN", "no triangle"],
)
def test_custom_matrix_that_makes_no_sense(forger, matrix):
    def custom(spec):
        spec["workload"].update(kind="custom", beta=0.0)

    data, logical = forger.build(custom, arrays={"learning_rates": None, "matrix": np.array(matrix)})
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


# --- the strategy's entry --------------------------------------------------------------------------

WRONG = [0, -1, -(10**30), 7, 10**6, 2**63, 10**400, True, False, "2", 2.0, 1.5, None, [2], {"n": 2}, NAN, INF]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    ("kind", "name"), [("buffered", "buffers"), ("banded-low-rank", "bandwidth"), ("banded-low-rank", "rank")]
)
def test_a_parameter_that_cannot_be(forgers, kind, name, value):
    """Zero, negative, huge, more than n allows (7 buffers for 12 steps; 7 is also no band or rank of the arrays)."""
    data, logical = forgers[kind].build(lambda spec: spec["strategy"].update({name: value}))
    refused(data, logical)


@recursive
@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "buffered",
        5,
        {},
        {"kind": "buffered"},
        {"kind": "banded-low-rank"},
        {"kind": "banded-low-rank", "bandwidth": BAND},
        {"kind": "banded-low-rank", "rank": RANK},
        {"kind": "buffered", "bandwidth": BAND, "rank": RANK},
        {"kind": "banded-low-rank", "buffers": BUFFERS},
        {"kind": "buffered", "buffers": BUFFERS, "rank": 2},
        {"kind": "buffered", "buffers": BUFFERS, "": 2},
        {"kind": "banded-low-rank", "bandwidth": BAND, "rank": RANK, "buffers": 3},
        {"kind": "Buffered", "buffers": BUFFERS},
        {"kind": "banded_low_rank", "bandwidth": BAND, "rank": RANK},
        {"kind": "blt", "buffers": BUFFERS},
        {"kind": ["buffered"], "buffers": BUFFERS},
        {"kind": {"buffered": 1}, "buffers": BUFFERS},
        {"kind": None, "buffers": BUFFERS},
        {"kind": 1, "buffers": BUFFERS},
        {"kind": "", "buffers": BUFFERS},
        {"kind": "dense"},
        {"kind": "dense", "buffers": BUFFERS},
        {"buffers": BUFFERS},
        {"bandwidth": BAND, "rank": RANK},
    ],
    ids=str,
)
def test_a_strategy_entry_that_is_none(forgers, kind, entry):
    """Keys missing, to spare, of another strategy; kinds unknown, or of a type that cannot be looked up."""
    data, logical = forgers[kind].build(lambda spec: spec.update(strategy=entry))
    refused(data, logical)


@recursive
@pytest.mark.parametrize("version", [1, 0, -2, True, "2", 2.0, None])
def test_a_schema_version_that_did_not_have_it(forgers, kind, version):
    """Version 1 knew the dense strategy only: such a file was never written."""
    data, logical = forgers[kind].build(lambda spec: spec.update(schema_version=version))
    refused(data, logical)


@recursive
@pytest.mark.parametrize("version", [3, 10**18])
def test_a_newer_schema(forgers, kind, version):
    data, logical = forgers[kind].build(lambda spec: spec.update(schema_version=version))
    with pytest.raises(ArtifactVersionError, match="Upgrade"):
        format.decode(data, HERE, logical)


def test_version_1_with_the_dense_strategy_is_read(forger, same):
    """Files of yesterday; their bytes are not those of today, their content is."""
    data, logical = forger.build(lambda spec: spec.update(schema_version=1))
    read = format.decode(data, HERE, logical)
    np.testing.assert_array_equal(read.C, forger.artifact.C)
    assert read.digest == logical != forger.artifact.digest


@recursive
def test_a_custom_workload_under_a_spec_for_a_structured_one(forgers, kind):
    def edit(spec):
        spec["workload"].update(kind="custom", beta=0.0)

    data, logical = forgers[kind].build(edit)
    refused(data, logical)


# --- the arrays ------------------------------------------------------------------------------------


def changed(name, change):
    """An edit of one coefficient array of the honest artifact."""

    def edit(arrays):
        array = arrays[f"strategy.{name}"].copy()
        new = change(array)
        return {f"strategy.{name}": array if new is None else new}

    return edit


def put(index, value):
    def change(array):
        array[index] = value

    return change


def every(change):
    return lambda arrays: {k: change(v) for k, v in arrays.items() if k.startswith("strategy.")}


BUFFERED = {
    "g transposed": changed("g", lambda x: x.T),
    "all transposed": every(lambda x: x.T),
    "g flat": changed("g", np.ravel),
    "c a column": changed("c", lambda x: x[:, None]),
    "c a row": changed("c", lambda x: x[None]),
    "g of three dimensions": changed("g", lambda x: x[:, :, None]),
    "one step fewer": every(lambda x: x[:-1]),
    "one step more": every(lambda x: np.concatenate([x, x[-1:]])),
    "q one buffer fewer": changed("q", lambda x: x[:, :1]),
    "decay one buffer more": changed("decay", lambda x: np.column_stack([x, x[:, 0]])),
    "all one buffer more": every(lambda x: x if x.ndim == 1 else np.column_stack([x, x[:, 0]])),
    "c of another precision": changed("c", lambda x: x.astype("<f4")),
    "q of another precision": changed("q", lambda x: x.astype("<f4")),
    "g of whole numbers": changed("g", lambda x: np.ones(x.shape, "<i8")),
    "decay of half precision": changed("decay", lambda x: x.astype("<f2")),
    "g big-endian": changed("g", lambda x: x.astype(">f8")),
    "NaN in c": changed("c", put(3, NAN)),
    "NaN in g": changed("g", put((3, 1), NAN)),
    "NaN in decay": changed("decay", put((N - 1, 0), NAN)),
    "NaN in q": changed("q", put((0, 0), NAN)),
    "infinite decay": changed("decay", put((3, 1), INF)),
    "infinite q": changed("q", put((3, 1), -INF)),
    "c zero": changed("c", put(3, 0.0)),
    "c minus zero": changed("c", put(3, -0.0)),
    "c negative": changed("c", put(N - 1, -1.0)),
    "c denormal": changed("c", put(3, 5e-324)),
    "g huge": changed("g", put((3, 1), 1e300)),
    "c huge": changed("c", put(3, 1e300)),
    "c missing": lambda arrays: {"strategy.c": None},
    "decay missing": lambda arrays: {"strategy.decay": None},
    "packed instead": lambda arrays: {"strategy.c": None, "strategy.packed": np.ones(N * (N + 1) // 2)},
    "packed beside": lambda arrays: {"strategy.packed": np.ones(N * (N + 1) // 2)},
}
BANDED = {
    "band transposed": changed("band", lambda x: x.T),
    "left transposed": changed("left", lambda x: x.T),
    "all transposed": every(lambda x: x.T),
    "band flat": changed("band", np.ravel),
    "one step fewer": every(lambda x: x[:-1]),
    "wider band": changed("band", lambda x: np.column_stack([x, np.zeros(N)])),
    "narrower band": changed("band", lambda x: x[:, :-1]),
    "left of another rank": changed("left", lambda x: x[:, :1]),
    "right of another rank": changed("right", lambda x: np.column_stack([x, x[:, 0]])),
    "band of another precision": changed("band", lambda x: x.astype("<f4")),
    "right of another precision": changed("right", lambda x: x.astype("<f4")),
    "left complex": changed("left", lambda x: x.astype("<c16")),
    "NaN in band": changed("band", put((5, 1), NAN)),
    "NaN in left": changed("left", put((5, 1), NAN)),
    "NaN in right": changed("right", put((0, 1), NAN)),
    "infinite right": changed("right", put((0, 1), INF)),
    "diagonal zero": changed("band", put((5, 0), 0.0)),
    "diagonal negative": changed("band", put((5, 0), -1.0)),
    "left of the matrix": changed("band", put((0, 1), 1e-9)),
    "left of the matrix, at its last": changed("band", put((1, 2), 1.0)),
    "NaN left of the matrix": changed("band", put((0, 1), NAN)),
    "left inside the band": changed("left", put((BAND - 1, 0), 1e-300)),
    "right past the end": changed("right", put((N - BAND, 0), 1.0)),
    "band huge": changed("band", put((5, 1), 1e200)),
    "right huge": changed("right", put((0, 0), 1e200)),
    "left missing": lambda arrays: {"strategy.left": None},
    "c beside": lambda arrays: {"strategy.c": np.ones(N)},
    "other values": changed("right", put((0, 0), 7.0)),
}
BAD = [("buffered", name) for name in BUFFERED] + [("banded-low-rank", name) for name in BANDED]


@pytest.mark.parametrize(("kind", "name"), BAD)
def test_arrays_that_make_no_sense(forgers, kind, name):
    """Shapes that contradict each other or the spec, precisions mixed, values that cannot be streamed."""
    forger = forgers[kind]
    data, logical = forger.build(arrays=(BUFFERED if kind == "buffered" else BANDED)[name](forger.arrays))
    refused(data, logical)


@pytest.mark.parametrize(("kind", "name"), [entry for entry in BAD if "transposed" in entry[1] or "fewer" in entry[1]])
def test_arrays_that_only_their_own_listing_fits(forgers, kind, name):
    """The listing is honest about the wrong arrays and the parameters are made to fit as far as they can."""
    forger = forgers[kind]
    arrays = (BUFFERED if kind == "buffered" else BANDED)[name](forger.arrays)

    def edit(spec):
        shapes = {k: v["shape"] for k, v in spec["datasets"].items()}
        if kind == "buffered":
            spec["strategy"]["buffers"] = shapes["strategy.g"][-1]
        else:
            spec["strategy"].update(bandwidth=shapes["strategy.band"][-1], rank=shapes["strategy.left"][-1])

    data, logical = forger.build(edit, arrays=arrays)
    refused(data, logical)


def test_a_band_and_a_rank_that_do_not_fit_each_other(forgers):
    """R <= n - K: K = 11 leaves one row, K = 12 none."""
    forger = forgers["banded-low-rank"]
    for K, R in [(11, 2), (12, 1), (12, 2), (6, 7), (1, 12)]:
        arrays = {"strategy.band": np.eye(N)[:, :1] * 0 + np.eye(1, K), "strategy.left": np.zeros((N, R))}
        arrays["strategy.right"] = np.zeros((N, R))
        data, logical = forger.build(lambda spec, K=K, R=R: spec["strategy"].update(bandwidth=K, rank=R), arrays=arrays)
        refused(data, logical)


@recursive
@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-8, 1 + 1e-8, 2.0, -1.0])
def test_wrong_sensitivity(forgers, kind, factor):
    """An understated sensitivity would scale the noise down."""
    value = forgers[kind].spec["certificate"]["sensitivity"] * factor
    data, logical = forgers[kind].build(lambda spec: spec["certificate"].update(sensitivity=value))
    refused(data, logical, match="sensitivity")


@pytest.mark.parametrize("decay", [1e10, 1e30])
def test_a_sensitivity_that_is_not_a_number(forgers, decay):
    """Decays above 1 let C overflow; a NaN passes any comparison written the wrong way round."""
    forger = forgers["buffered"]
    n = 40
    arrays = {
        "learning_rates": np.ones(n),
        "multipliers": np.ones(n),
        "strategy.c": np.ones(n),
        "strategy.g": np.ones((n, 2)),
        "strategy.decay": np.full((n, 2), decay),
        "strategy.q": np.ones((n, 2)),
    }

    def edit(spec):
        spec["workload"]["n"] = spec["certificate"]["n"] = n

    data, logical = forger.build(edit, arrays=arrays)
    refused(data, logical)


def test_a_band_whose_strategy_overflows(forgers):
    """B_hat^-1 A not finite, or only just: a typed error, no warning and no traceback from linear algebra."""
    forger = forgers["banded-low-rank"]
    for diagonal, below in [(1e-90, 1e90), (1e-8, 1.0), (1e-300, 1.0)]:
        band = np.zeros((N, BAND))
        band[:, 0], band[1:, 1] = diagonal, below
        data, logical = forger.build(arrays={"strategy.band": band})
        refused(data, logical)
