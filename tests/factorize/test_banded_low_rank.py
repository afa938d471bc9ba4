"""The banded + low-rank strategy: B_hat is what is streamed, and every figure is that of C_hat = B_hat^-1 A."""

import time
from fractions import Fraction

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.certificate import certify
from mmfact.factorize.construct import dense
from mmfact.factorize.construct.banded_low_rank import _equalised, _least, build, check_pair, fit
from mmfact.factorize.errors import CapacityError, SolverError, WorkloadError
from mmfact.factorize.optimum import solve
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy, assemble, bands_of
from mmfact.factorize.workload import Workload, custom, momentum, prefix_sum, sgd

WORKLOADS = {
    "prefix-sum": lambda n: prefix_sum(n),
    "momentum": lambda n: momentum(n),
    "cooldown": lambda n: momentum(n, learning_rates=schedule.parse("cooldown:peak=0.1", n), weight_decay=0.1),
    "decoupled": lambda n: sgd(
        n, learning_rates=schedule.parse("cosine:peak=0.3", n), weight_decay=0.2, weight_decay_kind="decoupled"
    ),
    "ema": lambda n: momentum(n, beta=0.5, learning_rates=np.linspace(1, 0.2, n), ema=0.8),
    "custom": lambda n: custom(random_matrix(n)),
}
workloads = pytest.mark.parametrize("name", WORKLOADS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def random_matrix(n):
    """Prefix sums disturbed, with diagonal entries of either sign."""
    rng = np.random.default_rng(n)
    A = np.tri(n) * rng.uniform(0.8, 1.2, (n, n))
    return A * rng.choice([-1.0, 1.0], n)[:, None]


def random_strategy(n, bandwidth, rank, seed=0, workload=None, dtype="float64"):
    """Coefficients that approximate nothing."""
    rng = np.random.default_rng(seed)
    band = bands_of(np.tril(rng.normal(size=(n, n))) / np.sqrt(n), bandwidth)
    band[:, 0] = rng.uniform(0.5, 2, n)
    left, right = rng.normal(size=(2, n, rank)) / np.sqrt(n)
    left[:bandwidth] = 0
    right[n - bandwidth :] = 0
    return BandedLowRankStrategy(band.astype(dtype), left.astype(dtype), right.astype(dtype), workload or prefix_sum(n))


def naive_decoder(strategy):
    """B_hat entry by entry, from the definition."""
    n, K = strategy.n, strategy.bandwidth
    band, left, right = (array.astype(np.float64) for array in strategy.coefficients().values())
    B = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            B[i, j] = band[i, i - j] if i - j < K else left[i] @ right[j]
    return B


def streamed(strategy, Z):
    """(iterate rows, gradient rows) by the recursion of a runtime that keeps nothing but its buffers."""
    n, K, band, left, right = strategy.n, strategy.bandwidth, strategy.band, strategy.left, strategy.right
    L = strategy.workload.inverse_bands()[0]
    past, accumulators, iterates = [], np.zeros((strategy.rank, Z.shape[1])), []
    X, Y = [], []
    for t in range(n):
        x = band[t, 0] * Z[t] + left[t] @ accumulators
        for k, z in enumerate(reversed(past), start=1):
            x = x + band[t, k] * z
        past.append(Z[t])
        if len(past) == K:  # the oldest row leaves the band and enters the accumulators
            accumulators = accumulators + np.outer(right[t + 1 - K], past.pop(0))
        iterates.append(x)
        Y.append(sum(L[m, t] * iterates[-1 - m] for m in range(len(iterates))))
        X.append(x)
        if len(iterates) == len(L):
            iterates.pop(0)
        assert len(past) + len(accumulators) + len(iterates) <= strategy.buffers
    return np.array(X), np.array(Y)


_OPTIMA = {}


def optimum(name, n):
    """(workload, its optimum), solved once."""
    if (name, n) not in _OPTIMA:
        w = WORKLOADS[name](n)
        _OPTIMA[name, n] = w, solve(w)
    return _OPTIMA[name, n]


def excess(strategy, found):
    return strategy.loss(strategy.workload, single()) / found.lower_bound - 1


# --- the strategy -----------------------------------------------------------------------------------------------


@workloads
@dtypes
def test_decoder_times_strategy_is_the_workload(name, dtype, simulated):
    """B_hat C_hat = A, A by an optimizer run by hand."""
    w = WORKLOADS[name](40)
    strategy = random_strategy(40, 5, 3, workload=w, dtype=dtype)
    A = w.matrix if w.matrix is not None else simulated(w)
    B, C = strategy.dense_decoder(), strategy.to_dense()
    np.testing.assert_allclose(B, naive_decoder(strategy), atol=1e-14)
    assert not np.triu(C, 1).any()
    assert not np.triu(B, 1).any()
    np.testing.assert_allclose(B @ C, A, atol=1e-10 * np.abs(A).max())
    np.testing.assert_allclose(strategy.noising() @ C, np.eye(40), atol=1e-10)
    assert not np.triu(strategy.noising(), 1).any()


@workloads
@dtypes
def test_figures_are_those_of_dense_algebra(name, dtype, simulated):
    """Sensitivity, loss and max error of the cast coefficients, to 1e-9 and never below."""
    w, found = optimum(name, 48)
    strategy = build(w, found, single(), 4, 2, dtype=dtype)
    assert strategy.dtype == dtype
    A = w.matrix if w.matrix is not None else simulated(w)
    B = naive_decoder(strategy)
    sensitivity = np.linalg.norm(np.linalg.inv(B) @ A, axis=0).max()
    loss, max_error = strategy.errors(w, single())
    for figure, truth in (
        (strategy.sensitivity(single()), sensitivity),
        (loss, sensitivity**2 * (B**2).sum()),
        (max_error, sensitivity * np.linalg.norm(B, axis=1).max()),
        (strategy.loss(w, single()), loss),
        (strategy.max_error(w, single()), max_error),
    ):
        assert truth * (1 - 1e-13) <= figure <= truth * (1 + 1e-9)


@dtypes
@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(1),
        prefix_sum(6),
        momentum(7, beta=0.5, learning_rates=np.linspace(1, 0.1, 7), weight_decay=0.25),
        sgd(7, learning_rates=np.linspace(0.3, 0.1, 7), weight_decay=0.25, weight_decay_kind="decoupled", ema=0.3),
        momentum(9, beta=0.99, learning_rates=10 ** np.linspace(0, -3, 9)),
    ],
    ids=lambda w: f"{w.kind}{w.n}",
)
def test_figures_are_rounded_up(w, dtype, exact_matrix):
    """In exact arithmetic, and for both of the strategies that are streamed.

    Iterate space has C = B_hat^-1 A, gradient space the inverse of L B_hat, with L = A^-1 in float64.
    """
    n = w.n
    strategy = build(w, solve(w), single(), min(2, n), 1 if n > 2 else None, dtype=dtype)
    band, left, right = strategy.band, strategy.left, strategy.right
    fractions = [[Fraction(0)] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            pairs = zip(left[i], right[j], strict=True)
            fractions[i][j] = (
                Fraction(float(band[i, i - j]))
                if i - j < strategy.bandwidth
                else sum(Fraction(float(a)) * Fraction(float(b)) for a, b in pairs)
            )
    L = w.inverse_bands()[0]
    rounded = [
        [Fraction(float(L[i - j, i])) if 0 <= i - j < len(L) else Fraction(0) for j in range(n)] for i in range(n)
    ]

    def solved(T, rows):  # T^-1 rows
        out = [list(row) for row in rows]
        for i in range(n):
            for j in range(n):
                out[i][j] = (out[i][j] - sum(T[i][k] * out[k][j] for k in range(i))) / T[i][i]
        return out

    identity = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    squares = sum(x * x for row in fractions for x in row)
    for A in (exact_matrix(w), solved(rounded, identity)):
        C = solved(fractions, A)
        sensitivity2 = max(sum(C[i][j] ** 2 for i in range(n)) for j in range(n))
        figure = strategy.sensitivity(single())
        assert sensitivity2 <= Fraction(figure) ** 2
        assert figure <= float(sensitivity2) ** 0.5 * (1 + 1e-9)
        assert sensitivity2 * squares <= Fraction(strategy.loss(w, single()))


@pytest.mark.parametrize("seed", range(4))
def test_ill_conditioned_workloads_are_bounded(seed, hard_workload, exact_matrix):
    """Rates over three decades with beta .99: the exact sensitivity is never above the figure."""
    w = hard_workload(seed, 14, 0.99)
    strategy = random_strategy(14, 3, 2, seed, w)
    figure = strategy.sensitivity(single())
    B = [[Fraction(0)] * 14 for _ in range(14)]
    for i in range(14):
        for j in range(i + 1):
            pairs = zip(strategy.left[i], strategy.right[j], strict=True)
            B[i][j] = (
                Fraction(strategy.band[i, i - j]) if i - j < 3 else sum(Fraction(a) * Fraction(b) for a, b in pairs)
            )
    C = exact_matrix(w)
    for i in range(14):
        for j in range(14):
            C[i][j] = (C[i][j] - sum(B[i][k] * C[k][j] for k in range(i))) / B[i][i]
    assert max(sum(C[i][j] ** 2 for i in range(14)) for j in range(14)) <= Fraction(figure) ** 2


def test_an_uncertain_sensitivity_is_refused():
    """A decoder whose inverse grows tenfold a step: float64 proves nothing about it, or overflows."""
    for n in (120, 400):
        band = np.stack([np.full(n, 0.1), np.full(n, -1.0)], axis=1)
        band[0, 1] = 0
        strategy = BandedLowRankStrategy(band, np.zeros((n, 0)), np.zeros((n, 0)), custom(np.eye(n)))
        with pytest.raises(SolverError, match=r"uncertain|not finite|singular"):
            strategy.sensitivity(single())


def test_sensitivity_is_not_that_of_the_matrix_approximated():
    """The trap of this strategy: C has columns of norm 1, B_hat^-1 A has not."""
    w, found = optimum("prefix-sum", 64)
    C = dense.build(w, found, single()).to_dense()
    B = w.dense() @ np.linalg.inv(C)
    fitted = fit(B, 2, 1)
    strategy = BandedLowRankStrategy(bands_of(B, 2), np.array(fitted.left), np.array(fitted.right), w)
    truth = np.linalg.norm(np.linalg.inv(naive_decoder(strategy)) @ w.dense(), axis=0).max()
    assert np.linalg.norm(C, axis=0).max() == pytest.approx(1, abs=1e-12)
    assert truth > 1.02
    assert strategy.sensitivity(single()) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "custom"])
@pytest.mark.parametrize(("bandwidth", "rank"), [(1, 2), (1, 0), (4, 3), (29, 1), (30, 0)])
def test_streaming_is_the_decoder(name, bandwidth, rank):
    """The recursion with K - 1 rows, R accumulators and w iterate rows, on unit vectors."""
    strategy = random_strategy(30, bandwidth, rank, 1, WORKLOADS[name](30))
    X, Y = streamed(strategy, np.eye(30))
    np.testing.assert_allclose(X, strategy.dense_decoder(), atol=1e-13)
    scale = np.abs(strategy.noising()).max()
    np.testing.assert_allclose(Y, strategy.noising(), atol=1e-13 * scale)


@given(
    n=st.integers(1, 14),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(["float32", "float64"]),
    data=st.data(),
)
@settings(max_examples=60)
def test_random_strategies(n, seed, dtype, data):
    """Streaming, algebra and figures agree for any coefficients."""
    bandwidth = data.draw(st.integers(1, n))
    rank = data.draw(st.integers(0, min(3, n - bandwidth)))
    strategy = random_strategy(n, bandwidth, rank, seed, momentum(n, beta=0.7), dtype)
    B = naive_decoder(strategy)
    X, _ = streamed(strategy, np.eye(n))
    np.testing.assert_allclose(X, B, atol=1e-6 if dtype == "float32" else 1e-13)
    sensitivity = np.linalg.norm(np.linalg.inv(B) @ strategy.workload.dense(), axis=0).max()
    assert sensitivity * (1 - 1e-12) <= strategy.sensitivity(single()) <= sensitivity * (1 + 1e-9)
    assert strategy.loss(strategy.workload, single()) == pytest.approx(sensitivity**2 * (B**2).sum(), rel=1e-9)
    assert strategy.parameters() == {"bandwidth": bandwidth, "rank": rank}
    shapes = {name: array.shape for name, array in strategy.coefficients().items()}
    assert shapes == {"band": (n, bandwidth), "left": (n, rank), "right": (n, rank)}
    again = BandedLowRankStrategy(**strategy.coefficients(), workload=strategy.workload)
    np.testing.assert_array_equal(again.to_dense(), strategy.to_dense())


def test_another_workload():
    """The same mechanism under another optimizer: its decoder is the other A times C_hat^-1."""
    strategy = random_strategy(20, 3, 2, workload=prefix_sum(20))
    other = momentum(20)
    B = other.dense() @ np.linalg.inv(strategy.to_dense())
    np.testing.assert_allclose(strategy.decoder(other), B, atol=1e-10)
    s = strategy.sensitivity(single())
    loss, max_error = strategy.errors(other, single())
    assert loss == pytest.approx(s * s * (B**2).sum(), rel=1e-9)
    assert max_error == pytest.approx(s * np.linalg.norm(B, axis=1).max(), rel=1e-9)
    np.testing.assert_array_equal(strategy.decoder(prefix_sum(20)), strategy.dense_decoder())
    with pytest.raises(WorkloadError, match=r"20 steps.*21"):
        strategy.errors(prefix_sum(21), single())
    with pytest.raises(WorkloadError, match=r"20 steps.*21"):
        strategy.decoder(prefix_sum(21))


@pytest.mark.parametrize(
    ("w", "width"),
    [(prefix_sum(20), 1), (momentum(20), 2), (momentum(20, ema=0.5), 3), (custom(np.tri(20)), 19), (prefix_sum(1), 0)],
)
def test_what_a_step_takes(w: Workload, width):
    """K - 1 + R + w vectors and K + 2 R + w + 1 multiply-adds."""
    bandwidth, rank = (4, 3) if w.n > 1 else (1, 0)
    strategy = random_strategy(w.n, bandwidth, rank, workload=w)
    assert strategy.buffers == bandwidth - 1 + rank + width
    assert strategy.cost == bandwidth + 2 * rank + width + 1
    assert (strategy.kind, strategy.n, strategy.bandwidth, strategy.rank) == ("banded-low-rank", w.n, bandwidth, rank)


@workloads
def test_amplification_and_noise_range(name):
    """By their definitions, step by step."""
    w = WORKLOADS[name](25)
    strategy = random_strategy(25, 3, 2, 5, w)
    band, left, right = strategy.band, strategy.left, strategy.right
    sums = np.zeros(25)
    for t in range(25):
        accumulators = [np.linalg.norm(right[: max(t - 2, 0), k]) for k in range(2)]
        sums[t] = np.linalg.norm(band[t]) + np.abs(left[t]) @ accumulators
    iterate = (sums / np.linalg.norm(strategy.dense_decoder(), axis=1)).max()
    L = np.linalg.inv(w.dense())
    noising = L @ strategy.dense_decoder()
    gradient = (np.abs(L) @ sums / np.linalg.norm(noising, axis=1)).max()
    figures = strategy.amplifications()
    assert figures["iterate"] == pytest.approx(iterate, rel=1e-10)
    assert figures["gradient"] == pytest.approx(gradient, rel=1e-8)
    assert strategy.amplification() == max(figures.values()) >= 1
    low, high = strategy.noise_range()
    assert low == pytest.approx(np.abs(np.diag(noising)).min(), rel=1e-9)
    assert high == pytest.approx(np.linalg.norm(noising, axis=1).max(), rel=1e-9)


def test_coefficients_cannot_be_changed():
    """The certificate is about these numbers."""
    strategy = random_strategy(9, 2, 1)
    for array in strategy.coefficients().values():
        with pytest.raises(ValueError, match="read-only"):
            array[-1, 0] = 2
    with pytest.raises(ValueError, match="read-only"):
        strategy.column_norms()[0] = 0


def good():
    """Coefficients of 6 steps, K = 2, R = 2, to be spoilt."""
    return {name: array.copy() for name, array in random_strategy(6, 2, 2).coefficients().items()}


def spoil(name, at, value):
    arrays = good()
    arrays[name][at] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (good() | {"band": np.ones(6)}, "band has shape"),
        (good() | {"band": np.ones((5, 2))}, "band has shape"),
        (good() | {"band": np.ones((6, 0))}, "band has shape"),
        (good() | {"band": np.ones((6, 7))}, "band has shape"),
        (good() | {"left": np.zeros(6)}, "left has shape"),
        (good() | {"left": np.zeros((5, 2))}, "left has shape"),
        (good() | {"right": np.zeros((6, 5))}, "at most 4"),
        (good() | {"right": np.zeros((6, 1))}, "belong together"),
        (good() | {"left": np.zeros((6, 2), np.float32)}, "float32"),
        ({name: array.astype(np.float16) for name, array in good().items()}, "float16"),
        ({name: array.astype(int) for name, array in good().items()}, "int64"),
        (spoil("band", (3, 1), np.nan), "finite"),
        (spoil("left", (3, 1), np.inf), "finite"),
        (spoil("band", (3, 0), 0.0), r"diagonal is 0.0 at step 3"),
        (spoil("band", (3, 0), -1.0), r"diagonal is -1.0 at step 3"),
        (spoil("band", (3, 1), 1e101), "1e\\+101 in band"),
        (spoil("right", (0, 1), -1e101), "1e\\+101 in right"),
        (good() | {"band": np.full((6, 2), 1e-101)}, "1e-101 in band"),
        (spoil("band", (0, 1), 1e-9), "exactly 0"),
        (spoil("left", (1, 0), 1e-9), "exactly 0"),
        (spoil("right", (4, 0), 1e-9), "exactly 0"),
    ],
)
def test_bad_coefficients(arrays, message):
    """Shapes, dtypes, magnitudes, a diagonal that could not be divided by, entries outside the matrix."""
    with pytest.raises(SolverError, match=message):
        BandedLowRankStrategy(**arrays, workload=prefix_sum(6))


def test_too_large_to_be_dense():
    """8193 steps are refused before anything is allocated."""
    nothing = np.broadcast_to(np.float64(0), (8193, 0))
    with pytest.raises(CapacityError, match="8193"):
        BandedLowRankStrategy(np.broadcast_to(np.float64(1), (8193, 1)), nothing, nothing, prefix_sum(8193))


# --- the fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "bandwidth", "rank"), [(60, 3, 2), (80, 8, 3), (40, 1, 1)])
def test_recovers_a_true_low_rank(n, bandwidth, rank):
    """A matrix that is band + low rank: nothing is left over."""
    rng = np.random.default_rng(rank)
    left, right = rng.normal(size=(2, n, rank))
    B = np.tril(left @ right.T, -bandwidth) + bandwidth * np.eye(n)
    fitted = fit(B, bandwidth, rank, 300)
    low_rank = np.tril(fitted.left @ fitted.right.T, -bandwidth)
    np.testing.assert_allclose(low_rank, np.tril(B, -bandwidth), atol=1e-4 * np.abs(B).max())
    assert fitted.objectives[-1] <= 1e-7 * fitted.objectives[0]


@pytest.mark.parametrize("rank", [1, 3])
def test_rank_one_prefix_sums(rank):
    """Below any band, prefix sums are of rank 1: S itself can be had from S, also with accumulators to spare."""
    fitted = fit(np.tri(50), 4, rank)
    np.testing.assert_allclose(np.tril(fitted.left @ fitted.right.T, -4), np.tri(50, k=-4), atol=1e-7)


def test_nothing_below_the_band():
    """A = I: B is diagonal, and what is fitted to nothing is nothing."""
    fitted = fit(np.eye(12), 3, 2)
    assert not fitted.left.any() or not fitted.right.any()
    w = custom(np.eye(12))
    found = solve(w)
    strategy = build(w, found, single(), 2, 3)
    np.testing.assert_allclose(strategy.to_dense(), np.eye(12), atol=1e-6)
    assert 0 <= excess(strategy, found) < 1e-6
    assert build(w, found, single()).parameters() == {"bandwidth": 1, "rank": 1}


@given(n=st.integers(2, 24), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=80)
def test_objective_never_rises(n, seed, data):
    """From half sweep to half sweep, for any matrix; and the last one is what the factors really leave."""
    bandwidth = data.draw(st.integers(1, n - 1))
    rank = data.draw(st.integers(1, n - bandwidth))
    B = np.tril(np.random.default_rng(seed).normal(size=(n, n)))
    fitted = fit(B, bandwidth, rank)
    objectives = np.array(fitted.objectives)
    assert (np.diff(objectives) <= 0).all()
    assert objectives[0] == pytest.approx((np.tril(B, -bandwidth) ** 2).sum())
    assert not fitted.left[:bandwidth].any()
    assert not fitted.right[n - bandwidth :].any()
    error = np.tril(B - fitted.left @ fitted.right.T, -bandwidth)
    stds2 = np.cumsum(fitted.right**2, axis=0)[: n - bandwidth]
    penalty = 1e-9 * (fitted.left[bandwidth:] ** 2 * stds2).sum()
    assert (error**2).sum() + penalty <= objectives[-1] * (1 + 1e-6) + 1e-12 * objectives[0]


def test_fit_is_a_stationary_point():
    """No small change of either factor fits better (the least-squares optimum of each side by numpy.linalg.lstsq)."""
    w, found = optimum("prefix-sum", 64)
    B = dense.build(w, found, single()).decoder(w)
    fitted = fit(B, 4, 2, 2000)
    error = np.tril(B - fitted.left @ fitted.right.T, -4)
    misfit = (error**2).sum()
    best = 0.0
    for i in range(4, 64):
        rows = fitted.right[: i - 3]
        row = np.linalg.lstsq(rows, B[i, : i - 3], rcond=None)[0]
        best += ((B[i, : i - 3] - rows @ row) ** 2).sum()
    assert best <= misfit <= best * (1 + 1e-2)


def test_cancellation_is_held_down():
    """Rank 8 beside a narrow band, where plain least squares ends in terms a thousand times their sum."""
    w, found = optimum("prefix-sum", 256)
    strategy = build(w, found, single(), 8, 8)
    assert strategy.amplifications()["iterate"] < 200
    assert excess(strategy, found) < 1e-5


def test_equalised_is_the_best_scaling():
    """Against a general-purpose optimizer, where equal columns are best and where they are not."""
    rng = np.random.default_rng(0)
    for off_diagonal in (0.05, 2.0):
        squares = np.tril(rng.uniform(0, off_diagonal, (5, 5)), -1) + np.diag(rng.uniform(0.5, 1, 5))
        energies = rng.uniform(0.5, 2, 5)

        def loss(log_m, squares=squares, energies=energies):
            m = np.exp(log_m)
            return (m @ squares).max() * (energies / m).sum()

        found = min(
            (
                scipy.optimize.minimize(loss, rng.normal(size=5), method="Powell", options={"xtol": 1e-9})
                for _ in range(20)
            ),
            key=lambda run: run.fun,
        )
        scale, reached = _equalised(squares, energies)
        assert reached == pytest.approx(loss(np.log(1 / scale**2)), rel=1e-12)
        assert (squares / scale[:, None] ** 2).sum(axis=0).max() == pytest.approx(1, rel=1e-12)
        assert reached <= found.fun * (1 + 1e-3)
        assert reached >= found.fun * (1 - 1e-2)


def test_equalised_refuses_what_has_no_norms():
    with pytest.raises(SolverError, match="finite"):
        _equalised(np.full((2, 2), np.nan), np.ones(2))


# --- construction -----------------------------------------------------------------------------------------------


@workloads
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_a_whole_band_is_the_optimum(name, n):
    """K = n: nothing is approximated, the rank is 0 and the loss that of the dense strategy."""
    w, found = optimum(name, n)
    strategy = build(w, found, single(), bandwidth=n, dtype="float64")
    assert strategy.parameters() == {"bandwidth": n, "rank": 0}
    assert strategy.loss(w, single()) == pytest.approx(dense.build(w, found, single()).loss(w, single()), rel=1e-9)
    assert strategy.sensitivity(single()) == pytest.approx(1, abs=1e-9)


@workloads
@dtypes
@pytest.mark.parametrize(("bandwidth", "rank"), [(1, 1), (3, 2), (8, 4), (39, 1)])
def test_certificates(name, dtype, bandwidth, rank):
    """The loss is never below the bound, and never above that of scaling nothing."""
    w, found = optimum(name, 40)
    strategy = build(w, found, single(), bandwidth, rank, dtype=dtype)
    assert (strategy.bandwidth, strategy.rank, strategy.dtype) == (bandwidth, rank, np.dtype(dtype))
    certificate = certify(w, strategy, found, single())
    assert certificate.excess >= 0
    if (bandwidth, rank) == (8, 4) and name != "custom":
        assert certificate.excess < 1e-4
    assert certificate.sensitivity == pytest.approx(1, abs=1e-5)


def test_columns_are_equalised():
    """Every column of C_hat has norm 1, as in the optimum."""
    w, found = optimum("prefix-sum", 64)
    strategy = build(w, found, single(), 4, 3, dtype="float64")
    np.testing.assert_allclose(np.linalg.norm(strategy.to_dense(), axis=0), 1, rtol=1e-9)


def test_more_rank_or_band_is_better():
    w, found = optimum("prefix-sum", 256)
    by_rank = [excess(build(w, found, single(), 16, rank), found) for rank in (1, 2, 3, 4)]
    by_band = [excess(build(w, found, single(), bandwidth, 3), found) for bandwidth in (4, 8, 16, 32)]
    for sequence in (by_rank, by_band):
        assert (np.diff(sequence) < 0).all()


def test_figures_of_design():
    """n = 512: no worse than the trials of design.md, section 5."""
    w = prefix_sum(512)
    found = solve(w)
    for bandwidth, rank, most in ((16, 3, 6e-4), (16, 4, 2.4e-4), (32, 3, 6e-5), (32, 6, 9e-7)):
        assert excess(build(w, found, single(), bandwidth, rank), found) < most / 3


@pytest.mark.slow
def test_targets_at_2048():
    """float32 coefficients, columns equalised: 5e-4 with (32, 6), 5e-5 with (64, 6), each in 30 s."""
    w = prefix_sum(2048)
    found = solve(w)
    for bandwidth, rank, most in ((32, 6, 5e-5), (64, 6, 5e-6)):
        start = time.process_time()
        strategy = build(w, found, single(), bandwidth, rank)
        assert time.process_time() - start < 30
        assert strategy.dtype == np.float32
        assert 0 <= excess(strategy, found) <= most


@pytest.mark.parametrize("name", ["prefix-sum", "cooldown", "custom"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_the_pair_is_chosen(name, tolerance):
    """Within the tolerance, cheaper than the whole decoder, and about as cheap as any pair of a full grid."""
    w, found = optimum(name, 40)
    chosen = build(w, found, single(), tolerance=tolerance)
    assert excess(chosen, found) <= tolerance
    cost = chosen.bandwidth + 2 * chosen.rank
    cheapest = 40
    for bandwidth in (1, 2, 4, 8, 16, 32):
        for rank in range(1, 41 - bandwidth):
            if bandwidth + 2 * rank >= cheapest:
                break
            if excess(build(w, found, single(), bandwidth, rank), found) <= tolerance:
                cheapest = bandwidth + 2 * rank
                break
    assert chosen.bandwidth in (1, 2, 4, 8, 16, 32)
    assert cost <= max(1.3 * cheapest, cheapest + 2)


def test_the_rank_is_chosen():
    """The least rank that meets the tolerance; one less does not."""
    w, found = optimum("prefix-sum", 128)
    chosen = build(w, found, single(), bandwidth=8, tolerance=1e-4)
    assert chosen.bandwidth == 8
    assert excess(chosen, found) <= 1e-4
    assert chosen.rank > 1
    assert excess(build(w, found, single(), 8, chosen.rank - 1), found) > 1e-4


def test_the_bandwidth_is_chosen():
    """The least power of two; half of it does not meet the tolerance."""
    w, found = optimum("prefix-sum", 128)
    chosen = build(w, found, single(), rank=2, tolerance=1e-4)
    assert chosen.rank == 2
    assert excess(chosen, found) <= 1e-4
    assert chosen.bandwidth in (2, 4, 8, 16, 32, 64)
    assert excess(build(w, found, single(), chosen.bandwidth // 2, 2), found) > 1e-4


def test_a_tolerance_out_of_reach():
    """float32 cannot do 1e-13: the best that was found comes back, and its certificate says so."""
    w, found = optimum("prefix-sum", 32)
    for options in ({}, {"bandwidth": 4}, {"rank": 2}):
        chosen = build(w, found, single(), tolerance=1e-13, **options)
        assert 1e-13 < excess(chosen, found) < 1e-3


def test_the_unit_of_the_rates_is_no_difference():
    """Rates in another unit: the same pair and the same excess."""
    results = []
    for unit in (1.0, 2.0**-10, 2.0**40):
        w = sgd(48, learning_rates=unit * schedule.parse("cosine", 48).rates)
        found = solve(w)
        strategy = build(w, found, single(), tolerance=1e-3)
        results.append((strategy.parameters(), excess(strategy, found)))
    assert results[0][0] == results[1][0] == results[2][0]
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-3)
    assert results[2][1] == pytest.approx(results[0][1], rel=1e-3)


def test_units_beyond_float32():
    """Learning rates that float32 cannot write down: refused with a way out, and float64 holds them."""
    w = sgd(12, learning_rates=1e-50 * np.linspace(1, 0.5, 12))
    found = solve(w)
    with pytest.raises(SolverError, match="float64"):
        build(w, found, single(), 3, 2)
    assert excess(build(w, found, single(), 3, 2, dtype="float64"), found) < 1e-2


def test_compiling_twice_gives_the_same_bytes():
    """The start of the fit is drawn, but always the same."""
    w, found = optimum("momentum", 48)
    first, second = (build(w, found, single()).coefficients() for _ in range(2))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()


def test_progress_is_reported():
    w, found = optimum("prefix-sum", 32)
    stages = []
    build(w, found, single(), on_progress=lambda progress: stages.append(progress.stage))
    assert stages[0] == "optimal decoder"
    assert any("rank" in stage for stage in stages)


@pytest.mark.parametrize(
    ("bandwidth", "rank", "message"),
    [
        (0, None, "bandwidth = 0"),
        (-1, 2, "bandwidth = -1"),
        (11, None, "11 is wider than n = 10"),
        (True, None, "bandwidth = True"),
        (2.0, None, r"bandwidth = 2.0"),
        ("2", None, "bandwidth = '2'"),
        (None, 0, "rank = 0"),
        (None, -3, "rank = -3"),
        (None, 10, "rank = 10 is above 9"),
        (4, 7, "rank = 7 is above 6"),
        (10, 1, "leave the rank out"),
        (4, 1.5, r"rank = 1.5"),
    ],
)
def test_bad_pairs(bandwidth, rank, message):
    """Each names the value and the rule; before anything is computed."""
    with pytest.raises(WorkloadError, match=message):
        check_pair(bandwidth, rank, 10)
    w, found = optimum("prefix-sum", 10)
    with pytest.raises(WorkloadError, match=message):
        build(w, found, single(), bandwidth, rank)


def test_bad_options():
    w, found = optimum("prefix-sum", 10)
    for tolerance in (0, 1, -1, float("nan")):
        with pytest.raises(WorkloadError, match="tolerance"):
            build(w, found, single(), tolerance=tolerance)
    with pytest.raises(WorkloadError, match="dtype"):
        build(w, found, single(), dtype="float16")
    with pytest.raises(CapacityError, match="8193"):
        build(prefix_sum(8193), found, single())


@given(low=st.integers(0, 5), span=st.integers(0, 40), first=st.integers(0, 60), answer=st.integers(0, 60))
def test_least(low, span, first, answer):
    """The least value that meets, however far the search has to go."""
    found = _least(lambda value: value >= answer, low, low + span, first)
    assert found == (max(answer, low) if answer <= low + span else None)


@given(n=st.integers(1, 12), seed=st.integers(0, 1000), data=st.data())
def test_bands_and_back(n, seed, data):
    """A matrix from its band and a full-rank rest."""
    bandwidth = data.draw(st.integers(1, n))
    B = np.tril(np.random.default_rng(seed).normal(size=(n, n)))
    np.testing.assert_array_equal(assemble(bands_of(B, bandwidth), B, np.eye(n)), B)
