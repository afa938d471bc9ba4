"""`verify` recomputes a certificate from the coefficients: it passes what is right and catches each wrong figure."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest

from mmfact.factorize import schedule, verification, verification_large
from mmfact.factorize.certificate import Certificate
from mmfact.factorize.compiler import Options, adopt, compile
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.verification import verify
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd


def _check(found, **changes):
    certificate = dataclasses.replace(found.certificate, **changes.pop("certificate", {}))
    strategy = DenseStrategy.from_matrix(changes.pop("C")) if "C" in changes else found.strategy
    v = changes.pop("multipliers", found.optimum.multipliers)
    return verify(changes.pop("workload", found.workload), strategy, v, certificate, **changes)


def _failed(verification):
    return {check.name for check in verification.checks if not check.passed}


@pytest.fixture(scope="module")
def found():
    return compile(momentum(24, learning_rates=schedule.parse("cooldown:peak=0.1", 24)))


@pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(1),
        prefix_sum(200),
        momentum(64, learning_rates=schedule.parse("cosine:peak=0.1", 64), weight_decay=0.5),
        momentum(
            64,
            learning_rates=schedule.parse("cosine:peak=0.1", 64),
            weight_decay=0.5,
            weight_decay_kind="decoupled",
            ema=0.9,
        ),
        sgd(64, ema=0.5),
        custom(np.tri(20) + np.diag(np.arange(20.0))),
    ],
    ids=lambda w: w.label(),
)
def test_what_is_right_passes(w, dtype, strategy):
    """Whatever the compiler ships passes, structured or dense, cast or not."""
    found = compile(w, Options(strategy=strategy, dtype=dtype))
    verification = _check(found)
    assert verification.passed, verification
    assert not _failed(verification)


def test_with_the_semidefinite_program(found):
    """cvxpy as one more comparison; refused for n > 64."""
    verification = _check(found, reference=True)
    assert verification.passed, verification
    assert any("cvxpy" in check.name for check in verification.checks)
    assert "cvxpy" in verification.how
    with pytest.raises(CapacityError, match="65"):
        _check(compile(prefix_sum(65)), reference=True)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("sensitivity", 0.999999),
        ("sensitivity", 1.001),
        ("loss", 0.999999),
        ("loss", 1.001),
        ("max_error", 0.999999),
        ("max_error", 1.001),
        ("lower_bound", 1.000001),
        ("lower_bound", 0.9),
        ("loss", math.nan),
        ("sensitivity", math.nan),
        ("lower_bound", math.nan),
    ],
)
def test_a_wrong_figure_is_caught(found, name, factor):
    """Understated by a millionth, overstated by a thousandth, a bound too high or far too low, NaN: just that one."""
    verification = _check(found, certificate={name: getattr(found.certificate, name) * factor})
    assert _failed(verification) == {name.replace("_", " ")}
    assert not verification.passed


def test_a_changed_coefficient_is_caught(found):
    """One entry of C moved by a part in a thousand changes loss and sensitivity."""
    C = found.strategy.to_dense()
    C[20, 3] += 1e-3
    assert not _check(found, C=C).passed


def test_the_transposed_orientation_is_caught(found):
    """C of the wrong Cholesky (C C' = X): its column norms are not 1."""
    X = found.strategy.to_dense().T @ found.strategy.to_dense()
    assert "sensitivity" in _failed(_check(found, C=np.linalg.cholesky(X)))


def test_other_multipliers_do_not_prove_the_bound(found):
    """Multipliers are the proof: those of another problem give another, smaller bound."""
    v = found.optimum.multipliers[::-1].copy()
    assert _failed(_check(found, multipliers=v)) == {"lower bound"}


def test_another_workload_is_caught(found):
    """The same C under a workload with another momentum."""
    other = momentum(24, beta=0.8, learning_rates=found.workload.learning_rates)
    failed = _failed(_check(found, workload=other))
    assert {"loss", "max error", "lower bound"} <= failed


def test_the_program_lies_between_bound_and_loss():
    """An adopted strategy far from optimal passes, for its certificate is honest; a bound above the program fails."""
    given = adopt(prefix_sum(8), DenseStrategy.from_matrix(np.eye(8)))
    honest = _check(given, reference=True)
    assert honest.passed
    values = [check.recomputed for check in honest.checks if "cvxpy" in check.name]
    assert values == [pytest.approx(17.86617733277373, rel=1e-5)]
    wrong = _check(given, certificate={"lower_bound": 17.8662 * 1.001}, reference=True)
    assert {name for name in _failed(wrong) if "cvxpy" in name}
    wrong = _check(given, certificate={"loss": 17.8662 * 0.999}, reference=True)
    assert {name for name in _failed(wrong) if "cvxpy" in name}


# --- streamed strategies, and any n ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Streamed:
    """A buffered strategy, and its matrix by the formula of its entries."""

    c: np.ndarray
    g: np.ndarray
    decay: np.ndarray
    q: np.ndarray

    kind = "buffered"

    @property
    def n(self):
        return len(self.c)

    @property
    def dtype(self):
        return self.c.dtype

    def coefficients(self):
        return {"c": self.c, "g": self.g, "decay": self.decay, "q": self.q}

    def to_dense(self):
        c, g, decay, q = (array.astype(np.float64) for array in self.coefficients().values())
        C = np.diag(c)
        for j in range(self.n):
            column = q[j].copy()
            for i in range(j + 1, self.n):
                C[i, j] = g[i] @ column
                column *= decay[i]
        return C


def _streamed(seed, n, buffers, dtype=np.float64, sign=1):
    """Random and stable, with memories from a few steps to all of them; `sign` -1 lets the buffers cancel."""
    rng = np.random.default_rng(seed)
    slowest = 1 - np.geomspace(0.5, 0.5 / n, buffers)
    weight = np.sqrt(1 - slowest) * np.where(np.arange(buffers) % 2, sign, 1)
    decay = slowest * rng.uniform(0.99, 1, (n, buffers))
    g = weight * rng.uniform(0.5, 1, (n, buffers))
    q = np.abs(weight) * rng.uniform(0.5, 1, (n, buffers)) / buffers
    return Streamed(*(array.astype(dtype) for array in (rng.uniform(0.7, 1, n), g, decay, q)))


def _certificate(n, sensitivity, squared_error, largest_row, bound):
    """Figures that are right, each rounded to its safe side as the compiler's are."""
    up = 1 + 1e-14
    return Certificate(
        n=n,
        loss=sensitivity**2 * squared_error * up,
        lower_bound=bound / up,
        sensitivity=sensitivity * up,
        sensitivity_kind="exact",
        max_error=sensitivity * largest_row * up,
        quadrature_error=1e-14,
        rounding=1e-14,
        residual=1e-6,
        iterations=1,
        products=1,
        method="structured",
        fell_back=False,
    )


def _dense_figures(A, C):
    B = np.linalg.solve(C.T, A.T).T
    return np.linalg.norm(C, axis=0).max(), (B * B).sum(), np.linalg.norm(B, axis=1).max()


def _nuclear(A, v):
    return np.linalg.svd(A * np.sqrt(v), compute_uv=False).sum()


def _honest(w, strategy, simulated):
    """(workload, strategy, multipliers, certificate) with every figure from dense algebra."""
    A = simulated(w)
    v = np.linalg.norm(A, axis=0)
    return w, strategy, v, _certificate(w.n, *_dense_figures(A, strategy.to_dense()), _nuclear(A, v) ** 2 / v.sum())


FIGURES = ["sensitivity", "loss", "max_error", "lower_bound"]


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(verification, "LARGEST_SVD", 0)


SHAPES = {
    "prefix-sum": lambda n, rates: prefix_sum(n),
    "sgd": lambda n, rates: sgd(n, learning_rates=rates),
    "momentum": lambda n, rates: momentum(n),
    "beta .99, three decades": lambda n, rates: momentum(n, beta=0.99, learning_rates=rates),
    "cooldown": lambda n, rates: momentum(n, beta=0.95, learning_rates=schedule.parse("cooldown:peak=0.1", n)),
    "coupled decay": lambda n, rates: momentum(n, beta=0.99, learning_rates=rates, weight_decay=0.9),
    "decoupled decay": lambda n, rates: momentum(
        n, beta=0.99, learning_rates=rates, weight_decay=0.9, weight_decay_kind="decoupled"
    ),
    "sgd, decay": lambda n, rates: sgd(n, learning_rates=rates, weight_decay=0.9),
    "sgd, ema": lambda n, rates: sgd(n, learning_rates=rates, ema=0.999),
    "ema, coupled": lambda n, rates: momentum(n, beta=0.99, learning_rates=rates, weight_decay=0.9, ema=0.99),
    "ema, decoupled": lambda n, rates: momentum(
        n, learning_rates=rates, weight_decay=0.9, weight_decay_kind="decoupled", ema=0.9
    ),
    "a tiny ema": lambda n, rates: momentum(n, learning_rates=rates, ema=1e-9),
    "an ema that vanishes": lambda n, rates: momentum(n, learning_rates=rates, ema=1e-200),
}


def _workload(shape, n):
    return SHAPES[shape](n, 10 ** np.random.default_rng(n).uniform(-3, 0, n))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 50, 300])
def test_nuclear_norm_by_innovations(shape, n, simulated):
    """Kalman filters give what singular values give, for multipliers flat, typical and wild."""
    w = _workload(shape, n)
    A = simulated(w)
    for v in (np.ones(n), np.linalg.norm(A, axis=0), 10 ** np.random.default_rng(n).uniform(-5, 5, n)):
        assert verification_large.nuclear_norm(w, v) == pytest.approx(_nuclear(A, v), rel=5e-13, abs=0)


@pytest.mark.parametrize("shape", ["beta .99, three decades", "ema, coupled"])
def test_nuclear_norm_exactly(shape, exact_matrix, nuclear_norm):
    """Against 60 digits, where float64's own singular values could share an error."""
    w = _workload(shape, 12)
    v = 10 ** np.random.default_rng(5).uniform(-3, 3, 12)
    exact = float(nuclear_norm(exact_matrix(w), v))
    assert verification_large.nuclear_norm(w, v) == pytest.approx(exact, rel=1e-13, abs=0)


def test_nuclear_norm_in_closed_form():
    """Prefix sums have the singular values 1 / (2 sin((2 j - 1) pi / (4 n + 2)))."""
    n = 100_000
    exact = math.fsum(1 / (2 * np.sin((2 * np.arange(1, n + 1) - 1) * np.pi / (4 * n + 2))))
    assert verification_large.nuclear_norm(prefix_sum(n), np.ones(n)) == pytest.approx(exact, rel=5e-13, abs=0)


@pytest.mark.parametrize("shape", ["momentum", "beta .99, three decades", "ema, decoupled"])
def test_nuclear_norm_is_the_compilers(shape):
    """Two ways that share nothing, poles in double-double and filters in double, at an n that neither is small for."""
    w = _workload(shape, 20_000)
    v = np.sqrt(w.column_energies())
    unit, own = w.in_own_unit()
    certified = StructuredDual(own).certify(v)
    expected = certified.trace * unit
    assert verification_large.nuclear_norm(w, v) == pytest.approx(expected, rel=1e-12 + certified.error, abs=0)


@pytest.mark.parametrize("unit", [1e-60, 1e59])
def test_nuclear_norm_in_any_unit(unit):
    """Rates at the ends of what is allowed, multipliers too: nothing overflows, nothing is lost."""
    rates, v = np.random.default_rng(0).uniform(1, 2, 40), np.random.default_rng(1).uniform(1, 2, 40)
    one = verification_large.nuclear_norm(momentum(40, learning_rates=rates, weight_decay=0.1, ema=0.5), v)
    w = momentum(40, learning_rates=rates * unit, weight_decay=0.1 / unit, ema=0.5)
    assert verification_large.nuclear_norm(w, v) == pytest.approx(one * unit, rel=1e-13)
    assert verification_large.nuclear_norm(w, v * 1e300) == pytest.approx(one * unit * 1e150, rel=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_nuclear_norm_of_impossible_multipliers(bad):
    """No number rather than a wrong one, and no exception: the file is what is in doubt."""
    v = np.ones(5)
    v[2] = bad
    assert math.isnan(verification_large.nuclear_norm(prefix_sum(5), v))
    assert math.isnan(verification_large.nuclear_norm(prefix_sum(5), np.full(5, bad)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_figures_by_recursion(shape, dtype, simulated):
    """Sensitivity, squared error and largest row by Gramians are those of the matrices."""
    for n, buffers, sign in ((1, 1, 1), (2, 1, 1), (90, 1, -1), (90, 5, -1), (300, 8, 1)):
        w, strategy = _workload(shape, n), _streamed(n, n, buffers, dtype, sign)
        found = verification_large.figures(w, strategy)
        expected = _dense_figures(simulated(w), strategy.to_dense())
        assert dataclasses.astuple(found) == pytest.approx(expected, rel=1e-12, abs=0)
        assert verification_large.product_error(w, strategy) <= 1e-13


def test_figures_in_closed_form():
    """A diagonal C under prefix sums: sums of 1 / c^2; one buffer that never changes: a geometric series."""
    n, zeros = 100_000, np.zeros((100_000, 2))
    c = np.random.default_rng(0).uniform(0.5, 1, n)
    rows = np.cumsum(1 / c.astype(np.longdouble) ** 2)
    expected = c.max(), float(rows.sum()), float(np.sqrt(rows[-1]))
    found = verification_large.figures(prefix_sum(n), Streamed(c, zeros, zeros, zeros))
    assert dataclasses.astuple(found) == pytest.approx(expected, rel=1e-13, abs=0)

    rate, ones = 1 - 1 / n, np.ones((n, 1))
    strategy = Streamed(np.full(n, 0.75), 0.01 * ones, rate * ones, 0.5 * ones)
    series = -math.expm1(2 * (n - 1) * math.log(rate)) / ((1 - rate) * (1 + rate))
    found = verification_large.figures(prefix_sum(n), strategy)
    assert found.sensitivity == pytest.approx(math.sqrt(0.75**2 + 0.005**2 * series), rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_agree(shape, dtype, simulated, monkeypatch):
    """Dense and linear-time verification pass the same honest certificate with the same numbers."""
    honest = _honest(_workload(shape, 200), _streamed(7, 200, 5, dtype, -1), simulated)
    dense = verify(*honest)
    monkeypatch.setattr(verification, "LARGEST_SVD", 199)
    large = verify(*honest)
    assert dense.passed, dense
    assert large.passed, large
    recomputed = {check.name: check.recomputed for check in dense.checks}
    assert [check.name for check in large.checks] == ["sensitivity", "loss", "max error", "lower bound", "B C = A"]
    for check in large.checks[:4]:
        assert check.recomputed == pytest.approx(recomputed[check.name], rel=1e-12, abs=0)
    assert "singular values" in dense.how
    assert "rebuilt" in dense.how
    assert "Kalman" in large.how
    assert "n > 199" in large.how
    for each in (dense, large):
        assert "no code shared with the compiler" in each.how


def test_dense_strategy_with_a_filter(simulated, everything_is_large):
    """Beyond what singular values can do, strategies that are matrices keep dense algebra for themselves."""
    strategy = DenseStrategy.from_matrix(_streamed(1, 60, 3).to_dense())
    verification = verify(*_honest(momentum(60), strategy, simulated))
    assert verification.passed, verification
    assert "dense algebra" in verification.how
    assert "Kalman" in verification.how


def test_streamed_strategy_of_a_matrix(everything_is_large):
    """A custom workload has no optimizer to simulate: dense, whatever its size."""
    A = np.tri(30) + np.diag(np.arange(30.0))
    verification = verify(*_honest(custom(A), _streamed(1, 30, 3), lambda w: w.matrix))
    assert verification.passed, verification
    assert "stored matrix" in verification.how
    assert "singular values" in verification.how


@dataclass(frozen=True, eq=False)
class StoredDecoder:
    """A banded-low-rank strategy: B_hat is stored, and C_hat = B_hat^-1 A."""

    band: np.ndarray
    left: np.ndarray
    right: np.ndarray
    A: np.ndarray

    kind = "banded-low-rank"

    @property
    def n(self):
        return len(self.band)

    def coefficients(self):
        return {"band": self.band, "left": self.left, "right": self.right}

    def decoder(self):
        n, width = self.band.shape
        B = np.zeros((n, n))
        for i in range(n):
            for j in range(i + 1):
                B[i, j] = self.band[i, i - j] if i - j < width else self.left[i] @ self.right[j]
        return B

    def to_dense(self):
        return np.linalg.solve(self.decoder(), self.A)


@pytest.fixture
def stored_decoder(simulated):
    """(workload, strategy, multipliers, certificate), the sensitivity a bound that is a thousandth too high."""
    w = _workload("cooldown", 40)
    A = simulated(w)
    v = np.linalg.norm(A, axis=0)
    B = np.linalg.solve(_streamed(3, 40, 3).to_dense().T, A.T).T
    U, sigma, Vt = np.linalg.svd(B)
    left, right = U[:, :2] * sigma[:2], Vt[:2].T
    band = np.zeros((40, 5))
    for k in range(5):
        band[k:, k] = np.diag(B, -k)
    strategy = StoredDecoder(band, left, right, A)
    B, C = strategy.decoder(), strategy.to_dense()
    figures = np.linalg.norm(C, axis=0).max() * 1.001, (B * B).sum(), np.linalg.norm(B, axis=1).max()
    return w, strategy, v, _certificate(40, *figures, _nuclear(A, v) ** 2 / v.sum())


def test_stored_decoder(stored_decoder, monkeypatch):
    """The decoder is what is checked, and that the C handed out is its inverse times A."""
    result = verify(*stored_decoder)
    assert result.passed, result
    assert "B^-1 A" in result.how
    w, strategy, v, certificate = stored_decoder
    for name in ("band", "left", "right"):
        arrays = {key: array.copy() for key, array in strategy.coefficients().items()}
        arrays[name][20, 0] *= 1.001
        assert "loss" in _failed(verify(w, StoredDecoder(**arrays, A=strategy.A), v, certificate))
    wrong = dataclasses.replace(strategy, A=strategy.A * (1 + 1e-6))
    assert _failed(verify(w, wrong, v, certificate)) == {"B C = A"}


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6, math.nan])
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_a_stored_decoder(name, factor, stored_decoder):
    """Its sensitivity is a bound: moved alone it no longer fits the errors, with them it may not fall too low."""
    w, strategy, v, certificate = stored_decoder
    moved = dataclasses.replace(certificate, **{name: getattr(certificate, name) * factor})
    failed = _failed(verify(w, strategy, v, moved))
    if name == "sensitivity":
        assert {"loss", "max error"} <= failed
    else:
        assert failed == {name.replace("_", " ")}
    too_low = 1 / 1.001 - 1e-6
    lowered = dataclasses.replace(
        certificate,
        sensitivity=certificate.sensitivity * too_low,
        loss=certificate.loss * too_low**2,
        max_error=certificate.max_error * too_low,
    )
    assert _failed(verify(w, strategy, v, lowered)) == {"sensitivity"}


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6, math.nan])
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("largest", [0, 4096])
def test_a_figure_off_by_a_millionth_is_caught(name, factor, largest, simulated, monkeypatch):
    """Either way, on either path: that check and no other."""
    monkeypatch.setattr(verification, "LARGEST_SVD", largest)
    w, strategy, v, certificate = _honest(_workload("ema, coupled", 80), _streamed(3, 80, 4), simulated)
    certificate = dataclasses.replace(certificate, **{name: getattr(certificate, name) * factor})
    assert _failed(verify(w, strategy, v, certificate)) == {name.replace("_", " ")}


@pytest.mark.parametrize("name", ["c", "g", "decay", "q"])
@pytest.mark.parametrize("largest", [0, 4096])
def test_a_changed_streamed_coefficient_is_caught(name, largest, simulated, monkeypatch):
    """One number of one array, moved by a part in a thousand."""
    monkeypatch.setattr(verification, "LARGEST_SVD", largest)
    w, strategy, v, certificate = _honest(prefix_sum(80), _streamed(3, 80, 4), simulated)
    arrays = {key: array.copy() for key, array in strategy.coefficients().items()}
    arrays[name][40] *= 1.001
    assert _failed(verify(w, Streamed(**arrays), v, certificate)) & {"sensitivity", "loss"}


@pytest.mark.parametrize("largest", [0, 4096])
def test_other_workloads_and_multipliers_are_caught(largest, simulated, monkeypatch):
    """What the certificate was not made for."""
    monkeypatch.setattr(verification, "LARGEST_SVD", largest)
    w, strategy, v, certificate = _honest(_workload("cooldown", 80), _streamed(3, 80, 4), simulated)
    assert _failed(verify(w, strategy, v[::-1].copy(), certificate)) == {"lower bound"}
    other = dataclasses.replace(w, beta=0.94)
    assert _failed(verify(other, strategy, v, certificate)) == {"loss", "max error", "lower bound"}


def test_only_the_coefficients_are_trusted(simulated):
    """A strategy that hands out another matrix than its coefficients say."""

    class Liar(Streamed):
        def to_dense(self):
            return super().to_dense() * (1 + 1e-6)

    w, strategy, v, certificate = _honest(momentum(40), _streamed(3, 40, 4), simulated)
    liar = Liar(**strategy.coefficients())
    assert _failed(verify(w, liar, v, certificate)) == {"B C = A"}


@pytest.mark.parametrize("bad", [0.0, math.nan, 1e-200])
def test_impossible_coefficients_are_a_no(bad, simulated, everything_is_large):
    """Infinite or NaN figures fail their checks; nothing is raised."""
    w, strategy, v, certificate = _honest(momentum(40), _streamed(3, 40, 4), simulated)
    strategy.c[20] = bad
    assert {"loss", "max error"} <= _failed(verify(w, strategy, v, certificate))


def test_a_strategy_that_cannot_be_undone_is_caught(everything_is_large, simulated):
    """C^-1 that multiplies every rounding error by the thousand, step after step."""
    n, ones = 60, np.ones((60, 1))
    given = Streamed(np.ones(n), ones, 0.5 * ones, 1e3 * ones)
    w, v = prefix_sum(n), np.ones(n)
    certificate = _certificate(n, 1.0, 1.0, 1.0, 1.0)
    (check,) = [check for check in verify(w, given, v, certificate).checks if check.name == "B C = A"]
    assert not check.passed
    assert check.recomputed > 1e-6


def test_parts_of_different_artifacts(simulated):
    """Their numbers of steps do not fit: said in words, before anything is computed."""
    w, strategy, v, certificate = _honest(prefix_sum(20), _streamed(3, 20, 2), simulated)
    for parts in ((prefix_sum(21), strategy, v), (w, _streamed(3, 19, 2), v), (w, strategy, v[1:])):
        with pytest.raises(WorkloadError, match="only the parts of one artifact"):
            verify(*parts, certificate)


def test_the_large_path_shares_no_code_with_the_compiler(simulated, everything_is_large, monkeypatch):
    """With every piece of the compiler broken, the recomputation still runs and still agrees."""
    honest = [_honest(_workload(shape, 50), _streamed(3, 50, 3), simulated) for shape in SHAPES]

    def broken(*arguments, **options):
        raise AssertionError("the compiler's code was called")

    for name in (
        "workload.Workload.state_space",
        "workload.Workload.apply",
        "workload.Workload.dense",
        "workload.Workload.inverse_bands",
        "workload.Workload.column_energies",
        "workload.Workload.in_own_unit",
        "optimum.solve",
        "dual_dense.DenseDual.__init__",
        "dual_structured.StructuredDual.__init__",
        "quadrature.inverse_square_root",
        "banded.selected_inverse",
        "banded.trace_double_double",
        "certificate.certify",
        "reference.reference_loss",
    ):
        monkeypatch.setattr(f"mmfact.factorize.{name}", broken)
    monkeypatch.setattr(Streamed, "to_dense", broken)
    for each in honest:
        assert verify(*each).passed


@pytest.mark.slow
def test_a_long_horizon():
    """n = 131072, every figure known in closed form: prefix sums, a diagonal C, equal multipliers."""
    n = 131_072
    c = np.random.default_rng(0).uniform(0.5, 1, n).astype(np.float32)
    rows = np.cumsum(1 / c.astype(np.longdouble) ** 2)
    trace = math.fsum(1 / (2 * np.sin((2 * np.arange(1, n + 1) - 1) * np.pi / (4 * n + 2))))
    zeros = np.zeros((n, 4), np.float32)
    certificate = _certificate(n, float(c.max()), float(rows.sum()), float(np.sqrt(rows[-1])), trace**2 / n)
    verification = verify(prefix_sum(n), Streamed(c, zeros, zeros, zeros), np.ones(n), certificate)
    assert verification.passed, verification
    for check in verification.checks[:4]:
        assert check.recomputed == pytest.approx(check.stored, rel=1e-12)
