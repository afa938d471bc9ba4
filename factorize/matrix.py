"""A custom workload's matrix from a file: .npy, .npz with one array, or .csv."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, MmfactError, WorkloadError
from mmfact.factorize.workload import LARGEST_DENSE

# The text form of a number can be long; a .csv of the largest matrix fits below this.
_LARGEST_FILE = 32 * LARGEST_DENSE**2


def read_matrix(path: Path) -> npt.NDArray[np.generic]:
    """The array that a file holds, unchecked but for being an array of numbers.

    Raises
    ------
    WorkloadError
        The file cannot be read, needs pickle, or holds something else.
    CapacityError
        The file is larger than any matrix that fits.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise CapacityError(
                f"the matrix file {path} has {size / 2**30:.1f} GiB; a custom matrix has at most {LARGEST_DENSE} steps"
            )
        if path.suffix in (".npy", ".npz"):
            return _array(np.load(path, allow_pickle=False), path)
        if path.suffix == ".csv":
            with warnings.catch_warnings(action="ignore"):  # an empty file: its shape is refused later
                return np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
    except MmfactError:
        raise
    except OSError as error:
        raise WorkloadError(f"the matrix file {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy's readers raise nearly anything on damaged files
        raise WorkloadError(
            f"the matrix file {path} does not hold an array of numbers ({error or type(error).__name__}); save it with "
            "numpy.save, or as comma-separated numbers"
        ) from error
    raise WorkloadError(f"the matrix file {path} must end in .npy, .npz or .csv")


def _array(loaded: Any, path: Path) -> npt.NDArray[np.generic]:
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded as archive:
        if len(archive.files) != 1:
            names = ", ".join(archive.files[:5])
            raise WorkloadError(f"{path} holds {len(archive.files)} arrays ({names}); save only the matrix")
        return np.asarray(archive[archive.files[0]])
