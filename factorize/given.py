"""A factorization that somebody else made: read from a file, checked, and brought to the form that is streamed.

C may come as any m x n matrix of full column rank, m >= n. What is released is C G + Z, and white noise has no
directions: an orthogonal Q from the left changes nothing. So C may be replaced by a lower-triangular C_hat with
C_hat' C_hat = C' C, which a QL factorization gives, C = Q C_hat (design.md, section 4). An LQ of C would keep C C'
instead, and with it understate the sensitivity.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from mmfact.factorize.errors import CapacityError, MmfactError, WorkloadError
from mmfact.factorize.matrix import LARGEST_MEMBER, read_matrix, read_npy
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy, lower_triangular, lower_triangular_pair
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import LARGEST_DENSE, Workload, check_dense

Array = npt.NDArray[np.float64]

# B C = A, in units of A's largest entry: factors in float32 pass, another beta does not. What is streamed is A C^-1, so
# the difference costs nothing.
PRODUCT_TOLERANCE = 1e-5

ABOUT = "about"
_COEFFICIENTS = {
    DenseStrategy.kind: ("packed",),
    BufferedStrategy.kind: ("c", "g", "decay", "q"),
    BandedLowRankStrategy.kind: ("band", "left", "right"),
}
_PREFIX = "strategy."
_KNOWN = ("A", "B", "C", ABOUT, *(_PREFIX + name for names in _COEFFICIENTS.values() for name in names))
_LONGEST_ABOUT = 1 << 20  # characters


@dataclass(frozen=True, eq=False)
class Given:
    """A strategy made from what was given.

    Attributes
    ----------
    strategy : Strategy
    rotation : {"none", "QL of C", "LQ of B"}
        What was done to C. None: its coefficients are those that were given, up to the precision asked for. QL of C:
        every column keeps its norm, so the sensitivity is the one that C had. LQ of B, for m > n: C was projected on
        what B reads, so no column grew.
    sensitivity : float or None
        The largest column norm of the C that was given; None where a strategy's own coefficients were.
    """

    strategy: Strategy
    rotation: str
    sensitivity: float | None


def read_factors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays that a file holds, by name, unchecked but for being arrays.

    A .npy or .csv holds C, and so does a .npz with one array, whatever its name. Of a .npz with more, those are taken
    that `mmfact export` writes: C, perhaps with A and B; or a strategy's own coefficients. Nothing is unpickled.

    Raises
    ------
    WorkloadError
        The file cannot be read, needs pickle, or holds no factorization.
    CapacityError
        An array is larger than any that fits.
    """
    if path.suffix != ".npz":
        return {"C": read_matrix(path)}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            if len(members) != len(archive.infolist()):
                raise WorkloadError(f"{path} holds two arrays of one name; leave one out")
            found = [name for name in _KNOWN if name in members]
            if "C" in found and any(name.startswith(_PREFIX) for name in found):
                raise WorkloadError(f"{path} holds C and a strategy's coefficients; leave one of them out")
            if len(members) == 1 and not found:
                found = list(members)
            arrays = {}
            for name in found:
                if members[name].file_size > LARGEST_MEMBER:
                    raise CapacityError(
                        f"{name} in {path} has {members[name].file_size / 2**30:.1f} GiB; a matrix has at most "
                        f"{LARGEST_DENSE} steps"
                    )
                with archive.open(members[name]) as file:
                    arrays[name] = read_npy(file, members[name].file_size)
    except MmfactError:
        raise
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy's and zipfile's readers raise nearly anything on damaged files
        raise WorkloadError(
            f"{path} does not hold arrays of numbers ({str(error) or type(error).__name__!r:.200}); "
            "write it with numpy.savez"
        ) from error
    if len(arrays) == 1 and found[0] not in _KNOWN:
        return {"C": arrays[found[0]]}
    if "C" not in arrays and not any(name.startswith(_PREFIX) for name in arrays):
        raise WorkloadError(
            f"{path} holds {sorted(members)!r:.200}, so it is not clear which is the strategy; call it C, and its "
            "decoder, if there is one, B"
        )
    return arrays


def strategy_of(arrays: dict[str, npt.NDArray[Any]], workload: Workload, dtype: str | None = None) -> Given:
    """The strategy that the arrays of `read_factors` describe, for `workload`.

    Problem: C of shape (m, n), m >= n; B, if there is one, of shape (n, m) with B C = A.

    Parameters
    ----------
    dtype : {"float32", "float64"}, optional
        Of the coefficients of a dense strategy. Default: float64. A strategy's own coefficients keep theirs.

    Raises
    ------
    WorkloadError
        Not real numbers, not finite, of another size than the workload, not of full rank, or B C is not A.
    CapacityError
        C is too large to be dense.
    SolverError
        Coefficients that make no strategy.
    """
    if ABOUT in arrays:
        _check_made_for(arrays[ABOUT], workload)
    if "C" not in arrays:
        if dtype is not None:
            raise WorkloadError(
                f"the file holds a strategy's own coefficients, which keep their precision; leave --dtype {dtype} out"
            )
        return Given(_from_coefficients(arrays, workload), "none", None)
    n = workload.n
    check_dense(n, "a C of one's own")
    C = _numbers("C", arrays["C"])
    if C.shape[1] != n or C.shape[0] < n:
        raise WorkloadError(
            f"C has shape {C.shape} but the workload {n} steps: it needs {n} columns, one a step, and at least as many "
            "rows, or some gradient could not be recovered from C G"
        )
    largest = float(np.abs(C).max())
    if not 1e-30 <= largest <= 1e30:
        raise WorkloadError(f"C's largest entry is {largest:.3g}; scale C to about 1 (a factor changes no noise)")
    B = _decoder(arrays, C, workload)
    C_hat, rotation = C, "none"
    if len(C) > n and B is not None:
        (_, C_hat), rotation = lower_triangular_pair(B, C), "LQ of B"
    elif len(C) > n or np.triu(C, 1).any() or (np.diag(C) < 0).any():
        # for square factors this is the LQ of B as well, B being A C^-1, and needs no B
        C_hat, rotation = lower_triangular(C), "QL of C"
    _check_rank(C_hat)
    sensitivity = float(np.linalg.norm(C, axis=0).max())
    return Given(DenseStrategy.from_matrix(C_hat, dtype or "float64"), rotation, sensitivity)


def _decoder(arrays: dict[str, npt.NDArray[Any]], C: Array, workload: Workload) -> Array | None:
    """B, if there is one: with it, and with A if the file holds that too, the factorization must be the workload's."""
    products = {"A": _numbers("A", arrays["A"])} if "A" in arrays else {}
    B = None
    if "B" in arrays:
        B = _numbers("B", arrays["B"])
        if B.shape != C.shape[::-1]:
            raise WorkloadError(f"B has shape {B.shape} and C {C.shape}; give B as n x m and C as m x n")
        with np.errstate(all="ignore"):  # what overflows is not A
            products["B C"] = B @ C
    if products:
        A = workload.dense()
        for name, product in products.items():
            if product.shape != A.shape:
                raise WorkloadError(f"{name} has shape {product.shape} but the workload {A.shape}")
            off = float(np.abs(product - A).max() / np.abs(A).max())
            if not off <= PRODUCT_TOLERANCE:
                raise WorkloadError(
                    f"{name} is not the workload's A: they differ by {off:.3g} of its largest entry, "
                    f"{PRODUCT_TOLERANCE:g} is allowed. Describe the workload that it was made for (all options of its "
                    "optimizer and schedule), or save only C to have it certified for this one"
                )
    return B


def _check_rank(C: Array) -> None:
    if not (np.diag(C) > 0).all():
        raise WorkloadError(
            f"C has a zero on its diagonal at step {int(np.argmin(np.diag(C)))}: it is singular, and that step's "
            "gradient could not be recovered from C G"
        )
    rcond, _ = lapack.dtrcon(C, norm="1", uplo="L")
    if rcond < np.finfo(float).eps:
        raise WorkloadError(
            f"C is singular to working precision (reciprocal condition {rcond:.1e}, at least "
            f"{np.finfo(float).eps:.1e} is needed): some gradient could not be recovered from C G"
        )


def _numbers(name: str, array: npt.NDArray[Any]) -> Array:
    """`array` as a finite real matrix."""
    if array.dtype.kind not in "fiu":
        raise WorkloadError(f"{name} holds {array.dtype}, but a factorization is made of real numbers, float64 at best")
    if array.ndim != 2 or array.size == 0:
        raise WorkloadError(f"{name} has shape {array.shape}; it must be a matrix")
    with np.errstate(over="ignore"):  # of long doubles; refused below
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        i, j = np.argwhere(~np.isfinite(array))[0]
        raise WorkloadError(f"{name} holds {array[i, j]} at row {i}, column {j}; every entry must be finite")
    return array


def _from_coefficients(arrays: dict[str, npt.NDArray[Any]], workload: Workload) -> Strategy:
    given = {
        name.removeprefix(_PREFIX): np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        for name, array in arrays.items()
        if name.startswith(_PREFIX)
    }
    if "band" in given:  # one as wide as the matrix leaves nothing beside it
        nothing = np.zeros((workload.n, 0), given["band"].dtype)
        given = {"left": nothing, "right": nothing, **given}
    kind = next((kind for kind, names in _COEFFICIENTS.items() if set(given) == set(names)), None)
    if kind is None:
        raise WorkloadError(
            f"the coefficients {sorted(given)} are not those of one strategy: "
            + "; ".join(f"{kind} has {', '.join(names)}" for kind, names in _COEFFICIENTS.items())
        )
    strategy: Strategy
    if kind == BandedLowRankStrategy.kind:
        strategy = BandedLowRankStrategy(**given, workload=workload)
    else:
        strategy = DenseStrategy(**given) if kind == DenseStrategy.kind else BufferedStrategy(**given)
    if strategy.n != workload.n:
        raise WorkloadError(f"the file's strategy has {strategy.n} steps but the workload {workload.n}")
    return strategy


def _check_made_for(about: npt.NDArray[Any], workload: Workload) -> None:
    """An exported file says which workload it was made for: it must be the one that was described."""
    try:
        if about.dtype.kind != "U" or about.size != 1 or about.dtype.itemsize > 4 * _LONGEST_ABOUT:
            raise ValueError("not a text")
        made_for = json.loads(str(about.reshape(())))["workload"]
        described = workload.spec()
        other = {name: made_for[name] for name in described if made_for[name] != described[name]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkloadError(
            f"the file's entry {ABOUT!r} is not one that mmfact writes ({type(error).__name__}); leave it out"
        ) from error
    if other:
        raise WorkloadError(
            f"the file was made for a workload with {other!r:.300}, which is not the one that was described; describe "
            f"that one, or leave the entry {ABOUT!r} out of the file"
        )
