"""The dense strategy: C the right way round, and figures of exactly the coefficients that are shipped."""

import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.construct.dense import build
from mmfact.factorize.errors import CapacityError, SolverError, WorkloadError
from mmfact.factorize.optimum import solve
from mmfact.factorize.participation import Participation, single
from mmfact.factorize.strategy.dense import DenseStrategy, lower_triangular, lower_triangular_pair
from mmfact.factorize.workload import momentum, prefix_sum, sgd

methods = pytest.mark.parametrize("method", ["structured", "dense"])


def tree(n):
    """The binary-tree matrix: one row for each dyadic interval of 0..n-1, n a power of 2."""
    rows, width = [], 1
    while width <= n:
        for start in range(0, n, width):
            rows.append([1.0 if start <= j < start + width else 0.0 for j in range(n)])
        width *= 2
    return np.array(rows)


def optimal_x(A, v):
    """X = D^(-1/2) (D^(1/2) A'A D^(1/2))^(1/2) D^(-1/2) at the scale of unit diagonal, by a matrix square root."""
    root = np.sqrt(v)
    S = np.real(scipy.linalg.sqrtm((A * root).T @ (A * root)))
    X = S / np.outer(root, root)
    scale = np.sqrt(np.diag(X))
    return X / np.outer(scale, scale)


# --- orientation ------------------------------------------------------------------------------------------------


@methods
@pytest.mark.parametrize(
    "w",
    [prefix_sum(16), momentum(12), sgd(20, learning_rates=schedule.parse("cooldown", 20))],
    ids=lambda w: w.kind,
)
def test_orientation(w, method):
    """C lower-triangular with C'C = X, not C C' = X: a public library has it the wrong way round."""
    found = compile(w, Options(strategy="dense", method=method))
    C = found.strategy.to_dense()
    assert not np.triu(C, 1).any()
    assert (np.diag(C) > 0).all()
    X = optimal_x(w.dense(), found.optimum.multipliers)
    np.testing.assert_allclose(C.T @ C, X, atol=1e-7)
    # the trap: a plain Cholesky factor has other column norms, and its sensitivity is not 1
    wrong = np.linalg.cholesky(X)
    assert np.abs(C @ C.T - X).max() > 1e-2
    assert np.linalg.norm(wrong, axis=0).max() > 1.05


@methods
def test_figures_are_those_of_c(method, simulated):
    """Sensitivity, loss and max error by numpy.linalg.inv of C and a simulated optimizer, to 1e-12."""
    w = momentum(24, learning_rates=schedule.parse("cooldown:peak=0.1", 24), weight_decay=0.1)
    strategy = compile(w, Options(strategy="dense", method=method)).strategy
    C = strategy.to_dense()
    B = simulated(w) @ np.linalg.inv(C)
    sensitivity = np.linalg.norm(C, axis=0).max()
    assert strategy.sensitivity(single()) == pytest.approx(sensitivity, rel=1e-13)
    assert strategy.loss(w, single()) == pytest.approx(sensitivity**2 * (B**2).sum(), rel=1e-12)
    assert strategy.max_error(w, single()) == pytest.approx(sensitivity * np.linalg.norm(B, axis=1).max(), rel=1e-12)
    np.testing.assert_allclose(strategy.decoder(w), B, atol=1e-13)
    np.testing.assert_allclose(strategy.noising(), np.linalg.inv(C), atol=1e-12)


@methods
def test_shipped_columns_are_normalised(method):
    """Every column of the optimum has norm 1, so every step is protected by all of the noise."""
    norms = compile(momentum(40), Options(strategy="dense", method=method)).strategy.column_norms()
    np.testing.assert_allclose(norms, 1, rtol=1e-13)


def test_normalising_far_from_the_optimum_is_not_forced():
    """Multipliers of a solve stopped early: whichever of the two forms has the smaller loss is shipped."""
    w = momentum(32, beta=0.95)
    early = solve(w, method="fixed-point", tolerance=0.5)
    assert early.residual > 1e-3
    shipped = build(w, early, single())
    v = early.multipliers
    M = w.dense() * np.sqrt(v)
    _, sigma, Vt = np.linalg.svd(M)
    C = np.sqrt(sigma)[:, None] * Vt / np.sqrt(v)
    losses = []
    for candidate in (C / np.linalg.norm(C, axis=0), C / np.linalg.norm(C, axis=0).max()):
        B = w.dense() @ np.linalg.inv(candidate)
        losses.append(np.linalg.norm(candidate, axis=0).max() ** 2 * (B**2).sum())
    assert shipped.loss(w, single()) == pytest.approx(min(losses), rel=1e-9)


# --- exact figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@methods
@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(1),
        prefix_sum(7),
        momentum(6),
        momentum(7, beta=0.5, learning_rates=np.linspace(1, 0.1, 7), weight_decay=0.25),
        sgd(7, learning_rates=np.linspace(0.3, 0.1, 7), ema=0.5),
    ],
    ids=lambda w: f"{w.kind}{w.n}",
)
def test_figures_of_the_cast_coefficients_are_rounded_up(w, method, dtype, exact_matrix, exact_figures):
    """In exact arithmetic on the stored numbers: nothing is understated, nothing overstated by more than 1e-12."""
    found = compile(w, Options(strategy="dense", method=method, dtype=dtype))
    assert found.strategy.dtype == dtype
    sensitivity2, frobenius2, row2 = exact_figures(exact_matrix(w), found.strategy.to_dense())
    certificate = found.certificate
    for figure, truth in (
        (certificate.sensitivity, math.sqrt(sensitivity2)),
        (certificate.loss, float(sensitivity2 * frobenius2)),
        (certificate.max_error, math.sqrt(sensitivity2 * row2)),
    ):
        assert truth * (1 - 1e-16) <= figure <= truth * (1 + 1e-12)
    assert certificate.lower_bound <= float(sensitivity2 * frobenius2)


def test_float32_sensitivity_is_not_assumed_to_be_one():
    """After the cast a column norm is 1 + 1e-8 or so; the figure follows the cast numbers."""
    strategy = compile(prefix_sum(64), Options(strategy="dense", dtype="float32")).strategy
    norms = np.sqrt((strategy.to_dense() ** 2).sum(axis=0))
    assert norms.max() > 1 + 1e-9
    assert norms.max() <= strategy.sensitivity(single()) <= norms.max() * (1 + 1e-12)


@pytest.mark.parametrize("scale", [1e-170, 1e-200, 1e170])
def test_sensitivity_of_tiny_and_huge_coefficients(scale):
    """A sensitivity of 0 or infinity for C = 1e-200 would mean no noise at all, or none that is finite."""
    with pytest.raises(SolverError, match="normalise"):
        DenseStrategy.from_matrix(scale * np.tri(3))


@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_column_norms_are_rounded_up(n):
    """Never below the norm by math.fsum of exact squares."""
    C = np.tril(np.random.default_rng(n).uniform(0.1, 1, (n, n)))
    strategy = DenseStrategy.from_matrix(C)
    exact = np.array([math.sqrt(math.fsum(x * x for x in column)) for column in C.T])
    assert (strategy.column_norms() >= exact).all()
    np.testing.assert_allclose(strategy.column_norms(), exact, rtol=1e-12)
    assert strategy.sensitivity(single()) == strategy.column_norms().max()


# --- storage ----------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 12), seed=st.integers(0, 10**6), dtype=st.sampled_from(["float32", "float64"]))
@settings(deadline=None, max_examples=60)
def test_packed_round_trip(n, seed, dtype):
    """Row by row into a packed triangle and back, bit for bit; row i starts at i (i+1) / 2."""
    C = np.tril(np.random.default_rng(seed).normal(size=(n, n)))
    np.fill_diagonal(C, np.abs(np.diag(C)) + 0.1)
    C = C.astype(dtype)
    strategy = DenseStrategy.from_matrix(C, dtype)
    assert strategy.n == n
    assert strategy.buffers == n
    assert strategy.dtype == dtype
    np.testing.assert_array_equal(strategy.to_dense(), C)
    for i in range(n):
        np.testing.assert_array_equal(strategy.packed[i * (i + 1) // 2 : (i + 1) * (i + 2) // 2], C[i, : i + 1])
    again = DenseStrategy(strategy.coefficients()["packed"].copy())
    np.testing.assert_array_equal(again.to_dense(), strategy.to_dense())


def test_coefficients_cannot_be_changed():
    """The certificate is about these numbers."""
    strategy = DenseStrategy.from_matrix(np.tri(3))
    with pytest.raises(ValueError, match="read-only"):
        strategy.packed[0] = 2
    strategy.to_dense()[0, 0] = 7
    assert strategy.to_dense()[0, 0] == 1


@pytest.mark.parametrize(
    ("packed", "error"),
    [
        (np.ones(0), SolverError),
        (np.ones(2), SolverError),
        (np.ones(5), SolverError),
        (np.ones((1, 1)), SolverError),
        (np.array([1.0, math.nan, 1.0]), SolverError),
        (np.array([1.0, math.inf, 1.0]), SolverError),
        (np.array([0.0]), SolverError),
        (np.array([1.0, 0.5, 0.0]), SolverError),
        (np.array([1.0, 0.5, -1.0]), SolverError),
        (np.ones(3, dtype=np.float16), SolverError),
        (np.ones(3, dtype=int), SolverError),
        (np.ones(3, dtype=complex), SolverError),
    ],
)
def test_bad_packed_triangles(packed, error):
    """Lengths that are no triangle, numbers that are none, diagonals that could not be divided by, other dtypes."""
    with pytest.raises(error):
        DenseStrategy(packed)


@pytest.mark.parametrize("C", [np.ones((2, 3)), np.ones((2, 2)), np.ones(3), np.triu(np.ones((3, 3)))])
def test_bad_matrices(C):
    """Not square, not lower-triangular: C' passed for C would be one of these."""
    with pytest.raises(WorkloadError, match="lower"):
        DenseStrategy.from_matrix(C)


def test_too_large_to_be_dense():
    """A packed triangle of 8193 steps, as a view that takes no memory."""
    with pytest.raises(CapacityError):
        DenseStrategy(np.broadcast_to(np.float64(1), 8193 * 8194 // 2))


def test_strategies_belong_to_their_horizon():
    """A strategy of 3 steps says nothing about a workload of 4."""
    strategy = DenseStrategy.from_matrix(np.tri(3))
    with pytest.raises(WorkloadError, match=r"3 steps.*4"):
        strategy.loss(prefix_sum(4), single())


def test_singular_to_working_precision():
    """An inverse that overflows is refused, not streamed."""
    strategy = DenseStrategy.from_matrix(np.eye(9) * 1e-60 + np.tri(9, k=-1))
    with pytest.raises(SolverError, match="singular"):
        strategy.noising()


def test_unknown_participation():
    """Only single participation in this version, so that no sensitivity is silently the wrong one."""
    with pytest.raises(WorkloadError, match="single"):
        Participation("cyclic")
    assert single().sensitivity(np.array([0.5, 2.0, 1.0])) == 2.0


# --- other factors ----------------------------------------------------------------------------------------------

FACTORS = {
    "random tall": np.random.default_rng(0).normal(size=(13, 8)),
    "random square": np.random.default_rng(1).normal(size=(8, 8)),
    "upper-triangular": np.triu(np.random.default_rng(2).uniform(0.5, 1, (8, 8))),
    "tree": tree(8),
    "one column": np.array([[3.0], [-4.0]]),
}
factors = pytest.mark.parametrize("name", list(FACTORS))


@factors
def test_lower_triangular_keeps_c_transposed_c(name):
    """QL: C'C and with it every column norm and the best decoder's loss stay; an LQ would keep C C' instead."""
    C = FACTORS[name]
    n = C.shape[1]
    C_hat = lower_triangular(C)
    assert C_hat.shape == (n, n)
    assert not np.triu(C_hat, 1).any()
    assert (np.diag(C_hat) > 0).all()
    np.testing.assert_allclose(C_hat.T @ C_hat, C.T @ C, atol=1e-13 * (C**2).sum())
    w = prefix_sum(n)
    loss = (np.linalg.norm(C, axis=0).max() ** 2) * ((w.dense() @ np.linalg.pinv(C)) ** 2).sum()
    assert DenseStrategy.from_matrix(C_hat).loss(w, single()) == pytest.approx(loss, rel=1e-10)


def test_lq_of_c_would_understate_the_sensitivity():
    """The wrong factorization has other column norms for the tree: the test above can tell."""
    C = FACTORS["random square"]
    wrong = scipy.linalg.qr(C.T)[1].T
    assert abs(np.linalg.norm(wrong, axis=0).max() - np.linalg.norm(C, axis=0).max()) > 0.05
    right = lower_triangular(C)
    assert np.linalg.norm(right, axis=0).max() == pytest.approx(np.linalg.norm(C, axis=0).max(), rel=1e-13)


@factors
@pytest.mark.parametrize("stray", [0.0, 0.7])
def test_lower_triangular_pair(name, stray):
    """LQ of B: B C = A and the loss of B stay, no column of C grows; also where B is not the best decoder of C."""
    C = FACTORS[name]
    m, n = C.shape
    A = momentum(n).dense()
    outside = np.eye(m) - C @ np.linalg.pinv(C)
    B = A @ np.linalg.pinv(C) + stray * np.random.default_rng(5).normal(size=(n, m)) @ outside
    B_hat, C_hat = lower_triangular_pair(B, C)
    for part in (B_hat, C_hat):
        assert part.shape == (n, n)
        assert not np.triu(part, 1).any()
        assert (np.diag(part) > 0).all()
    np.testing.assert_allclose(B_hat @ C_hat, A, atol=1e-11 * np.abs(A).max())
    assert np.linalg.norm(B_hat) == pytest.approx(np.linalg.norm(B), rel=1e-12)
    before, after = np.linalg.norm(C, axis=0), np.linalg.norm(C_hat, axis=0)
    assert (after <= before * (1 + 1e-12)).all()
    strategy = DenseStrategy.from_matrix(C_hat)
    np.testing.assert_allclose(strategy.decoder(momentum(n)), B_hat, atol=1e-9 * np.abs(B_hat).max())
    assert strategy.loss(momentum(n), single()) <= before.max() ** 2 * (B**2).sum() * (1 + 1e-10)


@pytest.mark.parametrize("n", [16, 64])
def test_full_honaker_tree(n, goldens):
    """Prefix sums on the binary tree with the best decoder: the golden loss, by arrays and by the strategy."""
    truth = goldens["baselines_prefix_sum"][str(n)]["honaker-full"]
    H = tree(n)
    B = np.tri(n) @ np.linalg.pinv(H)
    assert np.linalg.norm(H, axis=0) ** 2 == pytest.approx(np.full(n, math.log2(n) + 1))
    assert (math.log2(n) + 1) * (B**2).sum() == pytest.approx(truth, rel=1e-9)
    by_ql = DenseStrategy.from_matrix(lower_triangular(H))
    _, by_lq = lower_triangular_pair(B, H)
    for strategy in (by_ql, DenseStrategy.from_matrix(by_lq)):
        assert strategy.loss(prefix_sum(n), single()) == pytest.approx(truth, rel=1e-9)
        assert strategy.sensitivity(single()) ** 2 == pytest.approx(math.log2(n) + 1, rel=1e-11)


@pytest.mark.parametrize("n", ["16", "64"])
def test_other_baselines(n, goldens):
    """Identity and square-root Toeplitz, plain and with normalised columns, have their exact golden losses."""
    row = goldens["baselines_prefix_sum"][n]
    n = int(n)
    c = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, n)]))
    toeplitz = scipy.linalg.toeplitz(c, np.zeros(n))
    for name, C in (
        ("identity", np.eye(n)),
        ("sqrt-toeplitz", toeplitz),
        ("sqrt-toeplitz, columns normalised", toeplitz / np.linalg.norm(toeplitz, axis=0)),
    ):
        loss = DenseStrategy.from_matrix(C).loss(prefix_sum(n), single())
        assert loss == pytest.approx(row[name], rel=1e-9)
        assert loss >= solve(prefix_sum(n)).lower_bound


@pytest.mark.parametrize(
    "C",
    [
        np.ones((2, 3)),
        np.ones(3),
        np.zeros((0, 0)),
        np.ones((3, 2)),
        np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]),
        np.array([[1.0, math.nan], [0.0, 1.0]]),
        np.array([[math.inf, 0.0], [0.0, 1.0]]),
        np.zeros((3, 2)),
    ],
)
def test_lower_triangular_refuses(C):
    """More columns than rows, dependent columns, numbers that are none."""
    with pytest.raises(WorkloadError):
        lower_triangular(C)


@pytest.mark.parametrize(
    ("B", "C"),
    [
        (np.eye(3), np.eye(2)),
        (np.ones((3, 2)), np.ones((2, 3))),
        (np.ones((2, 3)), np.ones((2, 3))),
        (np.ones(3), np.ones(3)),
        (np.array([[1.0, 0.0], [2.0, 0.0]]), np.eye(2)),
        (np.eye(2), np.array([[1.0, 1.0], [0.0, 1.0]])),
        (np.array([[math.nan, 0.0], [0.0, 1.0]]), np.eye(2)),
        (np.eye(2), np.array([[1.0, 0.0], [math.inf, 1.0]])),
    ],
)
def test_lower_triangular_pair_refuses(B, C):
    """Shapes that do not meet, a B without full row rank, a product that is not lower-triangular."""
    with pytest.raises(WorkloadError):
        lower_triangular_pair(B, C)


# --- streaming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_streaming_rows(dtype):
    """The runtime streams C^-1, or A C^-1 for a given A, at a sensitivity at or just above that of C."""
    w = momentum(24, learning_rates=schedule.parse("cooldown", 24))
    strategy = compile(w, Options(strategy="dense", dtype=dtype)).strategy
    C, A = strategy.to_dense(), w.dense()
    inverse = np.linalg.inv(C)
    sensitivity = np.linalg.norm(C, axis=0).max()
    for found, expected in (
        (strategy.streaming(single()), inverse),
        (strategy.streaming(single(), A), A @ inverse),
    ):
        np.testing.assert_allclose(found.rows, expected, atol=1e-12 * np.abs(expected).max())
        assert not np.triu(found.rows, 1).any()
        assert sensitivity <= found.sensitivity <= sensitivity * (1 + 1e-6)


def test_streaming_sensitivity_covers_the_rounded_rows():
    """What float64 rows really stream is their own inverse: at 60 digits its column norms are within the figure."""
    rates = 10 ** np.random.default_rng(3).uniform(-3, 0, 24)
    w = momentum(24, beta=0.99, learning_rates=rates)
    strategy = compile(w, Options(strategy="dense")).strategy
    for A in (None, w.dense()):
        found = strategy.streaming(single(), A)
        with mpmath.workdps(60):
            streamed = mpmath.matrix(found.rows.tolist()) ** -1
            if A is not None:
                streamed = streamed * mpmath.matrix(A.tolist())
            norms = [mpmath.sqrt(mpmath.fsum(streamed[i, j] ** 2 for i in range(24))) for j in range(24)]
            assert max(norms) <= found.sensitivity


def test_streaming_refuses_what_it_cannot_answer_for():
    """A C whose inverse has no correct digits is not streamed with a sensitivity that hopes for the best."""
    n = 60
    strategy = DenseStrategy.from_matrix(np.eye(n) - np.tri(n, k=-1))  # the inverse grows as 2^n
    with pytest.raises(SolverError, match="ill-conditioned"):
        strategy.streaming(single())
