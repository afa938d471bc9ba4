"""The buffered strategy and its construction, against dense algebra, exact arithmetic and the design's table."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.factorize import optimum, schedule
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.construct import buffered, dense
from mmfact.factorize.errors import CapacityError, SolverError, WorkloadError
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.buffered import BufferedStrategy, largest_buffers
from mmfact.factorize.verification_large import nuclear_norm
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd


def rates(name, n):
    return schedule.parse(name, n)


def random_strategy(n, r, seed, dtype=np.float64):
    """Stable: decays in (0, 1), and what is read is small beside what is fed."""
    rng = np.random.default_rng(seed)
    return BufferedStrategy(
        rng.uniform(0.5, 1.5, n).astype(dtype),
        rng.uniform(0, 0.3 / r, (n, r)).astype(dtype),
        rng.uniform(0.1, 1, (n, r)).astype(dtype),
        rng.uniform(0, 1, (n, r)).astype(dtype),
    )


def plain_dense(strategy):
    """C from its definition, entry by entry."""
    c, g, decay, q = (array.astype(float) for array in strategy.coefficients().values())
    n, r = g.shape
    C = np.diag(c)
    for j in range(n):
        for i in range(j + 1, n):
            C[i, j] = sum(g[i, k] * np.prod(decay[j + 1 : i, k]) * q[j, k] for k in range(r))
    return C


WORKLOADS = {
    "prefix": lambda n: prefix_sum(n),
    "sgd": lambda n: sgd(n, learning_rates=rates("cosine:peak=0.1", n), weight_decay=0.1),
    "momentum": lambda n: momentum(n),
    "cooldown": lambda n: momentum(n, beta=0.95, learning_rates=rates("cooldown", n)),
    "decoupled": lambda n: momentum(n, weight_decay=0.05, weight_decay_kind="decoupled"),
    "ema": lambda n: momentum(n, learning_rates=rates("warmup", n), ema=0.9),
    "custom": lambda n: custom(np.tril(np.random.default_rng(0).uniform(0.5, 1, (n, n))) + np.eye(n)),
}


class TestStrategy:
    def test_sensitivity_errs_high_where_the_gramian_vanishes_and_grows_back(self):
        """Transitions of 2^43 for 13 steps, of 2^-43 for 13: product 1, but on its way the Gramian falls below 2^-1074.

        The last row reads the first step through all of them, so column 0 holds 1 and 5: norm sqrt(26), exactly.
        """
        n = 28
        c, g, decay, q = np.ones(n), np.zeros((n, 1)), np.ones((n, 1)), np.zeros((n, 1))
        decay[1:14], decay[14:27] = 2.0**43, 2.0**-43
        g[27], q[0] = 5, 1
        assert BufferedStrategy(c, g, decay, q).sensitivity(single()) >= math.sqrt(26)

    @given(n=st.integers(2, 9), r=st.integers(1, 4), seed=st.integers(0, 99), single_precision=st.booleans())
    def test_dense_forms_are_those_of_the_definition(self, n, r, seed, single_precision):
        strategy = random_strategy(n, min(r, largest_buffers(n)), seed, np.float32 if single_precision else np.float64)
        C = plain_dense(strategy)
        np.testing.assert_allclose(strategy.to_dense(), C, rtol=0, atol=1e-14 * np.abs(C).max())
        np.testing.assert_allclose(strategy.noising() @ C, np.eye(n), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("name", WORKLOADS)
    @given(r=st.integers(1, 4), seed=st.integers(0, 99))
    def test_figures_are_those_of_dense_algebra(self, name, r, seed):
        n = 12
        strategy, workload = random_strategy(n, r, seed), WORKLOADS[name](n)
        C, A = plain_dense(strategy), workload.dense()
        B = A @ np.linalg.inv(C)
        sensitivity = np.linalg.norm(C, axis=0).max()
        loss, max_error = strategy.errors(workload, single())
        assert sensitivity * (1 - 1e-15) <= strategy.sensitivity(single()) <= sensitivity * (1 + 1e-12)
        assert loss == pytest.approx((sensitivity * np.linalg.norm(B)) ** 2, rel=1e-11)
        assert max_error == pytest.approx(sensitivity * np.linalg.norm(B, axis=1).max(), rel=1e-11)
        assert loss == strategy.loss(workload, single())
        assert max_error == strategy.max_error(workload, single())
        np.testing.assert_allclose(strategy.decoder(workload), B, rtol=0, atol=1e-11 * np.abs(B).max())

    def test_column_norms_are_rounded_up_even_where_everything_cancels(self):
        """Two buffers that all but cancel: exact arithmetic (mpmath, 60 digits) is not above what is claimed."""
        n, big = 30, 1e7
        rng = np.random.default_rng(1)
        q = rng.uniform(0.5, 1, (n, 1))
        g = rng.uniform(0.5, 1, (n, 1)) * big
        decay = rng.uniform(0.9, 1, (n, 1))
        nudge = 1 + 1e-9 * rng.normal(size=(n, 1))
        strategy = BufferedStrategy(
            np.full(n, 0.5), np.hstack([g, -g * nudge]), np.hstack([decay, decay]), np.hstack([q, q])
        )
        claimed = strategy.column_norms()
        with mpmath.workdps(60):
            c, G, D, Q = (
                [[mpmath.mpf(float(x)) for x in np.atleast_1d(row)] for row in array]
                for array in strategy.coefficients().values()
            )
            for j in range(n):
                state, square = list(Q[j]), c[j][0] ** 2
                for i in range(j + 1, n):
                    square += sum(a * b for a, b in zip(G[i], state, strict=True)) ** 2
                    state = [d * s for d, s in zip(D[i], state, strict=True)]
                exact = mpmath.sqrt(square)
                assert exact <= claimed[j] <= exact * (1 + mpmath.mpf(10) ** -12)

    def test_amplification_is_that_of_a_dense_computation(self):
        strategy = random_strategy(25, 3, 5)
        _, g, decay, q = strategy.coefficients().values()
        noising = strategy.noising()
        h = np.zeros((3, 25))  # as rows of coefficients of z
        worst = 0.0
        for i in range(25):
            worst = max(worst, float((np.abs(g[i]) * np.linalg.norm(h, axis=1)).sum()))
            h = decay[i][:, None] * h + q[i][:, None] * noising[i]
        assert strategy.amplification() == pytest.approx(worst, rel=1e-12)
        least, most = strategy.noise_range()
        assert least == pytest.approx(np.diag(noising).min(), rel=1e-12)
        assert most == pytest.approx(np.linalg.norm(noising, axis=1).max(), rel=1e-12)

    def test_constant_coefficients_are_a_toeplitz_strategy(self):
        """A BLT: C[i, j] depends on i - j only."""
        n, ones = 20, np.ones((20, 1))
        C = BufferedStrategy(np.ones(n), 0.3 * ones, 0.8 * ones, 0.5 * ones).to_dense()
        expected = [1.0, *(0.3 * 0.8**k * 0.5 for k in range(n - 1))]
        np.testing.assert_allclose(C, [[expected[i - j] if i >= j else 0 for j in range(n)] for i in range(n)])

    def test_what_it_says_of_itself(self):
        strategy = random_strategy(10, 3, 0, np.float32)
        assert (strategy.kind, strategy.n, strategy.buffers, strategy.cost) == ("buffered", 10, 3, 10)
        assert strategy.parameters() == {"buffers": 3}
        assert strategy.dtype == np.float32
        assert "array" not in repr(strategy)
        with pytest.raises(ValueError, match="read-only"):
            strategy.c[0] = 2

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"c": np.ones((6, 1))}, "shape"),
            ({"c": np.ones(0)}, "shape"),
            ({"c": np.array([1.0, 1, 0, 1, 1, 1])}, "positive"),
            ({"c": np.array([1.0, 1, -1, 1, 1, 1])}, "positive"),
            ({"c": np.array([1.0, 1, np.nan, 1, 1, 1])}, "finite"),
            ({"g": np.ones((5, 2))}, "rows"),
            ({"g": np.ones((6, 0))}, "buffers"),
            ({"g": np.ones((6, 4))}, "buffers"),
            ({"g": np.ones(6)}, "shape"),
            ({"q": np.ones((6, 1))}, "belong together"),
            ({"decay": np.full((6, 2), np.inf)}, "finite"),
            ({"decay": np.ones((6, 2), np.float32)}, "float32"),
            ({"q": np.ones((6, 2), np.int64)}, "int64"),
            ({"q": np.full((6, 2), 1e31)}, "normalise"),
        ],
    )
    def test_bad_coefficients_are_refused_with_the_reason(self, change, said):
        arrays = {"c": np.ones(6), "g": np.ones((6, 2)), "decay": np.ones((6, 2)), "q": np.ones((6, 2))}
        with pytest.raises(SolverError, match=said):
            BufferedStrategy(**{**arrays, **change})

    def test_another_horizon_is_refused(self):
        strategy = random_strategy(10, 2, 0)
        for call in (strategy.decoder, lambda workload: strategy.errors(workload, single())):
            with pytest.raises(WorkloadError, match="belong together"):
                call(prefix_sum(11))

    def test_dense_forms_of_a_long_one_are_refused(self):
        strategy = random_strategy(9000, 1, 0)
        for call in (strategy.to_dense, strategy.noising):
            with pytest.raises(CapacityError, match="8192"):
                call()


class TestConstruction:
    # design.md, section 5: prefix sum, excess over the lower bound
    TABLE = {  # noqa: RUF012
        512: {3: 6e-4, 4: 2.7e-5, 5: 1.1e-6, 6: 3.9e-8},
        2048: {3: 4e-3, 4: 3.1e-4, 5: 2.3e-5, 6: 1.6e-6},
    }

    @pytest.mark.parametrize("n", TABLE)
    def test_excess_by_buffers_of_shipped_float32_coefficients(self, n):
        for r, seen in self.TABLE[n].items():
            found = compile(prefix_sum(n), Options(buffers=r))
            assert found.strategy.buffers == r
            assert found.strategy.dtype == np.float32
            assert 0 <= found.certificate.excess <= 2 * seen + 1e-6

    @pytest.mark.parametrize("name", ["constant", "cooldown"])
    def test_momentum_reaches_the_default_tolerance_with_four_buffers(self, name):
        found = compile(momentum(2048, learning_rates=rates(name, 2048)))
        assert found.strategy.buffers <= 4
        assert 0 <= found.certificate.excess <= 1e-4

    def test_float64_with_eight_buffers(self):
        assert compile(prefix_sum(2048), Options(buffers=8, dtype="float64")).certificate.excess <= 1e-7

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_with_all_buffers_it_is_the_dense_optimum(self, name):
        """Up to the numerical rank: both are within rounding of the only optimum there is."""
        workload = WORKLOADS[name](14)
        all_of_them = compile(workload, Options(buffers=7, dtype="float64"))
        best = compile(workload, Options(strategy="dense"))
        np.testing.assert_allclose(all_of_them.strategy.to_dense(), best.strategy.to_dense(), rtol=0, atol=1e-6)
        assert all_of_them.certificate.excess <= 1e-9

    @pytest.mark.parametrize("name", ["prefix", "momentum", "cooldown", "ema"])
    def test_structured_and_dense_ways_agree(self, name):
        """The state space of X(v), and the blocks of the dense C: two algorithms, equally good at any number."""
        workload = WORKLOADS[name](60)
        for r in (2, 3, 4):
            options = Options(buffers=r, dtype="float64")
            one, other = compile(workload, options), compile(custom(workload.dense()), options)
            assert (one.optimum.method, other.optimum.method) == ("structured", "dense")
            assert one.certificate.excess == pytest.approx(other.certificate.excess, rel=0.5, abs=1e-9)

    def test_the_factor_before_truncation_is_the_dense_one(self):
        workload = momentum(200, learning_rates=rates("cooldown", 200))
        found = optimum.solve(workload)
        c, g, F, q = buffered._factor_structured(found.evaluation.context, 20, optimum.silent)
        C, state = np.diag(c), np.zeros((20, 200))
        for i in range(200):
            C[i, :i] = g[i] @ state[:, :i]
            state[:, :i] = F[i] @ state[:, :i]
            state[:, i] = q[i]
        truth = dense.build(workload, found, single()).to_dense()
        np.testing.assert_allclose(C / np.linalg.norm(C, axis=0), truth, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("name", ["prefix", "momentum", "cooldown"])
    def test_the_fewest_buffers_are_chosen(self, name):
        workload = WORKLOADS[name](150)
        found = compile(workload, Options(tolerance=1e-5))
        assert found.tolerance_reached
        assert found.strategy.buffers > 1
        fewer = compile(workload, Options(buffers=found.strategy.buffers - 1, tolerance=1e-5))
        assert not fewer.tolerance_reached

    def test_never_more_than_the_numerical_rank(self):
        """The blocks of momentum at n = 100 fall below 1e-8 long before rank 50."""
        workload = momentum(100)
        C = compile(workload, Options(strategy="dense")).strategy.to_dense()
        rank = max(int((np.linalg.svd(C[i:, :i], compute_uv=False) > 1e-9).sum()) for i in range(1, 100))
        found = compile(workload, Options(buffers=50))
        assert rank <= 12
        assert found.strategy.buffers <= rank
        assert found.certificate.excess <= 1e-6

    def test_a_tolerance_out_of_reach_ships_the_best(self):
        found = compile(prefix_sum(300), Options(tolerance=1e-9))  # float32 coefficients do not reach it
        assert not found.tolerance_reached
        assert found.certificate.excess <= 1e-6

    def test_columns_are_normalised_and_the_cast_is_judged(self):
        found = compile(prefix_sum(500))
        norms = np.linalg.norm(found.strategy.to_dense(), axis=0)
        assert np.abs(norms - 1).max() <= 2e-6  # float32
        assert 1 <= found.certificate.sensitivity <= 1 + 2e-6

    def test_rounded_decays_do_not_add_up(self):
        """Over a long memory: the cast moves no entry by more than a few float32 roundings of its terms."""
        n = 20_000
        rng = np.random.default_rng(0)
        decay = 1 - rng.uniform(0.5, 1.5, (n, 1)) / n
        c, g, q = np.ones(n), rng.uniform(0.001, 0.002, (n, 1)), rng.uniform(0.5, 1, (n, 1))
        shipped = buffered._ship(c, g, decay, q, np.dtype(np.float32))
        exact = BufferedStrategy(c.copy(), g.copy(), decay.copy(), q.copy())
        norms = exact.column_norms()

        def first_column(strategy, steps):
            _, g, decay, q = (array.astype(float) for array in strategy.coefficients().values())
            return g[steps, 0] * np.exp(np.concatenate([[0], np.cumsum(np.log(decay[1:, 0]))]))[steps - 1] * q[0, 0]

        steps = np.array([1, 100, 10_000, n - 1])
        np.testing.assert_allclose(
            first_column(shipped, steps), first_column(exact, steps) / norms[0], rtol=4 * np.finfo(np.float32).eps
        )
        plain = np.prod(decay.astype(np.float32).astype(float)[1:]) / np.prod(decay[1:])
        assert abs(plain - 1) > 4 * np.finfo(np.float32).eps  # what it would have been

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
    def test_shortest_horizons(self, n):
        found = compile(momentum(n), Options(dtype="float64"))
        assert found.strategy.buffers == 1 or n > 3
        assert 0 <= found.certificate.excess <= 1e-4

    def test_too_few_buffers_for_a_stable_inverse(self):
        """One buffer for momentum with an EMA and falling rates: C^-1 grows by 240 orders of magnitude."""
        workload = momentum(512, learning_rates=rates("polynomial:power=2,final=0.001", 512), ema=0.99)
        with pytest.raises(SolverError, match="more buffers"):
            compile(workload, Options(buffers=1))
        assert compile(workload).tolerance_reached

    @pytest.mark.parametrize(("buffers", "n"), [(0, 10), (-1, 10), (6, 10), (2, 3), (10**9, 2048)])
    def test_buffers_that_n_does_not_allow(self, buffers, n):
        with pytest.raises(WorkloadError, match=f"buffers = {buffers}"):
            compile(prefix_sum(n), Options(buffers=buffers))

    def test_buffers_of_another_strategy(self):
        with pytest.raises(WorkloadError, match="buffered"):
            Options(strategy="dense", buffers=3)

    def test_a_size_where_the_dense_way_would_not_fit(self):
        with pytest.raises(CapacityError, match="GiB"):
            compile(momentum(100_000), Options(method="dense"))

    def test_two_compilations_are_the_same_bits(self):
        one, other = compile(momentum(300)), compile(momentum(300))
        for name, array in one.strategy.coefficients().items():
            np.testing.assert_array_equal(array, other.strategy.coefficients()[name])

    def test_progress_moves_through_every_stage(self):
        seen = []
        compile(momentum(600), on_progress=seen.append)
        stages = list(dict.fromkeys(progress.stage for progress in seen))
        assert stages[:2] == ["optimum", "strategy"]
        assert any("buffers" in stage for stage in stages)
        fractions = [progress.fraction for progress in seen if progress.fraction is not None]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1

    @given(
        n=st.integers(2, 60),
        beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
        decay=st.sampled_from([0.0, 0.01]),
        seed=st.integers(0, 1000),
    )
    def test_any_rates(self, n, beta, decay, seed):
        """Random rates over a decade: certificate and dense algebra agree, and the bound holds."""
        eta = 10 ** np.random.default_rng(seed).uniform(-1, 0, n)
        workload = momentum(n, beta=beta, learning_rates=eta, weight_decay=decay)
        found = compile(workload)
        C = found.strategy.to_dense()
        B = workload.dense() @ np.linalg.inv(C)
        loss = np.linalg.norm(C, axis=0).max() ** 2 * np.linalg.norm(B) ** 2
        assert found.certificate.loss == pytest.approx(loss, rel=1e-9)
        assert 0 <= found.certificate.excess <= 1e-4


class TestLargeHorizons:
    @pytest.mark.slow
    def test_prefix_sum_at_131072(self):
        """At most 8 buffers; the lower bound confirmed by a Kalman filter's innovations, another integral of T(v)."""
        found = compile(prefix_sum(131072))
        assert found.strategy.buffers <= 8
        assert 0 <= found.certificate.excess <= 1e-4
        v = found.optimum.multipliers
        trace = nuclear_norm(prefix_sum(131072), v)
        assert found.certificate.lower_bound == pytest.approx(trace**2 / math.fsum(v), rel=1e-8)

    @pytest.mark.slow
    def test_bounds_and_growth(self):
        """Nuclear-norm bound < lower bound < square-root Toeplitz, and the RMSE's growth a doubling nears ln 2 / pi."""
        rmse = []
        for n in (8192, 16384, 32768):
            found = compile(prefix_sum(n))
            j = np.arange(1, n + 1)
            nuclear = (1 / (2 * np.sin((2 * j - 1) * np.pi / (4 * n + 2)))).sum() ** 2 / n
            k = np.cumprod(np.concatenate([[1.0], (2 * j[:-1] - 1) / (2 * j[:-1])])) ** 2
            toeplitz = k.sum() * ((n - np.arange(n)) * k).sum()
            assert nuclear < found.certificate.lower_bound <= found.certificate.loss < toeplitz
            rmse.append(found.certificate.rmse)
        growth, limit = np.diff(rmse), math.log(2) / math.pi
        assert 0.98 * limit < growth[0] < growth[1] < limit
