"""The optimum against golden values, closed forms, and the other route; the bound is never above it."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.construct import dense
from mmfact.factorize.dual_dense import DenseDual
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.optimum import ERROR_BUDGET, METHODS, solve
from mmfact.factorize.participation import single
from mmfact.factorize.workload import Workload, custom, momentum, prefix_sum, sgd

GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))
ENTRIES = GOLDENS["optimal"]
SLACK = 1e-12


def _title(entry):
    return f"{entry['workload']}-{entry['n']}-{entry['beta']}-{entry['schedule']}"


@pytest.mark.parametrize("method", ["structured", "dense", "auto"])
@pytest.mark.parametrize("entry", ENTRIES, ids=_title)
def test_golden_optima(entry, method, golden_workload):
    """The shipped loss is the known optimum to 1e-9, the bound is below it, the excess is honest and tiny."""
    found = compile(golden_workload(entry), Options(strategy="dense", method=method))
    assert found.certificate.loss == pytest.approx(entry["loss"], rel=1e-9)
    assert found.certificate.rmse == pytest.approx(entry["rmse"], rel=1e-9)
    assert found.optimum.lower_bound <= entry["loss"] * (1 + SLACK)
    assert found.optimum.lower_bound == pytest.approx(entry["loss"], rel=1e-9)
    assert 0 <= found.certificate.excess <= 1e-8
    assert found.optimum.converged
    assert not found.optimum.fell_back
    # the golden multipliers are at the scale where diag X = phi / v = 1; phi grows with the root of the scale
    v = found.optimum.multipliers * (found.optimum.evaluation.phi / found.optimum.multipliers).max() ** 2
    assert v[0] == pytest.approx(entry["v_first"], rel=1e-5)
    assert v[-1] == pytest.approx(entry["v_last"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "w"),
    [
        ("prefix-sum n=1024", prefix_sum(1024)),
        ("prefix-sum n=2048", prefix_sum(2048)),
        ("momentum .9 n=1024", momentum(1024)),
        ("momentum .9 with cooldown n=2048", momentum(2048, learning_rates=schedule.parse("cooldown", 2048))),
    ],
)
def test_large_golden_optima(name, w):
    """The structured route at sizes where the dense one takes minutes."""
    truth = GOLDENS["optimal_large"][name]
    found = compile(w, Options(strategy="dense", method="structured"))
    assert found.certificate.loss == pytest.approx(truth, rel=1e-9)
    assert found.optimum.lower_bound <= truth * (1 + SLACK)
    assert found.certificate.excess <= 1e-8


@pytest.mark.parametrize("method", ["structured", "dense"])
def test_two_steps_are_the_golden_ratio(method):
    """Prefix sums of two steps: the optimum is the golden ratio squared, (3 + sqrt 5) / 2."""
    found = compile(prefix_sum(2), Options(strategy="dense", method=method))
    truth = (3 + math.sqrt(5)) / 2
    assert found.certificate.loss == pytest.approx(truth, rel=1e-13)
    assert found.optimum.lower_bound <= truth <= found.certificate.loss


@pytest.mark.parametrize("method", ["structured", "dense"])
@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 1000])
def test_nuclear_norm_bound(method, n):
    """g(1) = (sum sigma)^2 / n is a valid bound in closed form; the maximised one must be above it from n = 3 on."""
    if method == "dense" and n > 100:
        method = "auto"
    sigma = [1 / (2 * math.sin((2 * j - 1) * math.pi / (4 * n + 2))) for j in range(1, n + 1)]
    bound = math.fsum(sigma) ** 2 / n
    found = solve(prefix_sum(n), method=method)
    if n >= 3:
        assert bound < found.lower_bound
    else:
        assert bound <= found.lower_bound * (1 + 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("w", "loss"),
    [
        (prefix_sum(1), 1.0),
        (sgd(1, learning_rates=[0.3]), 0.09),
        (momentum(1, learning_rates=[3.0], weight_decay=0.1, weight_decay_kind="decoupled"), 9.0),
        (momentum(1, ema=0.75), 0.0625),
        (custom([[-2.0]]), 4.0),
        (custom(np.diag([1.0, -2.0, 3.0])), 14.0),
        (custom(np.eye(4)), 4.0),
    ],
)
def test_closed_forms(w, loss, method):
    """One step is A^2, by every method; for a diagonal A nothing beats C = I, whose loss is the sum of squares."""
    if method == "structured" and not w.structured:
        with pytest.raises(WorkloadError, match="dense"):
            solve(w, method=method)
        return
    found = compile(w, Options(strategy="dense", method=method))
    assert found.certificate.loss == pytest.approx(loss, rel=1e-10 if method != "fixed-point" else 1e-4)
    assert found.optimum.lower_bound <= loss


def test_diagonal_workloads_have_nothing_to_gain():
    """C = I is optimal for any diagonal A: every release is its own; the loss is the sum of squares."""
    a = np.random.default_rng(0).uniform(0.1, 3, 12)
    found = compile(custom(np.diag(a)), Options(strategy="dense"))
    assert found.certificate.loss == pytest.approx(float((a**2).sum()), rel=1e-10)
    np.testing.assert_allclose(found.strategy.to_dense(), np.eye(12), atol=1e-12)


# --- many random workloads --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_cases():
    """200 workloads: rates over three decades, beta up to .99, up to 200 steps; both routes' optima and losses."""
    rng = np.random.default_rng(2022)
    cases = []
    for _ in range(200):
        n = math.ceil(200 * rng.uniform() ** 2)
        w = momentum(n, beta=rng.uniform(0, 0.99), learning_rates=10 ** rng.uniform(-3, 0, n))
        auto, other = solve(w), solve(w, method="dense")
        strategies = [dense.build(w, found, single()) for found in (auto, other)]
        cases.append(
            SimpleNamespace(
                w=w,
                auto=auto,
                dense=other,
                auto_loss=strategies[0].loss(w, single()),
                dense_loss=strategies[1].loss(w, single()),
            )
        )
    return cases


@pytest.mark.slow
def test_random_workloads_agree(random_cases):
    """Two routes that share no code below the outer iteration find one optimum: bounds to 1e-9, losses too."""
    for case in random_cases:
        assert case.auto.lower_bound == pytest.approx(case.dense.lower_bound, rel=1e-9), case.w
        assert case.auto_loss == pytest.approx(case.dense_loss, rel=1e-7), case.w


@pytest.mark.slow
def test_random_workloads_bounds_are_bounds(random_cases):
    """Neither route's lower bound exceeds the loss that the other one's strategy really has."""
    for case in random_cases:
        assert case.auto.lower_bound <= case.dense_loss * (1 + SLACK), case.w
        assert case.dense.lower_bound <= case.auto_loss * (1 + SLACK), case.w
        assert case.auto.lower_bound <= case.auto_loss, case.w
        assert case.dense.lower_bound <= case.dense_loss, case.w


@pytest.mark.slow
def test_random_workloads_converge(random_cases):
    """Every one of them, to an excess of 1e-8 or better, in few evaluations."""
    for case in random_cases:
        assert case.auto.converged, case.w
        assert case.dense.converged, case.w
        assert case.auto_loss / case.auto.lower_bound - 1 <= 1e-8, case.w
        assert case.auto.iterations <= 100, case.w


@pytest.mark.slow
def test_random_workloads_stay_structured(random_cases):
    """The dense fall-back is for rarities (none of these 200 when this was written)."""
    assert sum(case.auto.fell_back for case in random_cases) <= 4
    for case in random_cases:
        assert case.auto.fell_back == (case.auto.method == "dense")
        if not case.auto.fell_back:
            assert case.auto.quadrature_error + case.auto.rounding <= ERROR_BUDGET


# --- the bound holds for any multipliers ------------------------------------------------------------------------

SMALL = [entry for entry in ENTRIES if entry["n"] <= 64]


@given(
    entry=st.sampled_from(SMALL),
    seed=st.integers(0, 10**9),
    size=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 5.0]),
    scale=st.sampled_from([1e-8, 1.0, 1e8]),
)
@settings(deadline=None, max_examples=60)
def test_any_multipliers_give_a_bound(entry, seed, size, scale, golden_workload):
    """g(v) stays below the optimum wherever v is: near the optimum, far from it, at any scale."""
    w = golden_workload(entry)
    near = _optimum_of(_title(entry), w)
    v = scale * near * np.exp(size * np.random.default_rng(seed).normal(size=w.n))
    for make in (StructuredDual, DenseDual):
        dual = make(w)
        assert dual.evaluate(v).bound <= entry["loss"] * (1 + SLACK)
        certified = dual.certify(v)
        assert (certified.trace * (1 - certified.error)) ** 2 / v.sum() <= entry["loss"] * (1 + 1e-14)
        away, weight = np.log(v / near), near / near.sum()
        if weight @ (away - weight @ away) ** 2 >= 0.05**2:  # really elsewhere, beyond a common factor
            assert dual.evaluate(v).bound < entry["loss"] * (1 - 1e-6)


_SOLVED: dict[str, np.ndarray] = {}


def _optimum_of(title, w):
    if title not in _SOLVED:
        _SOLVED[title] = solve(w).multipliers
    return _SOLVED[title]


# --- the iterations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay_kind", ["coupled", "decoupled"])
def test_fixed_point_with_weight_decay_does_not_slow_down(decay_kind):
    """eta lambda = .1 bounds A and A^-1 whatever n is, and then the fixed point's rate does not depend on n."""
    counts = []
    for n in (64, 256, 1024):
        w = sgd(n, learning_rates=np.full(n, 0.5), weight_decay=0.2, weight_decay_kind=decay_kind)
        found = solve(w, method="fixed-point", tolerance=1e-6)
        assert found.converged
        assert found.gap <= 1e-6
        counts.append(found.iterations)
    assert max(counts) <= min(counts) + 2


def test_fixed_point_of_prefix_sums_slows_down():
    """Without decay A grows with n, and so does the number of steps; Newton's hardly does."""
    slow, fast = [], []
    for n in (64, 256, 1024):
        found = solve(prefix_sum(n), method="fixed-point", tolerance=1e-6)
        assert found.converged
        slow.append(found.iterations)
        fast.append(solve(prefix_sum(n), tolerance=1e-10).iterations)
    assert slow[0] * 1.2 < slow[1]
    assert slow[1] * 1.2 < slow[2]
    assert max(fast) <= 12
    assert 4 * max(fast) < min(slow)


def test_newton_beats_the_fixed_point_on_momentum():
    """Momentum .9 is where the plain fixed point crawls: tens of times fewer evaluations, products included."""
    slow = solve(momentum(128), method="fixed-point", tolerance=1e-4)
    fast = solve(momentum(128), tolerance=1e-10)
    assert slow.converged
    assert fast.converged
    assert fast.iterations + fast.products < slow.iterations / 2


@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(24),
        sgd(24, learning_rates=schedule.parse("cooldown", 24)),
        momentum(24, beta=0.5),
        sgd(24, weight_decay=0.5),
        custom(np.tril(np.random.default_rng(4).uniform(0.2, 1, (24, 24))) + 2 * np.eye(24)),
    ],
    ids=lambda w: w.kind,
)
def test_fixed_point_and_newton_agree(w):
    """One optimum, and one vector of multipliers up to scale (the dual is strictly concave across it)."""
    slow, fast = solve(w, method="fixed-point", tolerance=1e-9), solve(w)
    assert slow.fixed_point
    assert not fast.fixed_point
    assert slow.converged
    assert slow.lower_bound == pytest.approx(fast.lower_bound, rel=1e-11)
    one, other = (found.multipliers / found.multipliers.sum() for found in (slow, fast))
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_fixed_point_is_the_papers_step(golden_workload):
    """v <- phi(v) raises the bound at every step and stops on its first-order gap, which bounds the truth."""
    w = prefix_sum(16)
    optimal = next(e["loss"] for e in ENTRIES if e["workload"] == "prefix-sum" and e["n"] == 16)
    dual, v, last = DenseDual(w), DenseDual(w).start(), 0.0
    for _ in range(20):
        at = dual.evaluate(v)
        assert at.bound >= last * (1 - 1e-14)
        assert at.bound <= optimal * (1 + SLACK) <= at.bound * (1 + at.gap) * (1 + 2 * SLACK)
        last, v = at.bound, at.phi
    found = solve(w, method="fixed-point", tolerance=1e-2)
    assert found.history[-1] <= 1e-2 < found.history[-2]
    assert found.lower_bound == pytest.approx(optimal, rel=1e-2)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("entry", SMALL, ids=_title)
def test_tolerance_is_kept(entry, tolerance, golden_workload):
    """The optimum is a number known in advance, so `converged` can be checked: the bound is that close to it."""
    found = solve(golden_workload(entry), tolerance=tolerance)
    assert found.converged
    assert entry["loss"] * (1 - max(10 * tolerance, 1e-11)) <= found.lower_bound <= entry["loss"] * (1 + SLACK)


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
@pytest.mark.parametrize(
    "text",
    [
        "cosine",
        "polynomial:power=3",
        "step:factor=0.001,every=16",
        "warmup:start=1e-6,fraction=0.5",
        "cooldown:final=1e-6",
        "step:factor=10,every=16",
    ],
)
def test_schedules_over_many_decades(text, beta):
    """Named schedules reach six decades easily; Newton's line search must get through (it once gave up at 7 %)."""
    w = momentum(64, beta=beta, learning_rates=schedule.parse(text, 64))
    found = compile(w, Options(strategy="dense"))
    assert found.optimum.converged
    assert found.certificate.excess <= 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_over_six_decades(seed):
    """Harsher than any schedule in use: what claims to have converged has, and the certificate stays honest."""
    rng = np.random.default_rng(seed)
    w = momentum(24, beta=0.99, learning_rates=10 ** rng.uniform(-6, 0, 24), weight_decay=0.5)
    found = compile(w, Options(strategy="dense"))
    assert found.certificate.excess <= 1e-6 or not found.optimum.converged
    other = solve(w, method="dense")
    assert other.lower_bound <= found.certificate.loss * (1 + SLACK)


def test_converged_is_never_claimed_in_vain():
    """Eight decades: a bound 2.7 % below the optimum (the dense route finds 21.8309) may not be called converged."""
    w = momentum(24, learning_rates=10 ** np.random.default_rng(6).uniform(-8, 0, 24))
    found, dense_found = compile(w, Options(strategy="dense")), compile(w, Options(strategy="dense", method="dense"))
    assert dense_found.certificate.excess <= 1e-9
    assert found.certificate.lower_bound <= dense_found.certificate.loss * (1 + SLACK)
    assert found.certificate.excess <= 1e-6 or not found.optimum.converged


# --- the interface ----------------------------------------------------------------------------------------------


def test_auto_falls_back_where_the_structured_budget_is_exceeded():
    """Rates of 1e-8 beside 1: the structured bound would be too coarse, so auto goes dense and says so."""
    w = momentum(16, learning_rates=schedule.parse("warmup:start=1e-8", 16))
    structured, auto = solve(w, method="structured"), solve(w)
    assert structured.quadrature_error + structured.rounding > ERROR_BUDGET
    assert not structured.fell_back
    assert auto.fell_back
    assert auto.method == "dense"
    assert auto.quadrature_error == 0


def test_methods_are_what_they_say():
    """structured and dense are honoured; auto is structured with bands, dense without."""
    assert solve(prefix_sum(8), method="structured").method == "structured"
    assert solve(prefix_sum(8), method="dense").method == "dense"
    assert solve(prefix_sum(8)).method == "structured"
    assert solve(prefix_sum(8), method="fixed-point").method == "structured"
    assert solve(custom(np.eye(8))).method == "dense"
    assert solve(custom(np.eye(8)), method="fixed-point").method == "dense"


def test_structured_needs_bands():
    """A custom matrix cannot take the structured route; the message offers the dense one."""
    with pytest.raises(WorkloadError, match="use dense"):
        solve(custom(np.eye(3)), method="structured")


@pytest.mark.parametrize("method", ["newton", "", None, "AUTO"])
def test_unknown_methods(method):
    """The message lists the known ones."""
    with pytest.raises(WorkloadError, match="fixed-point"):
        solve(prefix_sum(3), method=method)


@pytest.mark.parametrize("tolerance", [0, -1, 1, 2, math.nan, math.inf])
def test_bad_tolerances(tolerance):
    """A tolerance of 0 would never be reached, one of 1 says nothing."""
    with pytest.raises(WorkloadError, match="tolerance"):
        solve(prefix_sum(3), tolerance=tolerance)


def test_dense_method_is_refused_for_long_horizons():
    """n = 8193 dense: refused at once; the structured route takes it."""
    with pytest.raises(CapacityError, match="8193"):
        solve(prefix_sum(8193), method="dense")


def test_long_horizon_without_any_dense_matrix():
    """n = 20,000 on the structured route, between the closed-form bound and the square-root strategy's loss."""
    n = 20_000
    found = solve(prefix_sum(n), tolerance=1e-6)
    assert found.converged
    harmonic = math.fsum(1 / (2 * math.sin((2 * j - 1) * math.pi / (4 * n + 2))) for j in range(1, n + 1))
    c = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, n)]))  # binom(2k, k) / 4^k
    square_root = float((c**2).sum() * (c**2 * np.arange(n, 0, -1)).sum())
    assert harmonic**2 / n < found.lower_bound < square_root
    # the optimum's share of the square-root strategy's loss falls slowly with n: .885 at 16, .90 at 512
    assert 0.85 < found.lower_bound / square_root < 0.97


def test_progress_and_history():
    """Every evaluation is reported once, numbered from 1, and its gap kept."""
    seen = []
    for method in ("auto", "fixed-point"):
        seen.clear()
        found = solve(prefix_sum(16), method=method, tolerance=1e-6, on_progress=seen.append)
        assert [p.iteration for p in seen] == list(range(1, found.iterations + 1))
        assert tuple(p.gap for p in seen) == found.history
        assert found.history[-1] == found.gap


@pytest.mark.parametrize(
    "w",
    [
        momentum(32),
        momentum(32, learning_rates=np.full(32, 3e-4), weight_decay=0.1),
        sgd(32, learning_rates=np.full(32, 700.0), weight_decay=1e-3, weight_decay_kind="decoupled", ema=0.5),
        custom(1e-5 * np.tri(32)),
    ],
    ids=lambda w: w.label(),
)
def test_results_describe_their_multipliers(w):
    """trace, residual, gap and bound are those of the returned multipliers for A itself, in A's own unit."""
    found = solve(w, tolerance=1e-3)
    at = DenseDual(w).evaluate(found.multipliers)
    assert found.trace == pytest.approx(at.trace, rel=1e-12)
    assert found.gap == pytest.approx(at.gap, rel=1e-6, abs=1e-12)
    assert found.residual == pytest.approx(at.residual, rel=1e-6, abs=1e-12)
    assert found.lower_bound <= at.bound
    assert found.lower_bound == pytest.approx(at.bound, rel=1e-11)


def test_golden_file_is_about_these_workloads(golden_workload):
    """Each entry is built as it says (a schedule lost here would make every comparison above vacuous)."""
    for entry in ENTRIES:
        w: Workload = golden_workload(entry)
        assert (w.kind, w.n, w.schedule) == (entry["workload"], entry["n"], entry["schedule"])
        assert w.beta == entry["beta"]
