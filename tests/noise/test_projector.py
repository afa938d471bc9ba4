"""Projectors against dense float64 arithmetic: eigh of the p x p second moment, SVDs, norms of p x p matrices.

What is stored is rounded: to 2^-25 of an element in float32, to 2^-12 in float16. A test that allows 1e-6 (float32) or
2e-3 (float16) allows little else.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import MmfactError, ProjectorError
from mmfact.noise import projector as module
from mmfact.noise.projector import (
    Projector,
    explained_energy,
    random_projector,
    reconstruction_error,
    subspace_distance,
    top_eigenspace,
)
from mmfact.noise.release import Shard

Array = np.ndarray

SHAPES = {"bias": (7,), "weight": (5, 9), "kernel": (2, 3, 4), "scale": ()}
P_SIZE = 77  # elements of SHAPES
PRECISION = {"float32": 1e-6, "float16": 2e-3}
numeric = pytest.mark.parametrize("library", ["numpy", "torch"])
stored = pytest.mark.parametrize("storage", PRECISION)
solved = pytest.mark.parametrize("method", ["gram", "lanczos"])


# --- the truth, dense -------------------------------------------------------------------------------


def gradients(m: int, p: int = P_SIZE, ratio: float = 1e-3, seed: int = 0) -> Array:
    """P with the eigenvalues 1 .. ratio of P'P/m, each the same part of the one before."""
    random = np.random.default_rng(seed)
    r = min(m, p)
    U, _ = np.linalg.qr(random.standard_normal((m, r)))
    W, _ = np.linalg.qr(random.standard_normal((p, r)))
    return (U * np.sqrt(m * np.geomspace(1, ratio, r))) @ W.T


def dense(P: Array, k: int) -> tuple[Array, Array]:
    """V, p x k, and all p eigenvalues of P'P/m, descending."""
    P = np.asarray(P, np.float64)
    values, vectors = np.linalg.eigh(P.T @ P / len(P))
    return vectors[:, ::-1][:, :k], values[::-1]


def whole(projector: Projector) -> Array:
    """V, p x k, in float64, as it is stored."""
    return projector.scale * dense_rows(dict(projector.basis)).T


def between(V: Array, W: Array) -> float:
    return float(np.linalg.norm(V @ V.T - W @ W.T, 2))


def off_orthonormal(V: Array) -> float:
    return float(np.abs(V.T @ V - np.eye(V.shape[1])).max())


def named(rows: Array, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Array]:
    """(..., p) split into parts of the shapes, in their order."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    pieces = np.split(rows, ends[:-1], axis=-1)
    lead = rows.shape[:-1]
    return {name: piece.reshape((*lead, *shapes[name])) for name, piece in zip(shapes, pieces, strict=True)}


def flat(vector: Any) -> Array:
    parts = vector.values() if isinstance(vector, dict) else [vector]
    return np.concatenate([np.asarray(part.tolist(), np.float64).reshape(-1) for part in parts])


def dense_rows(public: Any) -> Array:
    """m x p in float64."""
    parts = public.values() if isinstance(public, dict) else [public]
    return np.concatenate(
        [np.asarray(p.tolist(), np.float64).reshape(len(p), math.prod(p.shape[1:])) for p in parts], 1
    )


def as_library(given: Any, library: str, dtype: str = "float64") -> Any:
    if isinstance(given, dict):
        return {name: as_library(part, library, dtype) for name, part in given.items()}
    return given.astype(dtype) if library == "numpy" else torch.tensor(given, dtype=getattr(torch, dtype))


# --- V -------------------------------------------------------------------------------------------------


@stored
@solved
@pytest.mark.parametrize("form", ["array", "named"])
@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float64"), ("numpy", "float32"), ("numpy", "float16"), ("torch", "float64"), ("torch", "float32"),
     ("torch", "bfloat16"), ("torch", "float16")],
)  # fmt: skip
def test_vectors_are_the_dense_eigenvectors(library: str, dtype: str, form: str, method: str, storage: str) -> None:
    """Of the gradients as their precision holds them."""
    m, k = 12, 5
    rows = gradients(m)
    public = as_library(named(rows) if form == "named" else rows, library, dtype)
    P = dense_rows(public)
    found = top_eigenspace(public, k, method=method, storage=storage)
    V, values = dense(P, k)
    assert between(whole(found), V) <= PRECISION[storage]
    assert np.allclose(found.eigenvalues, values[:k], rtol=1e-10, atol=0)
    assert np.allclose(found.spectrum, values[: len(found.spectrum)], rtol=0, atol=1e-10)
    assert len(found.spectrum) == (m if method == "gram" else k + 1)
    assert found.gap == pytest.approx(values[k - 1] - values[k], rel=1e-9)
    assert found.energy == pytest.approx(values.sum(), rel=1e-12)
    assert found.explained == pytest.approx(values[:k].sum() / values.sum(), rel=1e-10)
    assert (found.k, found.examples, found.kind) == (k, m, "eigen")
    assert found.rank == (m if method == "gram" else k + 1)
    assert found.storage == storage
    assert list(found.basis) == (list(SHAPES) if form == "named" else [""])
    assert {type(part) for part in found.basis.values()} == {np.ndarray if library == "numpy" else torch.Tensor}
    assert {str(part.dtype).removeprefix("torch.") for part in found.basis.values()} == {storage}


@numeric
@solved
def test_each_vector_is_the_eigenvector_of_its_eigenvalue(library: str, method: str) -> None:
    """Not only the space that they span: row j of the basis, up to its sign."""
    P = gradients(15)
    V, _ = dense(P, 6)
    found = whole(top_eigenspace(as_library(P, library), 6, method=method))
    assert np.abs(np.abs((V * found).sum(axis=0)) - 1).max() <= 1e-6


@numeric
@stored
@solved
def test_as_many_vectors_as_examples(library: str, storage: str, method: str) -> None:
    """k = m: the row space; the gap is the last eigenvalue, since the next one is zero."""
    P = gradients(9)
    found = top_eigenspace(as_library(P, library), 9, storage=storage, method=method)
    _, _, Wt = np.linalg.svd(P, full_matrices=False)
    assert between(whole(found), Wt.T) <= PRECISION[storage]
    assert found.gap == pytest.approx(dense(P, 9)[1][8], rel=1e-9)
    assert found.explained == pytest.approx(1, abs=1e-12)
    one = top_eigenspace(as_library(P[:1], library), 1, storage=storage, method=method)
    assert between(whole(one), P[:1].T / np.linalg.norm(P[0])) <= PRECISION[storage]


def test_more_examples_than_elements() -> None:
    P = np.random.default_rng(2).standard_normal((40, 6))
    found = top_eigenspace(P, 3)
    V, values = dense(P, 3)
    assert between(whole(found), V) <= 1e-6
    assert found.rank == 6
    assert np.allclose(found.spectrum[:6], values, rtol=1e-10)
    assert np.abs(found.spectrum[6:]).max() <= 1e-14
    assert between(whole(top_eigenspace(P, 6)), np.eye(6)) <= 1e-6
    assert top_eigenspace(P, 6).gap == pytest.approx(values[5], rel=1e-9)


def test_lanczos_from_many_examples_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the Gram matrix up to LARGEST_GRAM examples; beyond, the answer is the same."""
    asked = []
    real = module._lanczos
    monkeypatch.setattr(module, "_lanczos", lambda *given: asked.append(given) or real(*given))
    P = gradients(30)
    assert len(top_eigenspace(P, 4).spectrum) == 30
    assert not asked
    monkeypatch.setattr(module, "LARGEST_GRAM", 29)
    found = top_eigenspace(P, 4)
    assert len(asked) == 1
    assert between(whole(found), dense(P, 4)[0]) <= 1e-6


@numeric
@pytest.mark.parametrize("form", ["strided", "fortran", "expanded"])
def test_gradients_that_are_not_contiguous(library: str, form: str) -> None:
    rows = gradients(10, 24)
    P: Any = as_library(rows, library)
    if form == "strided":
        wide = np.zeros((20, 48))
        wide[::2, ::2] = rows
        P = as_library(wide, library)[::2, ::2]
    elif form == "fortran":
        P = as_library(np.ascontiguousarray(rows.T), library).T
    else:
        row = as_library(rows[:1], library)
        P = np.broadcast_to(row, (10, 24)) if library == "numpy" else row.expand(10, 24)
        rows = np.repeat(rows[:1], 10, axis=0)
    k = 1 if form == "expanded" else 4
    assert between(whole(top_eigenspace(P, k)), dense(rows, k)[0]) <= 1e-6


def test_gradients_that_autograd_still_follows() -> None:
    P = gradients(8, 12)
    found = top_eigenspace(torch.tensor(P, requires_grad=True), 3)
    assert not found.basis[""].requires_grad
    assert not found.project(torch.ones(12, requires_grad=True)).requires_grad
    assert between(whole(found), dense(P, 3)[0]) <= 1e-6


@numeric
def test_more_elements_than_are_made_float64_at_a_time(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3 columns, which do not divide 77."""
    P = gradients(9)
    g = np.random.default_rng(1).standard_normal(P_SIZE)
    monkeypatch.setattr(module, "_PIECE", 30)
    V, _ = dense(P, 4)
    for method in ("gram", "lanczos"):
        for storage, close in PRECISION.items():
            found = top_eigenspace(as_library(P, library), 4, method=method, storage=storage)
            assert between(whole(found), V) <= close
            for dtype in ("float64", "float32"):
                projected = flat(found.project(as_library(g, library, dtype)))
                assert np.abs(projected - V @ (V.T @ g)).max() <= 4 * close


@numeric
def test_same_gradients_in_other_parts_and_units(library: str) -> None:
    """Units that would leave float16's range, or float32's when they are squared."""
    P = gradients(10, ratio=0.1)
    V, values = dense(P, 4)
    for unit in (1e-30, 1e-6, 1e12, 1e25):
        found = top_eigenspace(as_library(unit * P, library, "float32"), 4, storage="float16")
        assert between(whole(found), V) <= 2e-3
        assert np.allclose(found.eigenvalues, unit**2 * values[:4], rtol=1e-6)


# --- rounding ------------------------------------------------------------------------------------------


@numeric
@pytest.mark.parametrize(("ratio", "works_in"), [(1.5e-2, "float32"), (1e-5, "float64")])
def test_in_float32_only_where_that_is_as_good(library: str, ratio: float, works_in: str) -> None:
    """Just on one side of the energy / lambda_k up to which vectors are combined in float32, and far on the other."""
    P = gradients(60, 400, ratio).astype(np.float32)
    V, values = dense(P, 60)
    assert (values.sum() / values[59] <= 1e3) == (works_in == "float32")
    found = whole(top_eigenspace(as_library(P, library, "float32"), 60))
    assert between(found, V) <= 1e-6
    assert off_orthonormal(found) <= 1e-6


@solved
def test_gram_is_in_float64(method: str) -> None:
    """A float32 Gram matrix has eigenvalues wrong by 1e-7 of the largest: worth nothing where the ratio is 1e-8."""
    P = gradients(20, 200, ratio=1e-8).astype(np.float32)
    for k in (10, 20):
        V = whole(top_eigenspace(P, k, method=method))
        assert off_orthonormal(V) <= 1e-6
        assert between(V, np.linalg.svd(P.astype(np.float64), full_matrices=False)[2][:k].T) <= 1e-6


@numeric
@pytest.mark.parametrize(("storage", "most"), [("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("ratio", [1.0, 1e-4, 1e-10, 1e-12])
def test_vectors_are_orthonormal_for_badly_conditioned_gradients(
    library: str, storage: str, most: float, ratio: float
) -> None:
    for m, p in ((20, 300), (60, 61)):
        P = gradients(m, p, ratio=ratio)
        V = whole(top_eigenspace(as_library(P, library), m, storage=storage))
        assert off_orthonormal(V) <= most
        assert between(V, np.linalg.svd(P, full_matrices=False)[2].T) <= most


def test_float16_of_a_large_model() -> None:
    """Elements of a unit vector near 1e-3 of p = 1e6, whose tail float16 could not hold as it is."""
    p = 1_000_000
    random = np.random.default_rng(0)
    P = random.standard_normal((3, p)) * np.geomspace(1, 1e-4, p)
    full, half = (top_eigenspace(P.astype(np.float32), 3, storage=storage) for storage in PRECISION)
    assert off_orthonormal(whole(half)) <= 2e-3
    tail = slice(p // 2, None)
    error = whole(half)[tail] - whole(full)[tail]
    assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(whole(full)[tail])


# --- rank ----------------------------------------------------------------------------------------------


@numeric
@solved
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rank_of_dependent_gradients(library: str, method: str, dtype: str) -> None:
    """Copies, zeros and sums of others add nothing; k above says what there is."""
    rows = np.random.default_rng(5).standard_normal((5, P_SIZE)).astype(dtype)
    P = np.concatenate([rows, rows[:3], np.zeros((2, P_SIZE)), rows[1:2] + rows[2:3], 4 * rows[:1], -rows[4:]])
    public = as_library(P, library, dtype)
    found = top_eigenspace(public, 5, method=method)
    assert found.rank == 5
    assert off_orthonormal(whole(found)) <= 1e-6
    assert between(whole(found), np.linalg.qr(rows.astype(np.float64).T)[0]) <= 1e-6
    for k in (6, 7, 9):
        with pytest.raises(ProjectorError, match=f"k = {k} is above the rank of the 13 public gradients, 5"):
            top_eigenspace(public, k, method=method)


def test_rank_beyond_which_there_is_rounding_only() -> None:
    """Sums in float32 depend on each other but for rounding, 1e-15 of the energy; an honest 1e-12 is none."""
    random = np.random.default_rng(3)
    P = random.standard_normal((20, 6)).astype(np.float32) @ random.standard_normal((6, 2000)).astype(np.float32)
    with pytest.raises(ProjectorError, match="rank of the 20 public gradients, 6:"):
        top_eigenspace(P, 7)
    assert top_eigenspace(gradients(20, 2000, ratio=1e-12), 20).rank == 20


@pytest.mark.parametrize(("m", "k"), [(4, 5), (1, 2), (100, 101)])
def test_more_vectors_than_examples(m: int, k: int) -> None:
    with pytest.raises(ProjectorError, match=f"k = {k} is above the number of public gradients, {m}: give a smaller k"):
        top_eigenspace(np.random.default_rng(0).standard_normal((m, 200)), k)


# --- projection ----------------------------------------------------------------------------------------


@numeric
@pytest.mark.parametrize("form", ["array", "named"])
@pytest.mark.parametrize("storage", PRECISION)
def test_projection_is_dense_idempotent_and_self_adjoint(library: str, form: str, storage: str) -> None:
    """V V'g of float64 gradients."""
    P, close = gradients(12), PRECISION[storage]
    V, _ = dense(P, 5)
    random = np.random.default_rng(4)
    g, h = random.standard_normal((2, P_SIZE))

    def form_of(rows: Array) -> Any:
        return as_library(named(rows) if form == "named" else rows, library)

    found = top_eigenspace(form_of(P), 5, storage=storage)
    once, other = found.project(form_of(g)), found.project(form_of(h))
    norm = np.linalg.norm(g)
    assert np.linalg.norm(flat(once) - V @ (V.T @ g)) <= close * norm
    assert np.linalg.norm(flat(found.project(once)) - flat(once)) <= close * norm
    assert abs(flat(other) @ g - h @ flat(once)) <= 1e-12 * norm * np.linalg.norm(h)
    assert np.linalg.norm(flat(found.project(form_of(V @ np.arange(1.0, 6)))) - V @ np.arange(1, 6)) <= 10 * close
    aside = g - V @ (V.T @ g)
    assert np.linalg.norm(flat(found.project(form_of(aside)))) <= close * norm
    assert np.allclose(np.abs(found.coefficients(form_of(g))), np.abs(V.T @ g), rtol=0, atol=close * norm)
    assert found.coefficients(form_of(g)).dtype == np.float64


@stored
@pytest.mark.parametrize(
    ("library", "dtype", "precision"),
    [("numpy", "float64", 0), ("numpy", "float32", 2e-6), ("numpy", "float16", 2e-3), ("torch", "float64", 0),
     ("torch", "float32", 2e-6), ("torch", "bfloat16", 2e-2), ("torch", "float16", 2e-3)],
)  # fmt: skip
def test_projection_keeps_form_and_precision(library: str, dtype: str, precision: float, storage: str) -> None:
    """Names, their order, shapes, library and precision are the gradient's; it is not written to."""
    P = gradients(12)
    random = np.random.default_rng(4)
    g = random.standard_normal(P_SIZE)
    found = top_eigenspace(as_library(named(P), library, "float32"), 5, storage=storage)
    V = whole(found)
    given = as_library(named(g), library, dtype)
    given = {name: given[name] for name in reversed(given)}
    kept = flat(given)
    result = found.project(given)
    assert list(result) == list(reversed(SHAPES))
    assert np.array_equal(flat(given), kept)
    for name, part in result.items():
        assert type(part) is type(given[name])
        assert part.dtype == given[name].dtype
        assert tuple(part.shape) == SHAPES[name]
    seen = flat({name: given[name] for name in SHAPES})
    wanted = V @ (V.T @ seen)
    assert np.abs(flat({name: result[name] for name in SHAPES}) - wanted).max() <= precision + 1e-14


@numeric
def test_parts_of_several_precisions(library: str) -> None:
    """Each part of a gradient in its own, as a model of mixed precision has them."""
    P = gradients(12)
    found = top_eigenspace(as_library(named(P), library), 5)
    g = np.random.default_rng(4).standard_normal(P_SIZE)
    given = {
        name: as_library(part, library, dtype)
        for (name, part), dtype in zip(named(g).items(), ("float64", "float16", "float32", "float64"), strict=True)
    }
    result = found.project(given)
    assert all(part.dtype == given[name].dtype for name, part in result.items())
    V = whole(found)
    assert np.abs(flat(result) - V @ (V.T @ flat(given))).max() <= 2e-3


@numeric
def test_gradients_in_any_memory_order(library: str) -> None:
    P, g = gradients(12, 24), np.random.default_rng(4).standard_normal((4, 6))
    found = top_eigenspace(as_library(P, library), 5)
    V, _ = dense(P, 5)
    wanted = (V @ (V.T @ g.ravel())).reshape(4, 6)
    strided = as_library(np.repeat(g, 2, axis=1), library)[:, ::2]
    turned = as_library(np.ascontiguousarray(g.T), library).T
    for form in (strided, turned):
        result = found.project(form)
        assert tuple(result.shape) == (4, 6)
        assert np.abs(np.asarray(result) - wanted).max() <= 1e-5


def test_float64_gradients_are_projected_in_float64() -> None:
    """By vectors of float32: what is lost is their rounding only, and a second projection by the same is exact."""
    P = gradients(12, 500)
    found = top_eigenspace(P, 5)
    V, g = whole(found), 1e6 + np.random.default_rng(1).standard_normal(500)
    assert np.abs(found.project(g) - V @ (V.T @ g)).max() <= 1e-9


def test_coefficients_and_their_combination() -> None:
    P, g = gradients(12), np.random.default_rng(4).standard_normal(P_SIZE)
    found = top_eigenspace(named(P), 5, storage="float16")
    c = found.coefficients(named(g))
    assert np.allclose(c, whole(found).T @ g, rtol=0, atol=1e-12)
    assert np.array_equal(flat(found.combine(c, named(g))), flat(found.project(named(g))))
    assert np.allclose(flat(found.combine(np.eye(5)[2], named(g))), whole(found)[:, 2], rtol=0, atol=1e-15)


# --- shards --------------------------------------------------------------------------------------------


class Meeting:
    """As many threads as processes, which meet at every sum; a thread that raises sends all home."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=20)
        self.given: list[Any] = [None] * count
        self.shapes: list[tuple[int, ...]] = []

    def exchange(self, rank: int, array: Array) -> list[Array]:
        self.given[rank] = array.copy()
        if rank == 0:
            self.shapes.append(array.shape)
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class Process:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def sum(self, array: Array) -> Array:
        everything = self.meeting.exchange(self.rank, array)
        return sum(everything[1:], everything[0].copy())

    def first(self, array: Array) -> Array:
        return self.meeting.exchange(self.rank, array)[0].copy()


def together(count: int, work: Callable[[int, Process], Any]) -> tuple[list[Any], Meeting]:
    """What work(rank, shards) gives in each of `count` threads: a result, or the exception that it raised."""
    meeting, results = Meeting(count), [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Process(meeting, rank))
        except MmfactError as error:  # which all raise, or the others wait in vain
            results[rank] = error
        except BaseException as error:
            meeting.barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, MmfactError):
            raise result
    return results, meeting


CUTS = {"one": [0, 77], "uneven": [0, 3, 50, 77], "empty": [0, 40, 40, 77], "many": [0, 1, 2, 10, 11, 70, 77]}
cut = pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)


def pieces(rows: Array, cuts: list[int]) -> list[Array]:
    return [rows[..., first:end] for first, end in itertools.pairwise(cuts)]


@cut
@numeric
@solved
@stored
def test_shards_make_the_whole_projector(cuts: list[int], library: str, method: str, storage: str) -> None:
    """1e-5, vectors, figures and projections; of matrices only Gram matrices are exchanged, never anything of p."""
    P, other = gradients(30), gradients(30, seed=1)
    g = np.random.default_rng(4).standard_normal(P_SIZE)
    alone, beside = (top_eigenspace(as_library(rows, library), 5, storage=storage) for rows in (P, other))

    def work(rank: int, shards: Process) -> Any:
        mine = [as_library(pieces(rows, cuts)[rank], library) for rows in (P, other, g)]
        one = top_eigenspace(mine[0], 5, method=method, storage=storage, shards=shards)
        two = top_eigenspace(mine[1], 5, method=method, storage=storage, shards=shards)
        figures = (
            subspace_distance(one, two, shards),
            explained_energy(one, mine[1], shards),
            reconstruction_error(one, mine[1], shards),
        )
        return one, one.project(mine[2], shards), figures

    found, meeting = together(len(cuts) - 1, work)
    close = 1e-5 if storage == "float32" else 2e-3
    V = np.concatenate([whole(one) for one, _, _ in found])
    assert between(V, dense(P, 5)[0]) <= close
    assert off_orthonormal(V) <= close
    assert np.abs(np.concatenate([flat(part) for _, part, _ in found]) - flat(alone.project(as_library(g, library)))
                  ).max() <= close  # fmt: skip
    figures = (
        subspace_distance(alone, beside),
        explained_energy(alone, as_library(other, library)),
        reconstruction_error(alone, as_library(other, library)),
    )
    for one, _, seen in found:
        assert np.allclose(seen, figures, rtol=0, atol=close)
        assert one.scale == alone.scale
        assert one.energy == pytest.approx(alone.energy, rel=1e-12)
        assert np.allclose(one.eigenvalues, alone.eigenvalues, rtol=1e-10)
        assert (one.rank, one.gap) == (found[0][0].rank, found[0][0].gap)
    assert all(math.prod(shape) <= 30 * 30 for shape in meeting.shapes)


@cut
def test_shards_of_named_parts_badly_conditioned(cuts: list[int]) -> None:
    """Each process has a slice of every part, of some nothing; the vectors are made orthonormal together."""
    P = gradients(20, ratio=1e-11)

    def work(rank: int, shards: Process) -> Any:
        mine = pieces(P, cuts)[rank]
        middle = mine.shape[1] // 3
        return top_eigenspace({"a": mine[:, :middle], "b": mine[:, middle:]}, 20, shards=shards)

    found, _ = together(len(cuts) - 1, work)
    V = np.concatenate([whole(part) for part in found])
    assert off_orthonormal(V) <= 1e-5
    assert between(V, np.linalg.svd(P, full_matrices=False)[2].T) <= 1e-5


def test_processes_whose_eigenvectors_have_other_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another processor's LAPACK may give them: V V' would mix v and -v."""
    real = np.linalg.eigh

    def eigh(matrix: Array) -> tuple[Array, Array]:
        values, vectors = real(matrix)
        return values, vectors if threading.current_thread().name == "0" else -vectors

    monkeypatch.setattr(np.linalg, "eigh", eigh)
    P, cuts = gradients(10), CUTS["uneven"]
    found, _ = together(3, lambda rank, shards: top_eigenspace(pieces(P, cuts)[rank], 4, shards=shards))
    monkeypatch.undo()
    assert between(np.concatenate([whole(part) for part in found]), dense(P, 4)[0]) <= 1e-6


def test_refused_by_all_processes() -> None:
    """One holds the NaN, one has nothing but zeros: no process goes on alone and waits for the others."""
    P = gradients(6)
    P[4, 60] = np.nan
    errors, _ = together(2, lambda rank, shards: top_eigenspace(pieces(P, [0, 50, 77])[rank], 2, shards=shards))
    assert [type(error) for error in errors] == [ProjectorError] * 2
    assert all("public example 4 " in str(error) for error in errors)
    P[4, 60], P[:, :50] = 0, 0
    found, _ = together(2, lambda rank, shards: top_eigenspace(pieces(P, [0, 50, 77])[rank], 2, shards=shards))
    assert between(np.concatenate([whole(part) for part in found]), dense(P, 2)[0]) <= 1e-6
    errors, _ = together(2, lambda rank, shards: top_eigenspace(pieces(0 * P, [0, 50, 77])[rank], 2, shards=shards))
    assert all("all 6 public gradients are zero" in str(error) for error in errors)


# --- random --------------------------------------------------------------------------------------------


@stored
def test_random_directions_are_orthonormal(storage: str) -> None:
    for sizes, k in ((P_SIZE, 5), (P_SIZE, P_SIZE), ({"a": 200, "b": 1, "c": 99}, 60), (1, 1)):
        found = random_projector(sizes, k, seed=b"seed", storage=storage)
        V = whole(found)
        assert off_orthonormal(V) <= (1e-5 if storage == "float32" else 2e-3)
        g = np.random.default_rng(0).standard_normal(len(V))
        given = named(g, {name: (size,) for name, size in sizes.items()}) if isinstance(sizes, dict) else g
        assert np.abs(flat(found.project(given)) - V @ (V.T @ g)).max() <= 1e-12
    assert (found.kind, found.rank, found.examples) == ("random", 0, 0)
    assert found.gap is found.explained is None


def test_random_directions_that_nearly_depend_on_each_other() -> None:
    """A seed, one of 50,000 tried, whose 6 Gaussian vectors of 6 elements have condition number 8e6."""
    assert np.linalg.cond(whole(random_projector(6, 6, seed=b"49359", plain=True))) > 1e6
    assert off_orthonormal(whole(random_projector(6, 6, seed=b"49359"))) <= 1e-5


@stored
def test_plain_random_directions_span_the_same_space(storage: str) -> None:
    straight = random_projector({"a": 60, "b": 40}, 12, seed=b"seed", storage=storage)
    plain = random_projector({"a": 60, "b": 40}, 12, seed=b"seed", plain=True, storage=storage)
    assert plain.kind == "random-plain"
    Q, _ = np.linalg.qr(whole(plain))
    assert between(whole(straight), Q) <= (1e-5 if storage == "float32" else 4e-3)
    assert off_orthonormal(whole(plain)) > 0.5


def test_plain_random_projection_is_the_identity_on_average(covariance_bound: Any) -> None:
    """Entries of variance 1/k: sqrt(k) times the vectors of 400 seeds are 4000 Gaussian columns of covariance I.

    The bound holds for each of the 210 entries of the mean of V V', with a false alarm of 1e-6 altogether.
    """
    p, k, seeds = 20, 10, 400
    drawn = [whole(random_projector(p, k, seed=b"%d" % seed, plain=True)) for seed in range(seeds)]
    mean = sum(V @ V.T for V in drawn) / seeds
    assert (np.abs(mean - np.eye(p)) <= covariance_bound(np.eye(p), k * seeds, 1e-6)).all()


def test_random_directions_favour_none(covariance_bound: Any) -> None:
    """E[V V'] = (k/p) I for orthonormal ones, entries of V V' in [-1, 1]: Hoeffding over 600 seeds, 1e-6 altogether."""
    p, k, seeds = 8, 3, 600
    drawn = [whole(random_projector(p, k, seed=b"%d" % seed)) for seed in range(seeds)]
    mean = sum(V @ V.T for V in drawn) / seeds
    assert np.abs(mean - k / p * np.eye(p)).max() <= math.sqrt(2 * math.log(2 * 36 / 1e-6) / seeds)


@cut
@pytest.mark.parametrize("plain", [False, True])
def test_random_shards_are_the_whole(cuts: list[int], plain: bool) -> None:
    """Each element the same whatever part of it is drawn: exactly if plain, else to the rounding of a sum."""
    alone = random_projector({"a": 77, "b": 5}, 6, seed=b"seed", plain=plain)

    def work(rank: int, shards: Process) -> Projector:
        places = {
            "a": Shard(cuts[rank + 1] - cuts[rank], offset=cuts[rank], total=77),
            "b": Shard(5 if rank == 0 else 0, total=5),
        }
        return random_projector(places, 6, seed=b"seed", plain=plain, shards=shards)

    found, _ = together(len(cuts) - 1, work)
    a = np.concatenate([part.basis["a"] for part in found], axis=1)
    assert np.abs(a - alone.basis["a"]).max() <= (0 if plain else 1e-6)
    assert np.abs(found[0].basis["b"] - alone.basis["b"]).max() <= (0 if plain else 1e-6)
    assert between(np.concatenate([whole(part) for part in found]), whole(alone)[np.r_[: cuts[1], 77:82, cuts[1] : 77]]
                   ) <= 1e-5  # fmt: skip


def test_random_directions_differ_by_seed_name_vector_and_part() -> None:
    draw = [
        random_projector({"a": 64, "b": 64}, 2, seed=seed, plain=True).basis[name][j].tobytes()
        for seed in (b"", b"one", b"two")
        for name in "ab"
        for j in range(2)
    ]
    assert len(set(draw)) == len(draw)
    again = random_projector({"a": 64, "b": 64}, 2, seed=b"one", plain=True)
    assert again.basis["a"][0].tobytes() == draw[4]


# --- properties ----------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Array, int, str, str]:
    """Public gradients in any form, the same dense, k, storage and method."""
    m = draw(st.integers(1, 9))
    shapes = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=4), st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4
        )
    )
    library = draw(st.sampled_from(["numpy", "torch"]))
    dtypes = ["float64", "float32", "float16", *(["bfloat16"] if library == "torch" else [])]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scales = 10.0 ** random.uniform(-draw(st.integers(0, 2)), 0, size=(m, 1))
    public = {
        name: as_library(
            (scales * random.standard_normal((m, math.prod(shape)))).reshape(m, *shape),
            library,
            draw(st.sampled_from(dtypes)),
        )
        for name, shape in shapes.items()
    }
    if draw(st.booleans()):
        public = next(iter(public.values()))
    P = dense_rows(public)
    k = draw(st.integers(1, m))
    return public, P, k, draw(st.sampled_from(list(PRECISION))), draw(st.sampled_from(["auto", "gram", "lanczos"]))


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_form_gives_an_orthogonal_projection_that_keeps_most(problem: Any, seed: int) -> None:
    """Or says that there is no such: of k orthonormal vectors those that keep the k largest eigenvalues (Ky Fan)."""
    public, P, k, storage, method = problem
    if not isinstance(public, dict) and len(public.shape) < 2:
        with pytest.raises(ProjectorError, match="with a row for each example"):
            top_eigenspace(public, k)
        return
    rank = int(np.linalg.matrix_rank(P, tol=1e-6 * max(np.linalg.norm(P), 1e-300))) if P.size else 0
    if k > rank:
        with pytest.raises(ProjectorError, match=f", {rank}: give a smaller k" if rank else "are zero"):
            top_eigenspace(public, k, method=method, storage=storage)
        return
    found = top_eigenspace(public, k, method=method, storage=storage)
    V, close = whole(found), 1e-5 if storage == "float32" else 4e-3
    assert off_orthonormal(V) <= close
    values = np.linalg.svd(P, compute_uv=False) ** 2 / len(P)
    assert np.square(P @ V).sum() / len(P) == pytest.approx(values[:k].sum(), rel=close)
    assert explained_energy(found, public) == pytest.approx(values[:k].sum() / values.sum(), abs=close)
    row = np.random.default_rng(seed).integers(len(P))
    parts = public if isinstance(public, dict) else {"": public}
    g = {name: part[row, ...] for name, part in parts.items()}
    once = found.project(g if isinstance(public, dict) else g[""])
    assert np.linalg.norm(flat(once) - V @ (V.T @ P[row])) <= 1e-2 * np.linalg.norm(P[row]) + 1e-12
    for name, part in (once if isinstance(public, dict) else {"": once}).items():
        assert (part.dtype, part.shape) == (g[name].dtype, g[name].shape)


# --- figures -------------------------------------------------------------------------------------------


def turned(V: Array, angle: float, seed: int = 9) -> Array:
    """V with its last vector turned by an angle out of the space."""
    out = np.random.default_rng(seed).standard_normal(len(V))
    out -= V @ (V.T @ out)
    W = V.copy()
    W[:, -1] = math.cos(angle) * V[:, -1] + math.sin(angle) * out / np.linalg.norm(out)
    return W


def holding(V: Array, library: str = "numpy", storage: str = "float32", scale: float = 1.0) -> Projector:
    """A projector with these vectors as they are, in one part."""
    k = V.shape[1]
    basis = as_library(V.T / scale, library, storage)
    return Projector({"": basis}, np.ones(k), np.ones(k), float(k), "eigen", k, k, scale)


@numeric
@pytest.mark.parametrize("storage", ["float32", "float64"])
@pytest.mark.parametrize("angle", [0.0, 1e-6, 1e-5, 1e-3, 0.4, math.pi / 2])
def test_subspace_distance_is_the_dense_norm(library: str, storage: str, angle: float) -> None:
    """And the sine of the angle; as 1 less a sum of squares it would drown below 1e-8, in float32 below 1e-3."""
    V = np.linalg.qr(np.random.default_rng(0).standard_normal((200, 6)))[0]
    W = turned(V, angle)
    W = W @ np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]  # the same space
    one, other = holding(V, library, storage), holding(W, library, storage)
    close = 1e-6 if storage == "float32" else 1e-14
    assert subspace_distance(one, other) == pytest.approx(math.sin(angle), abs=close)
    assert subspace_distance(one, other) == pytest.approx(between(whole(one), whole(other)), abs=close)
    assert subspace_distance(one, other) == pytest.approx(subspace_distance(other, one), abs=close)
    assert subspace_distance(one, one) <= close


def test_subspace_distance_of_float16_and_other_storage() -> None:
    """Each with its own scale; the distance is of what is stored, rounding included."""
    P = gradients(12)
    full, half = (top_eigenspace(P, 5, storage=storage) for storage in PRECISION)
    other = top_eigenspace(gradients(12, seed=1), 5, storage="float16")
    assert half.scale < 1
    assert subspace_distance(full, half) == pytest.approx(between(whole(full), whole(half)), abs=1e-4)
    assert subspace_distance(full, half) <= 2e-3
    assert subspace_distance(half, other) == pytest.approx(between(whole(half), whole(other)), abs=2e-3)
    assert subspace_distance(half, half) <= 2e-3


def test_subspace_distance_of_named_parts_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 20)
    one, other = (top_eigenspace(named(gradients(12, seed=seed)), 5) for seed in (0, 1))
    assert 0.1 < subspace_distance(one, other) <= 1
    nearby = top_eigenspace(named(gradients(12) + 1e-3 * gradients(12, seed=2)), 5)
    assert subspace_distance(one, nearby) == pytest.approx(between(whole(one), whole(nearby)), abs=1e-6)
    assert subspace_distance(one, other) == pytest.approx(between(whole(one), whole(other)), abs=1e-6)


def test_subspaces_of_other_dimension_or_vectors() -> None:
    """Norm 1 for other dimensions, one inside of the other too: as the dense norm is."""
    P = gradients(12)
    one, inside = top_eigenspace(P, 5), top_eigenspace(P, 3)
    assert subspace_distance(one, inside) == 1 == pytest.approx(between(whole(one), whole(inside)), abs=1e-6)
    assert subspace_distance(inside, one) == 1
    for stranger in (gradients(12, 78), named(P)):
        with pytest.raises(ProjectorError, match="compare those of one model"):
            subspace_distance(one, top_eigenspace(stranger, 5))


@numeric
@stored
def test_energy_and_error_are_those_of_a_loop(library: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over held-out gradients one by one; a zero gradient has no relative error and is left out of its mean."""
    monkeypatch.setattr(module, "_PIECE", 40)
    found = top_eigenspace(as_library(named(gradients(12)), library), 5, storage=storage)
    V = dense(gradients(12), 5)[0]
    held_out = gradients(12, seed=0) + 0.3 * gradients(12, seed=1)
    held_out[3] = 0
    inside, total, errors = 0.0, 0.0, []
    for g in held_out:
        kept = V @ (V.T @ g)
        inside, total = inside + kept @ kept, total + g @ g
        if g.any():
            errors.append(np.linalg.norm(g - kept) / np.linalg.norm(g))
    public = as_library(named(held_out), library)
    close = 1e-6 if storage == "float32" else 1e-3
    assert explained_energy(found, public) == pytest.approx(inside / total, rel=close)
    assert reconstruction_error(found, public) == pytest.approx(np.mean(errors), rel=close)
    assert 0.01 < inside / total < 0.99


def test_error_of_gradients_in_the_subspace() -> None:
    """A sum of squares less another: below 3e-4 there is nothing to be seen, as the docstring says."""
    P = gradients(8)
    found = top_eigenspace(P, 8)
    assert explained_energy(found, P) == pytest.approx(1, abs=1e-6)
    assert 0 <= reconstruction_error(found, P) <= 3.5e-4


# --- what is refused -----------------------------------------------------------------------------------


@numeric
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_that_are_not_finite(library: str, value: float, dtype: str) -> None:
    for example, part in ((0, "bias"), (5, "kernel"), (8, "scale")):
        public = named(gradients(9))
        public[part][example] = value
        with pytest.raises(ProjectorError, match=rf"public example {example} \(of 9, from 0\) is not finite; leave it"):
            top_eigenspace(as_library(public, library, dtype), 2)


@numeric
@solved
def test_gradients_that_are_all_zero(library: str, method: str) -> None:
    with pytest.raises(ProjectorError, match="all 4 public gradients are zero"):
        top_eigenspace(as_library(np.zeros((4, 9)), library), 2, method=method)


P_GOOD = gradients(4, 6)


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({"a": P_GOOD, "b": P_GOOD[:3]}, "of 3 and 4 examples were given; all parts need the same number"),
        ({"a": P_GOOD[:0]}, "of 0 examples were given"),
        (P_GOOD[:0], "of 0 examples were given"),
        ({}, "of no examples were given"),
        (P_GOOD[:, :0], "are zero"),
        (P_GOOD[0], "with a row for each example, not ndarray of float64, shape"),
        (P_GOOD.tolist(), "with a row for each example, not list"),
        (None, "with a row for each example, not NoneType"),
        ({"w": None}, "gradients of 'w' must be an array .* not NoneType"),
        ({"w": np.array(1.0)}, "gradients of 'w' must be an array"),
        ((10 * P_GOOD).astype(int), "real numbers.* not ndarray of int64"),
        (torch.tensor(10 * P_GOOD).long(), "real numbers.* not Tensor of torch.int64"),
        (P_GOOD > 0, "not ndarray of bool"),
        (P_GOOD + 1j, "not ndarray of complex128"),
        (P_GOOD.astype(object), "not ndarray of object"),
        (P_GOOD.astype(str), "not ndarray of <U"),
    ],
)
def test_public_gradients_that_are_none(public: Any, message: str) -> None:
    with pytest.raises(ProjectorError, match=message):
        top_eigenspace(public, 1)


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3", None, float("nan")])
def test_k_that_is_no_dimension(k: Any) -> None:
    with pytest.raises(ProjectorError, match="must be a whole number"):
        top_eigenspace(P_GOOD, k)
    with pytest.raises(ProjectorError, match="must be a whole number"):
        random_projector(10, k, seed=b"")
    assert top_eigenspace(P_GOOD, np.int64(2)).k == 2


def test_settings_that_are_unknown() -> None:
    for options in ({"storage": "float64"}, {"storage": "bfloat16"}, {"method": "svd"}, {"method": ""}):
        with pytest.raises(ProjectorError, match="must be one of"):
            top_eigenspace(P_GOOD, 2, **options)
    with pytest.raises(ProjectorError, match="must be one of"):
        random_projector(10, 2, seed=b"", storage="float64")
    with pytest.raises(ProjectorError, match="seed must be bytes, not str"):
        random_projector(10, 2, seed="public")  # type: ignore[arg-type]
    with pytest.raises(ProjectorError, match="from 1 to the number of elements, 10"):
        random_projector({"a": 4, "b": 6}, 11, seed=b"")
    for sizes in (0, {}):
        with pytest.raises(ProjectorError, match="from 1 to the number of elements, 0"):
            random_projector(sizes, 1, seed=b"")
    for size in (-3, 2.5):
        with pytest.raises(MmfactError, match="whole number"):
            random_projector(size, 1, seed=b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["project", "coefficients"])
def test_gradients_of_another_model(call: str) -> None:
    one, parts = top_eigenspace(gradients(9), 3), top_eigenspace(named(gradients(9)), 3)
    good = named(np.ones(P_SIZE))
    refused = [
        (one, np.ones(76), "the gradient has 76 elements; the public gradients had 77: they must be of the same model"),
        (one, np.ones(0), "has 0 elements"),
        (one, good, "'' is missing"),
        (one, list(np.ones(77)), "must be a NumPy array of real numbers.* not list"),
        (one, np.ones(77, int), "not ndarray of int64"),
        (one, torch.ones(77), "must be a NumPy array .* not Tensor of torch.float32"),
        (top_eigenspace(torch.tensor(gradients(9)), 3), np.ones(77), "must be a torch tensor .* not ndarray"),
        (parts, np.ones(77), "'bias' is missing"),
        (parts, {**good, "bias": np.ones(8)}, "the gradient of 'bias' has 8 elements; the public gradients had 7"),
        (parts, {name: good[name] for name in good if name != "kernel"}, "'kernel' is missing"),
        (parts, {**good, "new": np.ones(1)}, "'new' is none of them"),
        (parts, {**good, "bias": None}, "the gradient of 'bias' must be a NumPy array .* not NoneType"),
    ]
    for projector, gradient, message in refused:
        with pytest.raises(ProjectorError, match=message):
            getattr(projector, call)(gradient)


@pytest.mark.parametrize("figure", [explained_energy, reconstruction_error])
def test_gradients_that_explain_nothing(figure: Callable[..., float]) -> None:
    found, bad = top_eigenspace(gradients(9), 3), gradients(9)
    bad[2, 2] = np.inf
    for public in (bad, 0 * gradients(9)):
        with pytest.raises(ProjectorError, match="not finite, or all zero"):
            figure(found, public)
    with pytest.raises(ProjectorError, match="has 78 elements"):
        figure(found, gradients(9, 78))
    with pytest.raises(ProjectorError, match="of 0 examples"):
        figure(found, gradients(9)[:0])


def test_lanczos_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.sparse.linalg

    real = scipy.sparse.linalg.eigsh
    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", lambda *given, **options: real(*given, **options, maxiter=1))
    P = gradients(200, 200, ratio=0.999)
    with pytest.raises(ProjectorError, match=r"Lanczos did not converge .*; use method='gram' or a smaller k"):
        top_eigenspace(P, 5, method="lanczos")


def test_importing_loads_nothing_heavy() -> None:
    """NumPy gradients need no torch, and a Gram matrix no solver: not even when it is used."""
    code = """
import sys
import numpy as np
from mmfact.noise.projector import random_projector, top_eigenspace
top_eigenspace(np.eye(3, 5), 2).project(np.ones(5))
random_projector(5, 2, seed=b"")
heavy = ("torch", "jax", "scipy.optimize", "scipy.sparse", "click", "matplotlib", "dp_accounting")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
