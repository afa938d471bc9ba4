"""The dual function by both routes: its value, its proven errors, its derivatives."""

import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.dual_dense import DenseDual
from mmfact.factorize.dual_structured import StructuredDual, dense_inverse_sum
from mmfact.factorize.errors import WorkloadError
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd

duals = pytest.mark.parametrize("make", [StructuredDual, DenseDual], ids=["structured", "dense"])


def _workloads():
    cooldown = schedule.parse("cooldown:peak=0.2", 12)
    return {
        "one step": prefix_sum(1),
        "two steps": prefix_sum(2),
        "prefix": prefix_sum(12),
        "sgd": sgd(12, learning_rates=cooldown),
        "momentum": momentum(12, learning_rates=cooldown),
        "coupled": momentum(12, learning_rates=cooldown, weight_decay=0.5),
        "decoupled": sgd(12, learning_rates=cooldown, weight_decay=0.5, weight_decay_kind="decoupled"),
        "ema": momentum(12, learning_rates=cooldown, ema=0.8),
    }


WORKLOADS = _workloads()
names = pytest.mark.parametrize("name", list(WORKLOADS))


def _multipliers(n, seed=0, decades=1.0):
    return 10 ** np.random.default_rng(seed).uniform(-decades, decades, n)


def _phi(A, v):
    """diag (D^(1/2) A'A D^(1/2))^(1/2) and its trace from a plain SVD."""
    _, sigma, Vt = np.linalg.svd(A * np.sqrt(v))
    return (sigma[:, None] * Vt**2).sum(axis=0), sigma.sum()


@duals
@names
def test_evaluate(make, name, simulated):
    """phi and T at any multipliers, against a plain SVD of A D^(1/2)."""
    w = WORKLOADS[name]
    v = _multipliers(w.n)
    phi, trace = _phi(simulated(w), v)
    at = make(w).evaluate(v)
    np.testing.assert_allclose(at.phi, phi, rtol=1e-11)
    assert at.trace == pytest.approx(trace, rel=1e-12)
    assert at.bound == pytest.approx(trace**2 / v.sum(), rel=1e-12)
    assert at.gap == pytest.approx((phi / v).max() * v.sum() / trace - 1, rel=1e-10)


@duals
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_prefix_sum_singular_values(make, n):
    """Closed form at v = 1: the nuclear norm of S is sum_j 1 / (2 sin((2j-1) pi / (4n+2)))."""
    expected = math.fsum(1 / (2 * math.sin((2 * j - 1) * math.pi / (4 * n + 2))) for j in range(1, n + 1))
    assert make(prefix_sum(n)).evaluate(np.ones(n)).trace == pytest.approx(expected, rel=1e-13)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
@settings(deadline=None, max_examples=40)
def test_routes_agree(seed, n, beta, hard_workload):
    """Structured and dense phi agree to 1e-9 on random schedules over three decades and random multipliers."""
    w = hard_workload(seed, n, beta)
    v = _multipliers(n, seed, 1.5)
    one, other = StructuredDual(w).evaluate(v), DenseDual(w).evaluate(v)
    np.testing.assert_allclose(one.phi, other.phi, rtol=1e-9)
    assert one.trace == pytest.approx(other.trace, rel=1e-11)


@duals
@names
def test_homogeneity(make, name):
    """phi(c v) = sqrt(c) phi(v): the bound does not depend on the scale of v."""
    w = WORKLOADS[name]
    v, dual = _multipliers(w.n), make(WORKLOADS[name])
    one, other = dual.evaluate(v), dual.evaluate(1e12 * v)
    np.testing.assert_allclose(other.phi, 1e6 * one.phi, rtol=1e-11)
    assert other.bound == pytest.approx(one.bound, rel=1e-12)
    assert other.residual == pytest.approx(one.residual, abs=1e-10)


def _spread(w):
    """Multipliers as uneven as an optimum's: column norms of A, roughly."""
    return np.sqrt(w.column_energies()) * _multipliers(w.n, 5, 0.5)


@names
def test_spectrum_is_enclosed(name, simulated):
    """The poles' interval contains the spectrum of the pencil (L L', D), at 50 digits: it must be proven, not hoped."""
    w = WORKLOADS[name]
    dual = StructuredDual(w)
    for v in (np.ones(w.n), _multipliers(w.n, 1), _multipliers(w.n, 2, 4.0), _spread(w)):
        poles = dual.poles(v)
        with mpmath.workdps(50):
            M = mpmath.matrix((simulated(w)).tolist())
            for j in range(w.n):
                M[:, j] *= mpmath.sqrt(mpmath.mpf(float(v[j])))
            sigma = mpmath.svd_r(M, compute_uv=False)
            assert poles.lower <= 1 / max(sigma) ** 2
            assert poles.upper >= 1 / min(sigma) ** 2


@duals
@names
def test_certified_trace(make, name, exact_matrix, nuclear_norm):
    """The claimed errors of T contain the true one, at 60 digits for the exact matrix; and they are small."""
    w = WORKLOADS[name]
    A = exact_matrix(w)
    for v in (_multipliers(w.n, 3), _spread(w)):
        found, truth = make(w).certify(v), nuclear_norm(A, v)
        assert abs(found.trace / truth - 1) <= found.error
        assert found.trace * (1 - found.error) <= truth
        assert found.error <= 1e-12


@duals
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.9999])
@pytest.mark.parametrize("seed", range(3))
def test_certified_trace_of_ill_conditioned_workloads(make, beta, seed, exact_matrix, nuclear_norm, hard_workload):
    """Rates over three decades: the claim must still hold, and the structured one stay far inside its budget."""
    w = hard_workload(seed, 9, beta)
    v = _multipliers(9, seed, 2.0)
    found, truth = make(w).certify(v), nuclear_norm(exact_matrix(w), v)
    assert abs(found.trace / truth - 1) <= found.error
    assert found.error <= 1e-11


def test_certificate_knows_when_it_is_lost(exact_matrix, nuclear_norm):
    """Rates over sixteen decades with beta near 1: the claim may grow, but it may never be wrong."""
    for seed in range(6):
        rates = 10 ** np.random.default_rng(seed).uniform(-16, 0, 6)
        w = momentum(6, beta=0.999999, learning_rates=rates)
        v = _spread(w)
        truth = nuclear_norm(exact_matrix(w), v)
        for make in (StructuredDual, DenseDual):
            found = make(w).certify(v)
            assert abs(found.trace - truth) <= found.error * max(found.trace, 1e-300) or found.error >= 1


def _differences(phi_of, v):
    """K by central differences of phi / v in u = log v, at whatever accuracy phi_of has."""
    n, h = len(v), 1e-5
    K = np.empty((n, n))
    for k in range(n):
        up, down = v.copy(), v.copy()
        up[k] *= math.exp(h)
        down[k] *= math.exp(-h)
        K[:, k] = -v * (phi_of(up) / up - phi_of(down) / down) / (2 * h)
    return K


@duals
@names
def test_curvature(make, name, simulated):
    """K q and diag K against finite differences of an independent SVD's phi."""
    w = WORKLOADS[name]
    v, A = _multipliers(w.n, 4), simulated(w)
    K = _differences(lambda x: _phi(A, x)[0], v)
    dual = make(w)
    at = dual.evaluate(v)
    size = np.abs(K).max()
    for seed in range(3):
        q = np.random.default_rng(seed).normal(size=w.n)
        np.testing.assert_allclose(dual.curvature_product(at, q), K @ q, atol=2e-8 * size * np.abs(q).sum())
    np.testing.assert_allclose(dual.curvature_diagonal(at), np.diag(K), atol=2e-8 * size)


@duals
@names
def test_curvature_of_ones(make, name):
    """K 1 = phi / 2, since phi is homogeneous of degree one half."""
    w = WORKLOADS[name]
    dual = make(w)
    at = dual.evaluate(_multipliers(w.n, 6))
    np.testing.assert_allclose(dual.curvature_product(at, np.ones(w.n)), at.phi / 2, rtol=1e-10)


@names
def test_curvature_routes_agree(name):
    """Both products are one matrix, symmetric and positive semidefinite."""
    w = WORKLOADS[name]
    v = _multipliers(w.n, 8)
    matrices = []
    for make in (StructuredDual, DenseDual):
        dual = make(w)
        at = dual.evaluate(v)
        K = np.column_stack([dual.curvature_product(at, e) for e in np.eye(w.n)])
        assert np.abs(K - K.T).max() <= 1e-11 * np.abs(K).max()
        assert np.linalg.eigvalsh((K + K.T) / 2)[0] >= -1e-11 * np.abs(K).max()
        np.testing.assert_allclose(dual.curvature_diagonal(at), np.diag(K), rtol=1e-10)
        matrices.append(K)
    np.testing.assert_allclose(matrices[0], matrices[1], atol=1e-10 * np.abs(matrices[1]).max())


@pytest.mark.parametrize("n", [1, 2, 5, 63, 64, 130])
def test_dense_inverse_sum(n):
    """X(v) = D^(-1/2) (D^(1/2) A'A D^(1/2))^(1/2) D^(-1/2), exactly symmetric, in one block of columns or several."""
    w = momentum(n, learning_rates=schedule.parse("cosine:peak=0.1", n))
    v = _multipliers(n, 9)
    M = w.dense() * np.sqrt(v)
    _, sigma, Vt = scipy.linalg.svd(M)
    X = (Vt.T * sigma) @ Vt / np.sqrt(np.outer(v, v))
    found = dense_inverse_sum(StructuredDual(w).evaluate(v))
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, X, atol=1e-11 * np.abs(X).max())


def test_results_do_not_depend_on_threads(monkeypatch):
    """One core or many: the same bits, so that a digest made on one machine is found on another."""
    w = momentum(200)
    v = _spread(w)
    several = []
    for count in (1, 3):
        monkeypatch.setattr("mmfact.factorize.dual_structured.threads", lambda count=count: count)
        dual = StructuredDual(w)
        at = dual.evaluate(v)
        several.append((at.phi, dual.curvature_product(at, v), dual.certify(v).trace, dense_inverse_sum(at)))
    for one, other in zip(*several, strict=True):
        np.testing.assert_array_equal(one, other)


def test_structured_dual_needs_bands():
    """A custom matrix has none."""
    with pytest.raises(WorkloadError, match="custom"):
        StructuredDual(custom(np.eye(3)))
