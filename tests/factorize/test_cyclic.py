"""Sensitivity over epochs, against dense algebra, closed forms, exact arithmetic and the worst contributions."""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.factorize import compiler, cyclic, schedule
from mmfact.factorize.cyclic import cyclic_sensitivity
from mmfact.factorize.errors import CapacityError, PrivacyError, SolverError
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import momentum, prefix_sum


def random_strategy(n, r, seed, signs=False, least_decay=0.1, dtype=np.float64):
    """Stable; with `signs` entries of C of either sign, and decays that vanish or change sign."""
    rng = np.random.default_rng(seed)
    decay = rng.uniform(least_decay, 1, (n, r))
    if signs:
        decay *= rng.choice([-1, 0, 1, 1], (n, r))
    low = -1 if signs else 0
    arrays = rng.uniform(0.5, 1.5, n), rng.uniform(low, 1, (n, r)), decay, rng.uniform(low, 1, (n, r))
    return BufferedStrategy(*(array.astype(dtype) for array in arrays))


def definition(strategy):
    """C of a buffered strategy, entry by entry."""
    c, g, decay, q = (array.astype(float) for array in strategy.coefficients().values())
    C = np.diag(c)
    for j in range(len(c)):
        for i in range(j + 1, len(c)):
            C[i, j] = g[i] @ (np.prod(decay[j + 1 : i], axis=0) * q[j])
    return C


def patterns(n, epochs):
    """Every set of steps of one example, from the words: epochs of ceil(n / epochs) steps, the same place in each."""
    steps = math.ceil(n / epochs)
    return [[i for i in range(n) if i % steps == s] for s in range(steps)]


def bound(C, epochs):
    """(sensitivity bound, whether it is attained by equal contributions) of a dense C."""
    X = C.T @ C
    sums = [(np.abs(X[np.ix_(p, p)]).sum(), bool((X[np.ix_(p, p)] >= 0).all())) for p in patterns(len(C), epochs)]
    worst, attained = max(sums)
    return math.sqrt(worst), attained


def attained(C, epochs):
    """The largest norm of C G over all examples and all contributions of +-1."""
    return max(
        np.linalg.norm(C[:, pattern] @ signs)
        for pattern in patterns(len(C), epochs)
        for signs in itertools.product([-1, 1], repeat=len(pattern))
    )


COMPILED = {
    "dense": {},
    "buffered": {"buffers": 3},
    "banded-low-rank": {"bandwidth": 4, "rank": 2},
}


@pytest.fixture(scope="module", params=COMPILED)
def compiled(request):
    return [
        compiler.compile(work, compiler.Options(strategy=request.param, tolerance=0.5, **COMPILED[request.param]))
        for work in (prefix_sum(30), momentum(30))
    ]


class TestEveryStrategy:
    @pytest.mark.parametrize("epochs", [2, 3, 4, 7, 15, 29, 30])
    def test_it_is_that_of_dense_algebra(self, compiled, epochs):
        for found in compiled:
            truth, _ = bound(found.strategy.to_dense(), epochs)
            claimed = cyclic_sensitivity(found.strategy, epochs)
            assert truth * (1 - 1e-15) <= claimed.sensitivity <= truth * (1 + 1e-11)
            assert (claimed.epochs, claimed.separation) == (epochs, math.ceil(30 / epochs))

    def test_one_epoch_is_single_participation(self, compiled):
        for found in compiled:
            claimed = cyclic_sensitivity(found.strategy, 1)
            assert claimed.sensitivity == found.strategy.sensitivity(single())
            assert (claimed.separation, claimed.kind) == (30, found.strategy.sensitivity_kind)

    def test_shipped_optima_have_an_exact_figure_where_their_single_one_is(self, compiled):
        """Their X has no negative entry (prefix sums, momentum): equal contributions attain the sum."""
        for found in compiled:
            C = found.strategy.to_dense()
            claimed = cyclic_sensitivity(found.strategy, 5)
            assert claimed.kind == found.strategy.sensitivity_kind
            assert attained(C, 5) * (1 - 1e-14) <= claimed.sensitivity <= attained(C, 5) * (1 + 1e-11)

    def test_more_epochs_never_need_less(self, compiled):
        for found in compiled:
            figures = [cyclic_sensitivity(found.strategy, epochs).sensitivity for epochs in (1, 2, 5, 10, 30)]
            assert figures == sorted(figures)

    @pytest.mark.parametrize("epochs", [0, -1, 31, 2.0, 2.5, True, "2", None, math.nan])
    def test_epochs_that_are_none(self, compiled, epochs):
        with pytest.raises(PrivacyError, match="whole number from 1 to the 30 steps"):
            cyclic_sensitivity(compiled[0].strategy, epochs)

    def test_numbers_of_numpy_are_taken(self, compiled):
        assert cyclic_sensitivity(compiled[0].strategy, np.int64(3)) == cyclic_sensitivity(compiled[0].strategy, 3)


class TestDense:
    @given(n=st.integers(2, 9), seed=st.integers(0, 999), epochs=st.integers(2, 9))
    def test_it_errs_high(self, n, seed, epochs):
        """Exact arithmetic on the rationals that the coefficients are is not above what is claimed."""
        rng = np.random.default_rng(seed)
        C = np.tril(rng.normal(size=(n, n)), -1) + np.diag(rng.uniform(0.5, 2, n))
        exact = [[Fraction(x) for x in row] for row in C.tolist()]
        square = max(
            sum(abs(sum(exact[m][i] * exact[m][j] for m in range(n))) for i in pattern for j in pattern)
            for pattern in patterns(n, min(epochs, n))
        )
        claimed = Fraction(cyclic_sensitivity(DenseStrategy.from_matrix(C), min(epochs, n)).sensitivity)
        assert square <= claimed**2 <= square * (1 + Fraction(1, 10**12))

    def test_what_is_uncertain_of_the_columns_adds_up(self):
        """B_hat^-1 A is known to 1e-9 here; over a pattern that may come K times over, whatever the signs."""
        work = momentum(240, beta=0.95, learning_rates=schedule.parse("cooldown", 240))
        options = compiler.Options(strategy="banded-low-rank", bandwidth=16, rank=3)
        strategy = compiler.compile(work, options).strategy
        C, raised = strategy.to_dense(), strategy.column_norms()
        uncertain = raised - np.linalg.norm(C, axis=0)
        assert uncertain.max() > 1e-10
        for epochs in (2, 8, 60):
            needed = max(np.sqrt(np.abs(C[:, p].T @ C[:, p]).sum()) + uncertain[p].sum() for p in patterns(240, epochs))
            assert cyclic_sensitivity(strategy, epochs).sensitivity == pytest.approx(needed, rel=1e-12)


class TestClosedForms:
    @pytest.mark.parametrize(("n", "epochs"), [(12, 3), (12, 5), (100, 7), (8, 8)])
    def test_independent_noise_needs_the_root_of_the_epochs(self, n, epochs):
        """C = I: as many orthogonal columns as an example has steps, ceil(n / ceil(n / epochs))."""
        steps = -(-n // (-(-n // epochs)))
        ones = np.zeros((n, 1))
        for strategy in (
            DenseStrategy.from_matrix(np.eye(n)),
            BufferedStrategy(np.ones(n), ones.copy(), ones.copy(), ones.copy()),
        ):
            claimed = cyclic_sensitivity(strategy, epochs)
            assert claimed.sensitivity == pytest.approx(math.sqrt(steps), rel=1e-12)
            assert claimed.kind == "exact"

    @pytest.mark.parametrize(("n", "epochs"), [(12, 3), (20, 4), (9, 9)])
    def test_prefix_sums_themselves(self, n, epochs):
        """C = A: X[i, j] = n - max(i, j), the worst example is that of step 0."""
        b = n // epochs
        truth = math.sqrt(sum(n - max(i, j) for i in range(0, n, b) for j in range(0, n, b)))
        ones = np.ones((n, 1))
        for strategy in (
            DenseStrategy.from_matrix(np.tril(np.ones((n, n)))),
            BufferedStrategy(np.ones(n), ones.copy(), ones.copy(), ones.copy()),
        ):
            claimed = cyclic_sensitivity(strategy, epochs)
            assert claimed.sensitivity == pytest.approx(truth, rel=1e-12)
            assert claimed.kind == "exact"

    def test_columns_that_cancel_are_not_credited(self):
        """C = [[1, 0], [-1, 1]]: equal contributions give 1, opposite ones sqrt(5)."""
        C = np.array([[1.0, 0], [-1, 1]])
        buffered = BufferedStrategy(np.ones(2), np.array([[0.0], [-1]]), np.ones((2, 1)), np.ones((2, 1)))
        for strategy in (DenseStrategy.from_matrix(C), buffered):
            claimed = cyclic_sensitivity(strategy, 2)
            assert claimed.sensitivity == pytest.approx(math.sqrt(5), rel=1e-14)
            assert claimed.kind == "upper bound"


class TestBuffered:
    @given(
        n=st.integers(2, 14),
        r=st.integers(1, 4),
        seed=st.integers(0, 999),
        signs=st.booleans(),
        single_precision=st.booleans(),
        data=st.data(),
    )
    def test_any_coefficients_any_epochs(self, n, r, seed, signs, single_precision, data):
        epochs = data.draw(st.integers(2, n))
        strategy = random_strategy(n, min(r, n // 2), seed, signs, dtype=np.float32 if single_precision else np.float64)
        C = definition(strategy)
        truth, equal = bound(C, epochs)
        claimed = cyclic_sensitivity(strategy, epochs)
        assert truth * (1 - 1e-13) <= claimed.sensitivity <= truth * (1 + 1e-13)
        # rounding may hide the sign of an entry of X that is 0; such patterns differ from exact ones by nothing
        assert claimed.kind == ("exact" if equal else "upper bound") or np.abs(C.T @ C).min() < 1e-14

    @given(n=st.integers(2, 12), seed=st.integers(0, 999), signs=st.booleans(), epochs=st.integers(2, 6))
    def test_no_contributions_exceed_it_and_where_exact_some_attain_it(self, n, seed, signs, epochs):
        strategy = random_strategy(n, max(1, n // 4), seed, signs)
        worst = attained(definition(strategy), min(epochs, n))
        claimed = cyclic_sensitivity(strategy, min(epochs, n))
        assert worst * (1 - 1e-14) <= claimed.sensitivity
        if claimed.kind == "exact":
            assert claimed.sensitivity <= worst * (1 + 1e-13)

    def test_dense_and_buffered_ways_agree_with_negative_entries(self):
        strategy = random_strategy(60, 5, 3, signs=True)
        for epochs in (2, 7, 60):
            one = cyclic_sensitivity(strategy, epochs)
            other = cyclic_sensitivity(DenseStrategy.from_matrix(strategy.to_dense()), epochs)
            assert one.sensitivity == pytest.approx(other.sensitivity, rel=1e-12)
            assert one.kind == other.kind

    @pytest.mark.parametrize("epochs", [2, 5, 30])
    def test_it_errs_high_even_where_everything_cancels(self, epochs):
        """Two buffers of 1e7 that all but cancel: exact arithmetic (mpmath, 60 digits) is not above what is claimed."""
        n = 30
        rng = np.random.default_rng(1)
        q, decay = rng.uniform(0.5, 1, (n, 1)), rng.uniform(0.9, 1, (n, 1))
        g = rng.uniform(0.5, 1, (n, 1)) * 1e7
        g = np.hstack([g, -g * (1 + 1e-9 * rng.normal(size=(n, 1)))])
        strategy = BufferedStrategy(np.full(n, 0.5), g, np.hstack([decay, decay]), np.hstack([q, q]))
        claimed = mpmath.mpf(cyclic_sensitivity(strategy, epochs).sensitivity)
        with mpmath.workdps(60):
            C = exact_matrix(strategy)
            truth = mpmath.mpf(0)
            for pattern in patterns(n, epochs):
                total = mpmath.fsum(
                    abs(mpmath.fsum(C[m][i] * C[m][j] for m in range(n))) for i in pattern for j in pattern
                )
                truth = max(truth, mpmath.sqrt(total))
            assert truth <= claimed <= truth * (1 + mpmath.mpf(10) ** -12)

    @pytest.mark.parametrize("exponent", [13, 25])
    @pytest.mark.parametrize("order", [1, -1])
    def test_what_vanishes_and_comes_back_is_not_lost(self, exponent, order):
        """Decays whose product is 1 by way of 1e-169, 1e-325 or their inverses: refused or high, never low."""
        n, b = 60, 30
        decay, g, q = np.ones((n, 1)), np.zeros((n, 1)), np.zeros((n, 1))
        decay[1:14], decay[14:27] = 10.0 ** (order * exponent), 10.0 ** (-order * exponent)
        g[b:], q[0] = 1, 1
        try:
            claimed = cyclic_sensitivity(BufferedStrategy(np.ones(n), g, decay, q), 2)
        except SolverError:
            return
        # column 0 has 1 in row 0 and in the last 30, column b in row b: 31 + 1 + 2
        assert claimed.sensitivity >= math.sqrt(34) * (1 - 1e-12)
        assert claimed.kind == "upper bound" or claimed.sensitivity <= math.sqrt(34) * (1 + 1e-9)

    def test_a_long_one_against_columns_written_out(self):
        """n = 131072, K = 8: the columns of sampled patterns by their definition, and what their Gram matrix says."""
        n, r, epochs = 131_072, 8, 8
        rng = np.random.default_rng(2)
        decay = 1 - 10.0 ** rng.uniform(-5.5, -4.5, (n, r))
        strategy = BufferedStrategy(
            rng.uniform(0.9, 1, n), 10 ** rng.uniform(-4, -2, (n, r)), decay, rng.uniform(-0.2, 1, (n, r))
        )
        b = n // epochs
        squares, loose = cyclic._buffered(strategy, b)
        claimed = cyclic_sensitivity(strategy, epochs)
        assert claimed.sensitivity == pytest.approx(math.sqrt(squares.max()), rel=1e-14)
        worst = int(squares.argmax())
        samples = (worst, 0, 12_345)
        steps = np.array([s + k * b for s in samples for k in range(epochs)])
        c, g, decay, q = strategy.coefficients().values()
        states, X = np.zeros((len(steps), r)), np.zeros((len(steps), len(steps)))
        for m in range(n):
            row = states @ g[m]
            states *= decay[m]
            row[steps == m], states[steps == m] = c[m], q[m]
            X += np.outer(row, row)
        for i, s in enumerate(samples):
            block = X[i * epochs : (i + 1) * epochs, i * epochs : (i + 1) * epochs]
            assert squares[s] == pytest.approx(np.abs(block).sum(), rel=1e-9)
            assert bool(loose[s]) == bool((block < 0).any())

    def test_too_many_epochs_of_a_long_one_are_refused(self):
        strategy = random_strategy(131_072, 2, 0)
        with pytest.raises(CapacityError, match="fewer epochs"):
            cyclic_sensitivity(strategy, 131_072)

    def test_sums_that_overflow_are_refused(self):
        big = np.full((40, 1), 1e30)
        with pytest.raises(SolverError, match="not finite"):
            cyclic_sensitivity(BufferedStrategy(np.ones(40), big.copy(), big.copy(), big.copy()), 4)


def exact_matrix(strategy):
    """C of a buffered strategy as rows of mpmath numbers."""
    c, g, decay, q = (array.tolist() for array in strategy.coefficients().values())
    n = len(c)
    C = [[mpmath.mpf(0)] * n for _ in range(n)]
    for j in range(n):
        C[j][j] = mpmath.mpf(c[j])
        state = [mpmath.mpf(x) for x in q[j]]
        for i in range(j + 1, n):
            C[i][j] = mpmath.fsum(mpmath.mpf(x) * h for x, h in zip(g[i], state, strict=True))
            state = [mpmath.mpf(x) * h for x, h in zip(decay[i], state, strict=True)]
    return C
