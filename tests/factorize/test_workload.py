"""Workloads: A is what the optimizer does, L is its inverse, and nothing else is accepted."""

import json
import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import compiler, schedule, workload
from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.workload import LARGEST_DENSE, LARGEST_STRUCTURED, Workload, custom, momentum, prefix_sum, sgd

N = 24


def _rates(n):
    return np.random.default_rng(7).uniform(0.02, 0.9, n)


def every_kind(n):
    """One workload of each structured kind and combination, by name."""
    rates = _rates(n)
    return {
        "prefix": prefix_sum(n),
        "sgd": sgd(n),
        "sgd rates": sgd(n, learning_rates=rates),
        "sgd coupled": sgd(n, learning_rates=rates, weight_decay=0.3),
        "sgd decoupled": sgd(n, learning_rates=rates, weight_decay=0.3, weight_decay_kind="decoupled"),
        "sgd ema": sgd(n, learning_rates=rates, ema=0.7),
        "momentum": momentum(n),
        "momentum rates": momentum(n, learning_rates=rates),
        "momentum cooldown": momentum(n, learning_rates=schedule.parse("cooldown:peak=0.1", n)),
        "momentum zero": momentum(n, beta=0.0, learning_rates=rates),
        "momentum coupled": momentum(n, beta=0.95, learning_rates=rates, weight_decay=0.2),
        "momentum decoupled": momentum(
            n, beta=0.95, learning_rates=rates, weight_decay=0.2, weight_decay_kind="decoupled"
        ),
        "momentum ema": momentum(n, beta=0.5, learning_rates=rates, ema=0.9),
        "momentum coupled ema": momentum(n, beta=0.9, learning_rates=rates, weight_decay=0.5, ema=0.25),
        "momentum decoupled ema": momentum(
            n, beta=0.99, learning_rates=rates, weight_decay=0.5, weight_decay_kind="decoupled", ema=0.25
        ),
    }


KINDS = sorted(every_kind(1))
kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("n", [1, 2, 3, 4, 7])


@kinds
def test_dense_is_the_optimizer(kind, simulated):
    """A, column by column, is what the optimizer makes of a unit gradient."""
    w = every_kind(N)[kind]
    truth = simulated(w)
    np.testing.assert_allclose(w.dense(), truth, rtol=1e-12, atol=1e-12 * np.abs(truth).max())


@kinds
@sizes
def test_dense_at_the_smallest_horizons(kind, n, simulated):
    """The same for a handful of steps, where bands are cut short."""
    w = every_kind(n)[kind]
    np.testing.assert_allclose(w.dense(), simulated(w), rtol=1e-12, atol=1e-13)


def test_closed_forms_of_a():
    """Prefix sums are tril(ones); a schedule scales columns (not rows); momentum sums eta_k beta^(k-j)."""
    rates = _rates(9)
    np.testing.assert_array_equal(prefix_sum(9).dense(), np.tril(np.ones((9, 9))))
    np.testing.assert_allclose(sgd(9, learning_rates=rates).dense(), np.tril(np.ones((9, 9))) * rates, rtol=1e-15)
    expected = [[math.fsum(rates[k] * 0.8 ** (k - j) for k in range(j, i + 1)) for j in range(9)] for i in range(9)]
    np.testing.assert_allclose(momentum(9, beta=0.8, learning_rates=rates).dense(), expected, rtol=1e-14)


@kinds
@sizes
def test_inverse_bands_are_the_inverse(kind, n, exact_matrix):
    """L A = I in exact rational arithmetic, to double-double accuracy: the certificate rests on these bands."""
    w = every_kind(n)[kind]
    hi, lo = w.inverse_bands()
    assert hi.shape == lo.shape
    assert len(hi) <= min(4, n + 1)
    bands = [[Fraction(h) + Fraction(el) for h, el in zip(*rows, strict=True)] for rows in zip(hi, lo, strict=True)]
    A = exact_matrix(w)
    for i in range(n):
        entries = {i - k: bands[k][i] for k in range(len(bands)) if k <= i}
        for j in range(n):
            product = sum(x * A[c][j] for c, x in entries.items())
            size = sum(abs(x * A[c][j]) for c, x in entries.items())
            assert abs(product - (i == j)) <= Fraction(1, 10**28) * max(size, Fraction(1, 10**300)), (i, j)


@kinds
def test_leading_band_is_the_rounded_one(kind):
    """hi alone is L to float64: what the fast sweeps run on."""
    hi, lo = every_kind(N)[kind].inverse_bands()
    np.testing.assert_array_equal(hi, hi + lo)


@kinds
def test_entries_left_of_the_matrix_are_zero(kind):
    """bands[k, i] with i < k would lie outside; kernels rely on zeros there."""
    for part in every_kind(N)[kind].inverse_bands():
        for k in range(1, len(part)):
            np.testing.assert_array_equal(part[k, :k], 0)


def test_bandwidths():
    """As wide as the design says and no wider: each band costs w^2."""
    n = 10
    for w, width in (
        (prefix_sum(n), 1),
        (sgd(n, weight_decay=0.1), 1),
        (momentum(n), 2),
        (momentum(n, weight_decay=0.1), 2),
        (momentum(n, ema=0.5), 3),
    ):
        assert len(w.inverse_bands()[0]) == width + 1


@kinds
def test_column_energies(kind, simulated):
    """The proven bound on the spectrum starts from them."""
    w = every_kind(N)[kind]
    np.testing.assert_allclose(w.column_energies(), (simulated(w) ** 2).sum(axis=0), rtol=1e-12)


@kinds
def test_apply(kind, simulated):
    """Running the optimizer over rows is multiplying by A, on many columns at once."""
    w = every_kind(N)[kind]
    rows = np.random.default_rng(3).normal(size=(N, 5))
    np.testing.assert_allclose(w.apply(rows), simulated(w) @ rows, rtol=1e-11, atol=1e-12)


def test_custom_applies_its_matrix(random_triangle):
    """A custom workload is its matrix, nothing more; and a copy of it."""
    A = random_triangle(0, 6)
    w = custom(A)
    kept = A.copy()
    A[3, 1] = 99
    rows = np.random.default_rng(3).normal(size=(6, 2))
    np.testing.assert_array_equal(w.dense(), kept)
    np.testing.assert_allclose(w.apply(rows), kept @ rows, rtol=1e-14)
    np.testing.assert_allclose(w.column_energies(), (kept**2).sum(axis=0), rtol=1e-14)
    w.dense()[0, 0] = 5
    np.testing.assert_array_equal(w.dense(), kept)
    assert not w.structured
    for refused in (w.inverse_bands, w.state_space):
        with pytest.raises(WorkloadError, match="custom"):
            refused()


@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (4,), (4, 2, 1), ()])
def test_apply_refuses_rows_of_another_shape(shape):
    """A stream of another length belongs to another workload."""
    for w in (prefix_sum(4), custom(np.eye(4))):
        with pytest.raises(WorkloadError, match="shape"):
            w.apply(np.ones(shape))


@st.composite
def workloads(draw, largest=12):
    """Any structured workload of a few steps."""
    n = draw(st.integers(1, largest))
    rates = draw(st.lists(st.floats(1e-3, 1), min_size=n, max_size=n))
    options = {
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.9])),
        "weight_decay_kind": draw(st.sampled_from(["coupled", "decoupled"])),
        "ema": draw(st.sampled_from([0.0, 0.5, 0.99])),
    }
    return momentum(n, beta=draw(st.sampled_from([0.0, 0.5, 0.9, 0.99])), learning_rates=rates, **options)


@given(w=workloads())
@settings(deadline=None, max_examples=80)
def test_bands_and_optimizer_agree_everywhere(w, simulated):
    """Both shapes of any workload describe one matrix: L (A z) = z."""
    hi, _ = w.inverse_bands()
    L = sum(np.diag(band[k:], -k) if k < w.n else 0 for k, band in enumerate(hi))
    A = simulated(w)
    size = np.abs(L) @ np.abs(A) + 1e-300
    assert (np.abs(L @ A - np.eye(w.n)) <= 1e-13 * size).all()
    np.testing.assert_allclose(w.dense(), A, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("factor", [1e-40, 1e-3, 7.0, 1e40])
@pytest.mark.parametrize("method", ["structured", "dense"])
def test_unit_of_the_learning_rate_does_not_matter(factor, method):
    """Scaling eta by one constant leaves C alone (an absolute stopping rule once returned C = I at rate .01)."""
    rates = schedule.parse("cooldown", 16).rates
    options = compiler.Options(strategy="dense", method=method)
    plain = compiler.compile(momentum(16, learning_rates=rates), options)
    scaled = compiler.compile(momentum(16, learning_rates=rates * factor), options)
    np.testing.assert_allclose(scaled.strategy.to_dense(), plain.strategy.to_dense(), atol=1e-9)
    assert scaled.certificate.loss / factor**2 == pytest.approx(plain.certificate.loss, rel=1e-9)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [prefix_sum, sgd, momentum])
@pytest.mark.parametrize("n", [0, -1, True, False, 2.5, 3.0, "3", None, math.nan])
def test_horizons_that_are_not_a_number_of_steps(build, n):
    """Zero, negative, a truth value, fractions, words."""
    with pytest.raises(WorkloadError, match="whole number of steps"):
        build(n)


@pytest.mark.parametrize("build", [prefix_sum, sgd, momentum])
@pytest.mark.parametrize("n", [LARGEST_STRUCTURED + 1, 10**12, 10**30])
def test_horizons_too_large_are_refused_before_allocating(build, n):
    """A slip of the finger must not take the machine down."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(CapacityError, match=str(n)):
            build(n)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - begin < 1


def test_dense_form_of_a_long_horizon_is_refused_before_allocating():
    """dense() of a million steps would be 8 TB."""
    w = prefix_sum(10**6)
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError, match="1000000"):
            w.dense()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("n", [LARGEST_DENSE + 1, 200_000])
def test_custom_matrix_too_large_is_refused_before_copying(n):
    """A view that claims n x n entries without holding them: any copy would show."""
    giant = np.broadcast_to(np.float64(1), (n, n))
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError, match=str(LARGEST_DENSE)):
            custom(giant)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def _with(value, row, column):
    A = np.tril(np.ones((4, 4)))
    A[row, column] = value
    return A


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((2, 3)), "square"),
        (np.ones((3, 2)), "square"),
        (np.ones(4), "square"),
        (np.ones((2, 2, 2)), "square"),
        (5.0, "square"),
        ([], "square"),
        ([[]], "square"),
        (np.zeros((0, 0)), "square"),
        (np.ones((3, 3)), "row 0, column 1.*lower-triangular"),
        (np.triu(np.ones((3, 3))), "row 0, column 1.*lower-triangular"),
        (_with(1e-300, 1, 3), "row 1, column 3"),
        (_with(0, 2, 2), r"zero on its diagonal at step 2\b"),
        (np.zeros((3, 3)), r"zero on its diagonal at step 0\b"),
        ([[1, 0], [1, 1e-20]], "singular"),
        ([[1, 0], [1e20, 1]], "singular"),
        (np.eye(300) - np.tri(300, k=-1), "singular"),  # entries of size 1, condition 2^298
        (_with(math.nan, 3, 1), "nan at row 3, column 1"),
        (_with(math.nan, 1, 1), "nan at row 1, column 1"),
        (_with(math.nan, 0, 3), "nan at row 0, column 3"),
        (_with(math.inf, 3, 1), "inf at row 3, column 1"),
        (_with(-math.inf, 2, 2), "inf at row 2, column 2"),
        (np.eye(2, dtype=object), "object"),
        (np.eye(2, dtype=complex), "complex"),
        (np.eye(2, dtype=bool), "bool"),
        ([["1", "0"], ["1", "1"]], "real numbers"),
        (np.array([[b"1"]]), "real numbers"),
        ("matrix.npy", "real numbers"),
        (None, "real numbers"),
        ({"A": [[1.0]]}, "real numbers"),
        (np.array([["2020-01-01"]], dtype="datetime64[D]"), "real numbers"),
        ([[1], [1, 2]], "matrix"),
    ],
)
def test_custom_refuses(matrix, message):
    """Every matrix that is no workload, with the place or the rule in the message."""
    with pytest.raises(WorkloadError, match=message):
        custom(matrix)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint16, np.int64, ">f8", np.longdouble])
def test_custom_takes_any_real_dtype(dtype):
    """Integers and other floats are numbers too, in either byte order and memory layout."""
    A = np.tril(np.arange(1, 17).reshape(4, 4))
    for layout in (A.astype(dtype), np.asfortranarray(A.astype(dtype)), A.astype(dtype).T.copy().T):
        w = custom(layout)
        assert w.dense().dtype == np.float64
        np.testing.assert_array_equal(w.dense(), A)


def test_custom_takes_any_sign_and_scale():
    """Negative diagonals and tiny or huge units are fine; only the condition counts."""
    for A in ([[-1.0]], [[1e-50]], [[1e50]], 1e-50 * np.tri(5), -1e50 * np.tri(5)):
        np.testing.assert_array_equal(custom(A).dense(), A)
    for scale in (1e-200, 1e200):  # whose loss no float could hold
        with pytest.raises(WorkloadError, match="scale"):
            custom(scale * np.tri(5))


BAD_PARAMETERS = [
    ({"beta": 1.0}, "beta"),
    ({"beta": -0.1}, "beta"),
    ({"beta": math.nan}, "beta"),
    ({"beta": math.inf}, "beta"),
    ({"weight_decay": -1e-4}, "weight decay"),
    ({"weight_decay": math.nan}, "weight decay"),
    ({"weight_decay": math.inf}, "weight decay"),
    ({"weight_decay_kind": "l2"}, "weight decay kind"),
    ({"weight_decay_kind": None}, "weight decay kind"),
    ({"ema": 1.0}, "ema"),
    ({"ema": -0.5}, "ema"),
    ({"ema": math.nan}, "ema"),
]


@pytest.mark.parametrize(("options", "named"), BAD_PARAMETERS)
def test_parameters_out_of_range_are_named(options, named):
    """NaN included, which every comparison lets through that is written the wrong way round."""
    with pytest.raises(WorkloadError, match=named):
        momentum(4, **options)


@pytest.mark.parametrize("kind", ["coupled", "decoupled"])
def test_weight_decay_that_throws_the_iterate_away_names_the_step(kind):
    """eta lambda >= 1 is a slip in the unit of the rates, not a workload."""
    with pytest.raises(WorkloadError, match=r"step 2\b"):
        sgd(4, learning_rates=[0.1, 0.5, 1.0, 0.2], weight_decay=1.0, weight_decay_kind=kind)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5},
        {"weight_decay": 0.1},
        {"ema": 0.5},
        {"learning_rates": [1.0, 0.5, 0.25]},
    ],
)
@pytest.mark.parametrize("kind", ["prefix-sum", "custom"])
def test_parameters_that_do_not_apply_are_refused(kind, options):
    """Ignoring --beta or a schedule would compile another workload than the user described."""
    arguments = {"learning_rates": np.ones(3), "matrix": np.eye(3) if kind == "custom" else None, **options}
    with pytest.raises(WorkloadError, match=next(iter(options)).replace("_", " ")):
        Workload(kind, 3, **arguments)


def test_sgd_refuses_momentum():
    """sgd with a beta is the user meaning momentum."""
    with pytest.raises(WorkloadError, match="beta"):
        sgd(3, beta=0.9)


def test_kinds_and_matrices_belong_together():
    """Unknown kinds, a matrix with sgd, custom without one."""
    for arguments in (
        ("nesterov", 3, np.ones(3)),
        ("sgd", 3, np.ones(3), "constant", 0.0, 0.0, "coupled", 0.0, np.eye(3)),
        ("custom", 3, np.ones(3)),
    ):
        with pytest.raises(WorkloadError):
            Workload(*arguments)


def test_custom_matrix_of_another_size_than_n():
    """n and the matrix must agree, or every later figure is about something else."""
    with pytest.raises(WorkloadError):
        Workload("custom", 4, np.ones(4), matrix=np.eye(3))


def test_schedule_of_another_horizon():
    """A schedule made for n = 8 does not fit n = 9."""
    with pytest.raises(WorkloadError, match="n = 9"):
        momentum(9, learning_rates=schedule.parse("cooldown", 8))


# --- names ------------------------------------------------------------------------------------------------------


def test_labels_spell_every_parameter_that_is_not_the_default():
    """The label is the default ref: short for defaults, complete otherwise."""
    assert prefix_sum(512).label() == "prefix-sum-n512"
    assert sgd(8).label() == "sgd-n8"
    assert momentum(8).label() == "momentum-n8"
    full = momentum(
        8,
        beta=0.95,
        learning_rates=schedule.parse("cooldown:peak=0.1", 8),
        weight_decay=5e-4,
        weight_decay_kind="decoupled",
        ema=0.99,
    ).label()
    for part in ("momentum", "n8", "0.95", "cooldown", "peak0.1", "0.0005", "decoupled", "0.99"):
        assert part in full


def test_labels_of_different_workloads_differ(random_triangle):
    """Two workloads under one ref would overwrite or impersonate each other."""
    rates, triangle = _rates(8), random_triangle(0, 8)
    other = triangle.copy()
    other[5, 2] = np.nextafter(other[5, 2], 9)
    several = [
        prefix_sum(8),
        prefix_sum(9),
        sgd(8),
        sgd(8, learning_rates=rates),
        sgd(8, learning_rates=rates[::-1]),
        sgd(8, learning_rates=schedule.parse("cooldown", 8)),
        sgd(8, learning_rates=schedule.parse("decay", 8)),
        sgd(8, learning_rates=schedule.parse("cooldown:final=0.1", 8)),
        sgd(8, learning_rates=schedule.parse("cooldown:peak=0.1", 8)),
        sgd(8, weight_decay=0.1),
        sgd(8, ema=0.1),
        momentum(8),
        momentum(8, beta=0.0),
        momentum(8, beta=0.5),
        momentum(8, beta=np.nextafter(0.9, 1)),
        momentum(8, weight_decay=0.1),
        momentum(8, weight_decay=0.1, weight_decay_kind="decoupled"),
        momentum(8, weight_decay=0.2),
        momentum(8, ema=0.1),
        momentum(8, weight_decay=0.1, ema=0.1),
        momentum(8, learning_rates=rates),
        custom(triangle),
        custom(other),
        custom(np.eye(8)),
    ]
    labels = [w.label() for w in several]
    assert len(set(labels)) == len(labels)
    for label in labels:
        assert "/" not in label
        assert " " not in label
    for i, one in enumerate(several):
        for j, another in enumerate(several):
            assert one.same_as(another) == (i == j)


def test_labels_do_not_depend_on_the_numeric_type():
    """A numpy scalar is the same number: beta from an array must not give another ref."""
    one = momentum(8, beta=0.95, weight_decay=0.25, ema=0.5)
    other = momentum(np.int64(8), beta=np.float64(0.95), weight_decay=np.float64(0.25), ema=np.float64(0.5))
    assert other.label() == one.label()
    assert other.same_as(one)


def test_spec_is_json():
    """The spec goes into the artifact as JSON, whatever integers and floats the caller had."""
    for w in (momentum(8, ema=0.5), custom(np.eye(2)), prefix_sum(np.int64(8)), momentum(8, beta=np.float64(0.5))):
        assert json.loads(json.dumps(w.spec())) == w.spec()


def test_rebuilt_workload_is_the_same():
    """Spec and rates are all there is to a structured workload."""
    w = momentum(8, beta=0.5, learning_rates=schedule.parse("cosine:peak=0.1", 8), weight_decay=0.1, ema=0.3)
    again = Workload(learning_rates=w.learning_rates, **w.spec())
    assert again.same_as(w)
    np.testing.assert_array_equal(again.dense(), w.dense())


def test_workloads_cannot_be_changed():
    """A workload is a value: its certificate is about what it was built from."""
    rates = _rates(4)
    w = sgd(4, learning_rates=rates)
    rates[:] = 9
    assert w.learning_rates.max() < 1
    with pytest.raises(ValueError, match="read-only"):
        w.learning_rates[0] = 2
    with pytest.raises(ValueError, match="read-only"):
        custom(np.eye(2)).matrix[0, 0] = 2
    with pytest.raises(AttributeError):
        w.beta = 0.5


def test_equal_matrices_are_one_workload():
    """The label of a custom workload follows its values, whatever container they came in."""
    A = np.tri(5)
    assert custom(A).label() == custom(A.tolist()).label() == custom(A.astype(np.float32)).label()
    assert custom(A).same_as(custom(A.tolist()))


def test_workload_module_knows_its_defaults():
    """What `momentum` stands for when nothing is said: beta = .9, no decay, no average."""
    w = momentum(3)
    assert (w.beta, w.weight_decay, w.ema, w.schedule) == (0.9, 0.0, 0.0, "constant")
    assert workload.DEFAULT_BETA == 0.9


@kinds
def test_own_unit(kind):
    """A / unit for a power of two near its largest step: exactly the same matrix, decay included, at a size near 1."""
    w = every_kind(7)[kind]
    options = {"beta": w.beta, "weight_decay": w.weight_decay * 2**40, "weight_decay_kind": w.weight_decay_kind}
    tiny = Workload(w.kind, 7, w.learning_rates / 2**40, ema=w.ema, **options) if kind != "prefix" else w
    for original in (w, tiny):
        unit, scaled = original.in_own_unit()
        assert math.log2(unit) == round(math.log2(unit))
        np.testing.assert_array_equal(unit * scaled.dense(), original.dense())
        assert 0.5 <= scaled.learning_rates.max() <= 2


def test_own_unit_of_a_matrix():
    """The same for custom matrices, by their largest entry."""
    A = 1e-50 * (np.tri(5) + np.diag([0, 1, 2, 3, 4]))
    unit, scaled = custom(A).in_own_unit()
    np.testing.assert_array_equal(unit * scaled.dense(), A)
    assert 0.5 <= np.abs(scaled.dense()).max() <= 2
