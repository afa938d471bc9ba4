"""Factorizations that somebody else made: what is stored streams the same noise, and its figures are those of C."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mmfact.factorize import given, schedule
from mmfact.factorize.compiler import Options, adopt, compile
from mmfact.factorize.errors import CapacityError, MmfactError, WorkloadError
from mmfact.factorize.given import PRODUCT_TOLERANCE, read_factors, strategy_of
from mmfact.factorize.participation import single
from mmfact.factorize.workload import custom, momentum, prefix_sum

N = 12


def rotation(n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


def lower(n, seed=1):
    """Any lower-triangular C with a positive diagonal; its columns have norms far from one another."""
    rng = np.random.default_rng(seed)
    return np.tril(rng.normal(size=(n, n)), -1) / n + np.diag(rng.uniform(0.5, 2, n))


def tree(n):
    """The binary tree: one row for each dyadic interval of 0..n-1."""
    rows, width = [], 1
    while width <= n:
        rows += [[float(start <= j < start + width) for j in range(n)] for start in range(0, n, width)]
        width *= 2
    return np.array(rows)


def tree_decoder(n):
    """Each prefix as the sum of the fewest intervals of the tree, from left to right."""
    C = tree(n)
    B = np.zeros((n, len(C)))
    for i in range(n):
        start = 0
        while start <= i:
            width = 1
            while start % (2 * width) == 0 and start + 2 * width <= i + 1:
                width *= 2
            row = np.zeros(n)
            row[start : start + width] = 1
            B[i, int(np.flatnonzero((row == C).all(axis=1))[0])] = 1
            start += width
    return B


@pytest.fixture(params=["momentum", "custom"])
def workload(request):
    if request.param == "momentum":
        return momentum(N, beta=0.8, learning_rates=schedule.parse("cooldown", N))
    return custom(np.tril(np.random.default_rng(5).uniform(0.2, 1, (N, N))) + np.eye(N))


# --- what is stored is what was given ---------------------------------------------------------------------------


def test_a_lower_triangular_c_is_taken_as_it_is(workload):
    """To the last bit; nothing is turned that need not be."""
    C = lower(N)
    found = strategy_of({"C": C}, workload)
    assert found.rotation == "none"
    assert found.strategy.dtype == np.float64
    np.testing.assert_array_equal(found.strategy.to_dense(), C)


@pytest.mark.parametrize("kind", ["rotated", "upper", "negative diagonal"])
def test_a_square_c_of_any_form(workload, simulated, kind):
    """C'C, and with it the covariance of the iterates' noise, A C^-1 C^-T A', are kept; by dense NumPy, to 1e-10."""
    C = {"rotated": rotation(N) @ lower(N), "upper": lower(N).T, "negative diagonal": -lower(N)}[kind]
    A = workload.matrix if workload.kind == "custom" else simulated(workload)
    found = strategy_of({"C": C}, workload)
    C_hat = found.strategy.to_dense()
    assert found.rotation == "QL of C"
    assert not np.triu(C_hat, 1).any()
    assert (np.diag(C_hat) > 0).all()
    np.testing.assert_allclose(C_hat.T @ C_hat, C.T @ C, atol=1e-12)
    B, B_hat = A @ np.linalg.inv(C), found.strategy.decoder(workload)
    np.testing.assert_allclose(B_hat @ B_hat.T, B @ B.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["rotated", "upper"])
def test_figures_are_those_of_the_c_that_was_given(workload, simulated, kind):
    """Sensitivity: the largest column norm of C as given; loss: with the inverse of that very C. To 1e-12."""
    C = {"rotated": rotation(N) @ lower(N), "upper": lower(N).T}[kind]
    A = workload.matrix if workload.kind == "custom" else simulated(workload)
    norm = max(float(np.sqrt((column**2).sum())) for column in C.T)
    found = strategy_of({"C": C}, workload)
    certificate = adopt(workload, found.strategy).certificate
    assert found.sensitivity == pytest.approx(norm, rel=1e-14)
    assert norm * (1 - 1e-13) <= certificate.sensitivity <= norm * (1 + 1e-12)
    assert certificate.loss == pytest.approx(
        norm**2 * (np.linalg.inv(C).T @ A.T @ A @ np.linalg.inv(C)).trace(), rel=1e-9
    )
    assert certificate.excess > 0.01
    # the wrong way round, C C' kept instead, has another sensitivity
    wrong = np.linalg.qr(C.T)[1].T
    assert abs(np.linalg.norm(wrong, axis=0).max() / norm - 1) > 1e-3


def test_the_optimum_turned_is_still_the_optimum():
    """A rotated optimal C has the excess of the optimal C, which is none."""
    workload = prefix_sum(32)
    best = compile(workload, Options(strategy="dense"))
    turned = strategy_of({"C": rotation(32) @ best.strategy.to_dense()}, workload)
    assert adopt(workload, turned.strategy).certificate.excess < 1e-9


def test_a_tall_c_gets_its_best_decoder():
    """The binary tree: the error of the pseudoinverse, and the tree's sensitivity, sqrt(levels)."""
    n = 8
    C, A = tree(n), np.tri(n)
    found = strategy_of({"C": C}, prefix_sum(n))
    assert found.rotation == "QL of C"
    assert found.strategy.sensitivity(single()) == pytest.approx(2.0, rel=1e-12)
    B = A @ np.linalg.pinv(C)
    B_hat = found.strategy.decoder(prefix_sum(n))
    np.testing.assert_allclose(B_hat @ B_hat.T, B @ B.T, atol=1e-12)


def test_a_tall_pair_keeps_the_error_of_its_decoder():
    """The tree with its usual decoder: each iterate's noise as B makes it, and no column of C longer than before."""
    n = 8
    B, C = tree_decoder(n), tree(n)
    np.testing.assert_array_equal(B @ C, np.tri(n))
    found = strategy_of({"B": B, "C": C}, prefix_sum(n))
    assert found.rotation == "LQ of B"
    B_hat = found.strategy.decoder(prefix_sum(n))
    np.testing.assert_allclose(B_hat @ B_hat.T, B @ B.T, atol=1e-12)
    assert (found.strategy.column_norms() <= np.linalg.norm(C, axis=0) * (1 + 1e-12)).all()
    assert found.sensitivity == 2.0  # of the tree: four levels


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_square_pair(workload, dtype):
    """Also in float32, whose product is A to seven digits only."""
    C = (rotation(N) @ lower(N)).astype(dtype)
    B = (workload.dense() @ np.linalg.inv(C.astype(np.float64))).astype(dtype)
    found = strategy_of({"B": B, "C": C}, workload)
    norms = np.linalg.norm(C.astype(np.float64), axis=0)
    np.testing.assert_allclose(found.strategy.column_norms(), norms, rtol=1e-12)


@settings(max_examples=60)
@hypothesis.given(n=st.integers(1, 7), extra=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_any_c_keeps_its_column_norms(n, extra, seed):
    """Hypothesis: m x n with m >= n, well conditioned by construction; C'C to 1e-11."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(n + extra, n)))[0]
    C = left * rng.uniform(0.1, 10, n) @ np.linalg.qr(rng.normal(size=(n, n)))[0]
    C_hat = strategy_of({"C": C}, prefix_sum(n)).strategy.to_dense()
    np.testing.assert_allclose(C_hat.T @ C_hat, C.T @ C, rtol=1e-11, atol=1e-9)


def test_float32_is_cast_before_the_figures():
    """The sensitivity is that of the cast coefficients, above that of C or below."""
    C = lower(N)
    found = strategy_of({"C": C}, prefix_sum(N), "float32").strategy
    cast = np.linalg.norm(C.astype(np.float32).astype(np.float64), axis=0).max()
    assert found.dtype == np.float32
    assert cast <= found.sensitivity(single()) <= cast * (1 + 1e-12)


# --- what is refused --------------------------------------------------------------------------------------------

GOOD = lower(4)
NAN, COLUMN = GOOD.copy(), GOOD.copy()
NAN[2, 1], COLUMN[:, 1] = np.nan, 0
BAD = {
    "wide": (GOOD[:3], r"shape \(3, 4\)"),
    "other n": (lower(5), "5, 5"),
    "a row": (GOOD[0], "matrix"),
    "a cube": (np.ones((4, 4, 4)), "matrix"),
    "empty": (np.zeros((0, 0)), "matrix"),
    "nan": (NAN, "row 2, column 1"),
    "infinite": (np.where(GOOD > 1, np.inf, GOOD), "finite"),
    "complex": (GOOD + 0j, "complex128"),
    "booleans": (np.eye(4, dtype=bool), "bool"),
    "text": (np.full((4, 4), "a"), "real numbers"),
    "zero column": (COLUMN, "rank|singular"),
    "equal columns": (np.ones((4, 4)), "rank"),
    "zero on the diagonal": (np.tri(4) - np.diag([0, 0, 1.0, 0]), "step 2.*singular"),
    "nearly singular": (np.diag([1, 1, 1, 1e-18]), "singular to working precision"),
    "tiny": (1e-200 * GOOD, "scale C"),
    "huge": (1e200 * GOOD, "scale C"),
}


@pytest.mark.parametrize("name", BAD)
def test_c_that_is_no_strategy(name):
    C, match = BAD[name]
    with pytest.raises(WorkloadError, match=match):
        strategy_of({"C": C}, prefix_sum(4))


def test_too_large_for_the_dense_form():
    with pytest.raises(CapacityError, match="9000"):
        strategy_of({"C": np.ones((1, 1))}, prefix_sum(9000))


@pytest.mark.parametrize("factor", [-1, 0, 2, 1 + 3 * PRODUCT_TOLERANCE, np.inf, np.nan])
def test_b_c_that_is_not_a(factor):
    """A factor of 1 + 3e-5 is refused, one of 1 + 3e-6 is not."""
    with np.errstate(invalid="ignore"):
        B = factor * np.tri(4) @ np.linalg.inv(GOOD)
    with pytest.raises(WorkloadError, match=r"not the workload's A|finite"):
        strategy_of({"B": B, "C": GOOD}, prefix_sum(4))
    within = (1 + PRODUCT_TOLERANCE / 3) * np.tri(4) @ np.linalg.inv(GOOD)
    assert strategy_of({"B": within, "C": GOOD}, prefix_sum(4)).rotation == "none"


def test_factors_of_another_workload():
    """A forgotten option of the optimizer is found by B C, and by the file's A."""
    A = momentum(4, beta=0.9).dense()
    described = momentum(4, beta=0.95)
    for factors in ({"B": A @ np.linalg.inv(GOOD)}, {"A": A}):
        with pytest.raises(WorkloadError, match="all options of its optimizer"):
            strategy_of({**factors, "C": GOOD}, described)
    with pytest.raises(WorkloadError, match="shape"):
        strategy_of({"A": np.tri(3), "C": GOOD}, prefix_sum(4))
    with pytest.raises(WorkloadError, match="n x m"):
        strategy_of({"B": np.ones((4, 5)), "C": GOOD}, prefix_sum(4))


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.npy", "c.csv", "c.npz", "pair.npz", "all.npz"])
def test_files(tmp_path, name):
    path = tmp_path / name
    B = np.tri(4) @ np.linalg.inv(GOOD)
    if name.endswith(".npy"):
        np.save(path, GOOD)
    elif name.endswith(".csv"):
        np.savetxt(path, GOOD, delimiter=",", fmt="%.17g")
    else:
        arrays = {"c.npz": {"anything": GOOD}, "pair.npz": {"B": B, "C": GOOD}}
        arrays["all.npz"] = {"A": np.tri(4), "B": B, "C": GOOD, "losses of a run": np.ones(3)}
        np.savez(path, **arrays[name])
    found = read_factors(path)
    assert set(found) == {"pair.npz": {"B", "C"}, "all.npz": {"A", "B", "C"}}.get(name, {"C"})
    np.testing.assert_array_equal(found["C"], GOOD)


def bytes_of(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


FILES = {
    "missing.npy": (None, "cannot be read"),
    "missing.npz": (None, "cannot be read"),
    "c.txt": (b"1", "npz"),
    "pickled.npz": (bytes_of(C=np.array([[1, None]], object)), "pickle"),
    "text.npz": (b"no archive", "does not hold arrays"),
    "empty.npz": (bytes_of(), "which is the strategy"),
    "which.npz": (bytes_of(X=GOOD, Y=GOOD), "which is the strategy"),
    "decoder.npz": (bytes_of(B=GOOD), "which is the strategy"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_no_factorization(tmp_path, name):
    content, match = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=match):
        read_factors(tmp_path / name)


def test_a_pickled_npy(tmp_path):
    np.save(tmp_path / "c.npy", np.array([[1, None]], object))
    with pytest.raises(WorkloadError, match="pickle"):
        read_factors(tmp_path / "c.npy")


@pytest.mark.parametrize(("descr", "shape"), [("<f8", "(15000, 15000)"), ("<U400000000", "()")])
def test_an_entry_that_would_unpack_to_gigabytes(tmp_path, monkeypatch, descr, shape):
    """Refused by what its header and the archive say, before any of it is unpacked; the limit is lowered here."""
    monkeypatch.setattr(given, "LARGEST_MEMBER", 1 << 20)
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    body = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "c.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("C.npy", body + bytes(0 if shape != "()" else 1 << 21))
    with pytest.raises(CapacityError, match=r"15000|GiB"):
        read_factors(tmp_path / "c.npz")


# --- a strategy's own coefficients ------------------------------------------------------------------------------

STRATEGIES = {
    "dense": Options(strategy="dense"),
    "dense, float32": Options(strategy="dense", dtype="float32"),
    "buffered": Options(buffers=2),
    "low rank": Options(strategy="banded-low-rank", bandwidth=3, rank=2),
    "wide band": Options(strategy="banded-low-rank", bandwidth=N),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def compiled(request):
    return compile(momentum(N), STRATEGIES[request.param])


def own(strategy):
    return {f"strategy.{name}": array for name, array in strategy.coefficients().items() if array.size}


@pytest.mark.parametrize("order", ["=", ">"])
def test_coefficients_come_back_as_they_were(compiled, order):
    """Bit for bit, in the bytes of either machine, with the same certificate."""
    arrays = {name: array.astype(array.dtype.newbyteorder(order)) for name, array in own(compiled.strategy).items()}
    found = strategy_of(arrays, compiled.workload)
    assert (found.rotation, found.sensitivity) == ("none", None)
    assert found.strategy.kind == compiled.strategy.kind
    for name, array in compiled.strategy.coefficients().items():
        back = found.strategy.coefficients()[name]
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    again = adopt(compiled.workload, found.strategy)
    assert again.certificate == compiled.certificate
    assert again.origin == "given"


def test_coefficients_that_make_no_strategy(compiled):
    arrays = own(compiled.strategy)
    with pytest.raises(WorkloadError, match="leave --dtype"):
        strategy_of(arrays, compiled.workload, "float32")
    with pytest.raises(WorkloadError, match="not those of one strategy"):
        strategy_of({**arrays, "strategy.x": np.ones(N)}, compiled.workload)
    with pytest.raises(MmfactError, match="steps"):
        strategy_of(arrays, momentum(N + 1))
    first = next(iter(arrays))
    with pytest.raises(MmfactError):
        strategy_of({**arrays, first: np.full_like(arrays[first], np.nan)}, compiled.workload)
    with pytest.raises(MmfactError):
        strategy_of({**arrays, first: arrays[first] + 0j}, compiled.workload)


def about(workload, **changes):
    return np.array(json.dumps({"workload": {**workload.spec(), **changes}}))


def test_a_file_says_what_it_was_made_for():
    workload = prefix_sum(4)
    assert strategy_of({"C": GOOD, "about": about(workload)}, workload).rotation == "none"
    with pytest.raises(WorkloadError, match="'schedule': 'cooldown'"):
        strategy_of({"C": GOOD, "about": about(workload, schedule="cooldown")}, workload)


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "{}", '{"workload": 3}', '{"workload": {"kind": "sgd"}}', "[" * 10**5, '{"workload": null}'],
    ids=lambda text: text[:20],
)
def test_an_about_that_is_none(text):
    with pytest.raises(WorkloadError, match="leave it out"):
        strategy_of({"C": GOOD, "about": np.array(text)}, prefix_sum(4))
    with pytest.raises(WorkloadError, match="leave it out"):
        strategy_of({"C": GOOD, "about": np.arange(3.0)}, prefix_sum(4))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path, data):
    """Any one byte of an honest file changed: an error of ours, or arrays of other numbers."""
    content = data.draw(st.sampled_from([bytes_of(B=np.tri(4) @ np.linalg.inv(GOOD), C=GOOD), bytes_of(C=GOOD)]))
    place, value = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 255))
    (tmp_path / "c.npz").write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
    with contextlib.suppress(MmfactError):
        strategy_of(read_factors(tmp_path / "c.npz"), prefix_sum(4))
