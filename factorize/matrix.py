"""A custom workload's matrix from a file: .npy, .npz with one array, or .csv."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, WorkloadError
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
        if path.suffix == ".npy":
            return _array(np.load(path, allow_pickle=False), path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                if len(archive.files) != 1:
                    names = ", ".join(archive.files[:5])
                    raise WorkloadError(f"{path} holds {len(archive.files)} arrays ({names}); save only the matrix")
                return _array(archive[archive.files[0]], path)
        if path.suffix == ".csv":
            return np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
    except OSError as error:
        raise WorkloadError(f"the matrix file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise WorkloadError(
            f"the matrix file {path} does not hold an array of numbers ({error}); save it with numpy.save, "
            "or as comma-separated numbers"
        ) from error
    raise WorkloadError(f"the matrix file {path} must end in .npy, .npz or .csv")


def _array(loaded: object, path: Path) -> npt.NDArray[np.generic]:
    if not isinstance(loaded, np.ndarray):
        raise WorkloadError(f"{path} holds {type(loaded).__name__}, not one array; save it with numpy.save")
    return loaded
