"""Projection of noisy gradients on a subspace that public gradients span (Zhou, Wu, Banerjee 2020).

Let P, m x p, hold the gradients of m public examples. V, p x k, are the k leading eigenvectors of the second moment
P'P/m, and a noisy gradient g is replaced by V V'g: of the noise a part k/p remains, of the signal what lies in the
subspace. Since V depends on public data (and on parameters that were made of noisy gradients), projecting AFTER the
noise is post-processing; projecting before it would not be.

The eigenvectors come from the m x m Gram matrix: P P'/m u = lambda u gives v = P'u / sqrt(m lambda), exactly, with m
gradients and no product with a p x p matrix. The Gram matrix is computed in float64 (of a float32 one v are off by
2e-3), and v too unless float32 is as good.

Gradients may be NumPy arrays or torch tensors, one array or named ones, and their elements may be split over processes
(`Shards`): only sums of m x m or k numbers are then exchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import ProjectorError
from mmfact.noise.key import NoiseKey
from mmfact.noise.release import Shard
from mmfact.noise.source import NONCE_BYTES, NoiseSource

STORAGES = ("float32", "float16")
METHODS = ("auto", "gram", "lanczos")

LARGEST_GRAM = 4096  # examples: beyond, the eigenvectors of an m x m matrix take longer than Lanczos' products

_EPS = float(np.finfo(np.float64).eps)
_PIECE = 1 << 20  # elements that are made float64 at a time
# Below this part of the largest eigenvalue rounding in the Gram matrix shows in how orthogonal eigenvectors are.
_WELL_CONDITIONED = 1e-8
# v = P'u cancels when lambda is a small part of the energy: float32 then moves the subspace by about 1e-8 times the
# square root of energy / lambda_k, beside the 3e-8 of storing it. Below this ratio that is 4e-7 at most.
_FLOAT32_SUFFICES = 1e3
_GRAM_BLOCKS = 5  # of rows: what lies above their diagonal is not computed, and BLAS still has large products
_ONE = ""  # the name of the only part of a vector without names

Array = npt.NDArray[np.float64]


class Shards(Protocol):
    """How the processes that hold one vector's elements agree."""

    def sum(self, array: Array) -> Array:
        """The array added up over all processes."""
        ...

    def first(self, array: Array) -> Array:
        """The array of the first process."""
        ...


class _Whole:
    """One process holds everything."""

    def sum(self, array: Array) -> Array:
        return array

    def first(self, array: Array) -> Array:
        return array


@dataclass(frozen=True, eq=False)
class Projector:
    """The orthogonal projection V V', by k vectors.

    Attributes
    ----------
    basis : mapping of str to array, shape (k, p_i)
        V' times 1 / `scale`, split as gradients are; the name of an only part is "".
    scale : float
    eigenvalues : ndarray, shape (k,)
        Of P'P/m for each vector, descending. Ones for a random projection.
    spectrum : ndarray
        All eigenvalues that are known, descending: k or more of them.
    energy : float
        The trace of P'P/m: the mean squared norm of a public gradient.
    kind : {"eigen", "random", "random-plain"}
    examples, rank : int
        m, and the numerical rank of P (at least; Lanczos does not see all of it). 0 for a random projection.
    """

    basis: Mapping[str, Any] = field(repr=False)
    eigenvalues: Array = field(repr=False)
    spectrum: Array = field(repr=False)
    energy: float
    kind: str
    examples: int
    rank: int
    scale: float = 1.0

    @property
    def k(self) -> int:
        return len(self.eigenvalues)

    @property
    def storage(self) -> str:
        return str(next(iter(self.basis.values())).dtype).removeprefix("torch.")

    @property
    def gap(self) -> float | None:
        """lambda_k - lambda_(k+1), if both are known."""
        if self.kind != "eigen":
            return None
        if self.k == self.rank == self.examples:
            return float(self.spectrum[self.k - 1])
        return float(self.spectrum[self.k - 1] - self.spectrum[self.k]) if len(self.spectrum) > self.k else None

    @property
    def explained(self) -> float | None:
        """The part of the public gradients' energy that lies in the subspace."""
        return float(self.eigenvalues.sum() / self.energy) if self.kind == "eigen" else None

    def coefficients(self, gradient: Any, shards: Shards | None = None) -> Array:
        """V'g, shape (k,), in float64: added up over parts and processes.

        Raises
        ------
        ProjectorError
            The gradient has other names or lengths than the public gradients had.
        """
        total = np.zeros(self.k)
        for name, part in self._fitting(gradient).items():
            for columns, basis in _working(self.basis[name], part):
                total += self.scale * _numpy(basis @ _cast(part[columns], basis))
        return (shards or _Whole()).sum(total)

    def project(self, gradient: Any, shards: Shards | None = None) -> Any:
        """V V'g, in the form and precision of `gradient`.

        Parameters
        ----------
        gradient : array, shape (p,), or mapping of str to array
            NumPy or torch. It must have its noise already.
        shards : Shards, optional
            If this process holds a part of every vector only.

        Raises
        ------
        ProjectorError
            The gradient has other names or lengths than the public gradients had.
        """
        return self.combine(self.coefficients(gradient, shards), gradient)

    def combine(self, coefficients: Array, like: Any) -> Any:
        """V c, in the form and precision of the gradient `like`."""
        parts = like if isinstance(like, Mapping) else {_ONE: like}
        made = {}
        for name, part in parts.items():
            flat = part.reshape(-1)
            out = np.empty_like(flat) if isinstance(flat, np.ndarray) else flat.new_empty(flat.shape)
            for columns, basis in _working(self.basis[name], flat):
                out[columns] = _cast(_like(self.scale * coefficients, basis) @ basis, out)
            made[name] = out.reshape(part.shape)
        return made if isinstance(like, Mapping) else made[_ONE]

    def _fitting(self, gradient: Any) -> dict[str, Any]:
        """The gradient's parts, flat."""
        parts = dict(gradient) if isinstance(gradient, Mapping) else {_ONE: gradient}
        if parts.keys() != self.basis.keys():
            missing, unknown = self.basis.keys() - parts.keys(), parts.keys() - self.basis.keys()
            raise ProjectorError(
                "the gradient does not have the parts of the public gradients: "
                + (f"{min(missing)!r} is missing" if missing else f"{min(unknown)!r} is none of them")
            )
        for name, part in parts.items():
            if not _floating(part) or isinstance(part, np.ndarray) != isinstance(self.basis[name], np.ndarray):
                wanted = "NumPy array" if isinstance(self.basis[name], np.ndarray) else "torch tensor"
                raise ProjectorError(
                    f"the gradient{f' of {name!r}' if name else ''} must be a {wanted} of real numbers, float16 to "
                    f"float64, as the projector's vectors are, not {_described(part)}"
                )
            size = math.prod(part.shape)
            if size != self.basis[name].shape[1]:
                raise ProjectorError(
                    f"the gradient{f' of {name!r}' if name else ''} has {size} elements; the public gradients had "
                    f"{self.basis[name].shape[1]}: they must be of the same model"
                )
        return {name: part.reshape(-1) for name, part in parts.items()}


def top_eigenspace(
    gradients: Any, k: int, *, storage: str = "float32", method: str = "auto", shards: Shards | None = None
) -> Projector:
    """The k leading eigenvectors of P'P/m.

    Parameters
    ----------
    gradients : array, shape (m, p), or mapping of str to array, shape (m, ...)
        One gradient for each public example, not clipped. Any real precision.
    k : int
        From 1 to the rank of the gradients.
    storage : {"float32", "float16"}
        Of V: 4 or 2 bytes for each of its k p numbers. V'V is then the identity to about 1e-6 or 1e-3, and with the
        latter a projection on the CPU takes twice (torch) to ten times (NumPy) as long.
    method : {"auto", "gram", "lanczos"}
        All eigenvectors of the Gram matrix, O(p m^2 + m^3), or k + 1 of them by Lanczos (scipy) without forming it,
        O(p m) for each of a few times k products. Default: the first up to 4,096 examples.
    shards : Shards, optional
        If this process holds some of the elements of every gradient only.

    Raises
    ------
    ProjectorError
        Gradients that are not finite, or all zero, or of differing numbers; k above their rank.
    """
    parts, m = _examples(gradients)
    agree = shards or _Whole()
    if storage not in STORAGES or method not in METHODS:
        raise ProjectorError(f"storage {storage!r} must be one of {STORAGES}, method {method!r} one of {METHODS}")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ProjectorError(f"k = {k!r} must be a whole number of at least 1, the dimension of the subspace")
    k = int(k)
    by_gram = method == "gram" or (method == "auto" and m <= LARGEST_GRAM) or k + 1 >= m
    with np.errstate(invalid="ignore", over="ignore"):  # of gradients that are refused below
        if by_gram:
            gram = agree.sum(sum((_gram(part) for part in parts.values()), np.zeros((m, m))))
            squares = np.diag(gram)
        else:
            squares = agree.sum(sum((_squared_norms(part) for part in parts.values()), np.zeros(m)))
    if not np.isfinite(squares).all():
        worst = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise ProjectorError(
            f"the gradient of public example {worst} (of {m}, from 0) is not finite; leave it out, or train at a "
            "lower learning rate"
        )
    if not squares.any():
        raise ProjectorError(f"all {m} public gradients are zero; they span no subspace to project on")
    if k > m:
        raise ProjectorError(f"k = {k} is above the number of public gradients, {m}: give a smaller k or more examples")
    energy = float(squares.sum()) / m
    values, vectors = np.linalg.eigh(gram / m) if by_gram else _lanczos(parts, m, k, agree)
    # Processes may differ in the last digits, and so in the rank, or in the sign of a vector.
    spectrum = np.maximum(agree.first(values[::-1]), 0)
    U = agree.first(vectors[:, ::-1][:, :k].T.copy())
    elements = float(agree.sum(np.array([float(sum(part.shape[1] for part in parts.values()))]))[0])
    rank = int((spectrum > 4 * _EPS * max(m, math.sqrt(elements)) * spectrum[0]).sum())
    if k > rank:
        raise ProjectorError(
            f"k = {k} is above the rank of the {m} public gradients, {rank}: give a smaller k or more examples"
        )
    scale = _scale(storage, elements)
    weights = U / (np.sqrt(m * spectrum[:k]) * scale)[:, None]
    exact = energy > _FLOAT32_SUFFICES * spectrum[k - 1]
    basis = {name: _combined(weights, part, storage, exact) for name, part in parts.items()}
    if spectrum[k - 1] < _WELL_CONDITIONED * spectrum[0]:
        basis = _orthonormal(basis, scale, agree)
    return Projector(basis, spectrum[:k], spectrum, energy, "eigen", m, rank, scale)


def random_projector(
    sizes: int | Mapping[str, int | Shard],
    k: int,
    *,
    seed: bytes,
    plain: bool = False,
    storage: str = "float32",
    shards: Shards | None = None,
) -> Projector:
    """k random directions instead of public gradients: the RPDP-SGD that Zhou et al. compare with.

    Every element is a pure function of seed, name, vector and place, whatever part of it a process holds.

    Parameters
    ----------
    sizes : int, or mapping of str to int or Shard
        Elements of a gradient, by part.
    k : int
    seed : bytes
        Public.
    plain : bool
        Gaussian vectors of variance 1/k, as random projections are usually scaled: V V' is the identity in expectation,
        but no projection. Default: the same directions made orthonormal.

    Raises
    ------
    ProjectorError
        k is above the number of elements.
    """
    given = sizes if isinstance(sizes, Mapping) else {_ONE: sizes}
    places = {name: place if isinstance(place, Shard) else Shard(place) for name, place in given.items()}
    elements = sum(place.total for place in places.values())
    if storage not in STORAGES:
        raise ProjectorError(f"storage {storage!r} must be one of {STORAGES}")
    if not isinstance(seed, bytes):
        raise ProjectorError(f"seed must be bytes, not {type(seed).__name__}")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= elements:
        raise ProjectorError(f"k = {k!r} must be a whole number from 1 to the number of elements, {elements}")
    # As a noise source serves: its key is public here, and hashed as no noise key is.
    public = NoiseKey.from_bytes(hashlib.sha256(b"mmfact random projection" + seed).digest())
    basis = {}
    for name, place in places.items():
        source = NoiseSource(public, bytes(NONCE_BYTES), "", name, np.dtype(np.float32))
        basis[name] = np.empty((k, place.size), np.float32)
        for j, row in enumerate(basis[name]):
            source.fill(j, place.offset, row)
            row /= math.sqrt(k if plain else elements)
    if not plain:
        for _ in range(1 if 4 * k < elements else 2):  # so many Gaussian vectors are far from orthogonal
            basis = _orthonormal(basis, 1.0, shards or _Whole())
    scale = _scale(storage, elements)
    if storage != "float32":
        basis = {name: (part / scale).astype(storage) for name, part in basis.items()}
    ones = np.ones(k)
    return Projector(basis, ones, ones, float(k), "random-plain" if plain else "random", 0, 0, scale)


def subspace_distance(one: Projector, other: Projector, shards: Shards | None = None) -> float:
    """norm2(V V' - W W'), the sine of the largest angle between two subspaces: 0 for equal ones, at most 1.

    Of orthonormal V and W; 1 where they have different dimensions. In float32 angles of a few 1e-6 drown in rounding.

    Raises
    ------
    ProjectorError
        They are of different vectors.
    """
    agree = shards or _Whole()
    if {n: part.shape[1] for n, part in one.basis.items()} != {n: part.shape[1] for n, part in other.basis.items()}:
        raise ProjectorError(
            "the two projectors are of vectors with other parts or lengths; compare those of one model"
        )
    if one.k != other.k:
        return 1.0
    cross = np.zeros((one.k, one.k))
    for V, W in _pairs(one, other):
        cross += one.scale * other.scale * _numpy(V @ W.T)
    cross = agree.sum(cross)
    # What of V lies outside of W, itself and not as a difference of squares, which would hide angles below 1e-4.
    outside = np.zeros((one.k, one.k))
    for V, W in _pairs(one, other):
        rest = one.scale * V - _like(other.scale * cross, W) @ W
        outside += _numpy(rest @ rest.T)
    return min(1.0, math.sqrt(max(0.0, float(np.linalg.eigvalsh(agree.sum(outside))[-1]))))


def explained_energy(projector: Projector, gradients: Any, shards: Shards | None = None) -> float:
    """sum |V'g|^2 / sum |g|^2 over gradients g, shape (m, p) or named: 1 if all lie in the subspace."""
    inside, total = _energies(projector, gradients, shards)
    return float(inside.sum() / total.sum())


def reconstruction_error(projector: Projector, gradients: Any, shards: Shards | None = None) -> float:
    """The mean of |g - V V'g| / |g| over gradients that are not zero; about 3e-4 too high at most."""
    inside, total = _energies(projector, gradients, shards)
    outside = 1 - inside[total > 0] / total[total > 0]
    return float(np.sqrt(np.maximum(outside, 0)).mean())


def _energies(projector: Projector, gradients: Any, shards: Shards | None) -> tuple[Array, Array]:
    """|V'g|^2 and |g|^2 of every gradient."""
    parts, m = _examples(gradients)
    agree = shards or _Whole()
    first = {name: part[0] for name, part in parts.items()}
    projector._fitting(first if isinstance(gradients, Mapping) else first[_ONE])
    c, squares = np.zeros((m, projector.k)), np.zeros(m)
    for name, part in parts.items():
        squares += _squared_norms(part)
        for columns, P in _pieces(part):
            c += projector.scale * _numpy(P @ _double(_on_numpy(projector.basis[name][:, columns])).T)
    total = agree.sum(squares)
    if not (np.isfinite(total).all() and total.any()):
        raise ProjectorError("the gradients to be explained are not finite, or all zero")
    return (agree.sum(c) ** 2).sum(axis=1), total


def _scale(storage: str, elements: float) -> float:
    """A power of two, so that the elements of a unit vector are near 1 in a precision of small range."""
    return 1.0 if storage == "float32" else 2.0 ** -round(math.log2(max(elements, 1)) / 2)


def _examples(gradients: Any) -> tuple[dict[str, Any], int]:
    """Parts of shape (m, p_i), and m."""
    given = dict(gradients) if isinstance(gradients, Mapping) else {_ONE: gradients}
    counts = set()
    for name, part in given.items():
        if not _floating(part) or len(part.shape) < 1 + (not name):
            raise ProjectorError(
                f"the public gradients{f' of {name!r}' if name else ''} must be an array of real numbers, float16 to "
                f"float64, with a row for each example, not {_described(part)}"
            )
        counts.add(int(part.shape[0]))
    if len(counts) != 1 or 0 in counts:
        raise ProjectorError(
            f"public gradients of {' and '.join(map(str, sorted(counts))) or 'no'} examples were given; all parts need "
            "the same number, 1 at least"
        )
    m = counts.pop()
    return {name: part.reshape(m, -1) for name, part in given.items()}, m


def _squared_norms(part: Any) -> Array:
    total = np.zeros(part.shape[0])
    for _, piece in _pieces(part):
        total += _numpy((piece * piece).sum(1))
    return total


def _gram(part: Any) -> Array:
    m = part.shape[0]
    edges = [m * block // _GRAM_BLOCKS for block in range(_GRAM_BLOCKS + 1)]
    total = np.zeros((m, m))
    for _, piece in _pieces(part):
        for first, last in itertools.pairwise(edges):
            total[first:, first:last] += _numpy(piece[first:] @ piece[first:last].T)
    lower = np.tril(total)
    return lower + np.tril(lower, -1).T


def _lanczos(parts: Mapping[str, Any], m: int, k: int, agree: Shards) -> tuple[Array, Array]:
    """The k + 1 leading eigenvalues of P P'/m, ascending, and their eigenvectors."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def product(u: Array) -> Array:
        total = np.zeros(m)
        for part in parts.values():
            for _, piece in _pieces(part):
                total += _numpy(piece @ (_like(u.reshape(-1), piece) @ piece))
        return agree.first(agree.sum(total)) / m  # the same to the last bit, or processes would part

    start = agree.first(np.random.default_rng(0).normal(size=m))
    try:
        values, vectors = eigsh(LinearOperator((m, m), product, dtype=np.float64), k + 1, which="LA", v0=start)
    except ArpackNoConvergence as error:
        raise ProjectorError(f"Lanczos did not converge ({error}); use method='gram' or a smaller k") from error
    return values, vectors


def _combined(weights: Array, part: Any, storage: str, exact: bool = True) -> Any:
    """weights @ part, in the storage precision; if not `exact`, float32 is good enough to work in."""
    basis = _empty((len(weights), part.shape[1]), storage, part)
    out = _on_numpy(basis)
    in_float32 = not exact and storage == str(part.dtype).removeprefix("torch.") == "float32"
    for columns, piece in _pieces(part, exact=not in_float32):
        out[:, columns] = _cast(_like(weights, piece) @ piece, out)
    return basis


def _orthonormal(basis: Mapping[str, Any], scale: float, agree: Shards) -> dict[str, Any]:
    """The same space and, but for their last digits, vectors: by the Cholesky factor of their Gram matrix."""
    k = next(iter(basis.values())).shape[0]
    gram = scale**2 * agree.sum(sum((_gram(part) for part in basis.values()), np.zeros((k, k))))
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(gram))
    except np.linalg.LinAlgError as error:
        raise ProjectorError(f"the {k} vectors nearly depend on each other: give a smaller k") from error
    inverse = agree.first(inverse)
    storage = str(next(iter(basis.values())).dtype).removeprefix("torch.")
    return {name: _combined(inverse, part, storage) for name, part in basis.items()}


# What NumPy and torch do not share.


def _columns(array: Any) -> Iterator[slice]:
    """Few enough at a time for a cache."""
    width = max(_PIECE // max(array.shape[0], 1), 1)
    for first in range(0, array.shape[1], width):
        yield slice(first, first + width)


def _pieces(part: Any, exact: bool = True) -> Iterator[tuple[slice, Any]]:
    """(columns, the same in float64, or as they are); in NumPy if they are on the CPU: its products are faster."""
    for columns in _columns(part):
        piece = _on_numpy(part[:, columns])
        yield columns, _double(piece) if exact else piece


def _working(basis: Any, vector: Any) -> Iterator[tuple[slice, Any]]:
    """(columns, V' there) in the precision to work with on `vector`: float64 for float64, else float32."""
    exact = str(vector.dtype).endswith("float64")
    if not exact and str(basis.dtype).endswith("float32"):
        yield slice(None), basis
        return
    for columns in _columns(basis):
        part = basis[:, columns]
        if exact:
            yield columns, _double(part)
        else:
            yield columns, part.astype(np.float32) if isinstance(part, np.ndarray) else part.float()


def _pairs(one: Projector, other: Projector) -> Iterator[tuple[Any, Any]]:
    """Columns of both bases, few enough at a time for a cache; in float64 unless both are float32."""
    exact = not one.storage == other.storage == "float32"
    for name, part in one.basis.items():
        for columns in _columns(part):
            pair = part[:, columns], other.basis[name][:, columns]
            yield (_double(pair[0]), _double(pair[1])) if exact else pair


def _floating(array: Any) -> bool:
    known = isinstance(array, np.ndarray) or hasattr(array, "new_tensor")
    return known and str(array.dtype).removeprefix("torch.") in ("float16", "bfloat16", "float32", "float64")


def _described(array: Any) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", "")
    return type(array).__name__ + (f" of {dtype}, shape {tuple(shape)}" if shape is not None else "")


def _on_numpy(array: Any) -> Any:
    """What is on the CPU as a NumPy array: the same memory, unless NumPy lacks the precision."""
    if isinstance(array, np.ndarray) or array.device.type != "cpu":
        return array
    return (array.float() if str(array.dtype).endswith("bfloat16") else array).detach().numpy()


def _double(array: Any) -> Any:
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.detach().double()


def _cast(array: Any, like: Any) -> Any:
    """In the precision of `like`."""
    return array.astype(like.dtype, copy=False) if isinstance(array, np.ndarray) else array.detach().to(like.dtype)


def _numpy(array: Any) -> Array:
    return np.asarray(array if isinstance(array, np.ndarray) else array.cpu(), dtype=np.float64)


def _like(array: Array, other: Any) -> Any:
    """A NumPy array as one of the other's library, device and precision."""
    if isinstance(other, np.ndarray):
        return array.astype(other.dtype, copy=False)
    return other.new_tensor(array)


def _empty(shape: tuple[int, int], dtype: str, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
