"""A custom workload's matrix from a file: .npy, .npz with one array, or .csv."""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, MmfactError, WorkloadError
from mmfact.factorize.workload import LARGEST_DENSE

# The text form of a number can be long; a .csv of the largest matrix fits below this.
_LARGEST_FILE = 32 * LARGEST_DENSE**2
LARGEST_MEMBER = 16 * LARGEST_DENSE**2 + (1 << 16)  # bytes: the largest matrix in long doubles, with its header


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
            with path.open("rb") as file:
                return read_npy(file, size)
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                if len(members) != 1:
                    names = ", ".join(member.filename.removesuffix(".npy") for member in members[:5])
                    raise WorkloadError(f"{path} holds {len(members)} arrays ({names}); save only the matrix")
                if members[0].file_size > LARGEST_MEMBER:
                    raise CapacityError(
                        f"the array in {path} has {members[0].file_size / 2**30:.1f} GiB; a custom matrix has at most "
                        f"{LARGEST_DENSE} steps"
                    )
                with archive.open(members[0]) as file:
                    return read_npy(file, members[0].file_size)
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


def read_npy(file: IO[bytes], size: int) -> npt.NDArray[np.generic]:
    """One array in NumPy's format; a header that claims more than `size` bytes is refused before allocating."""
    header = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = read_header[header](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which need pickle")
    if math.prod(shape) > LARGEST_DENSE**2:
        raise CapacityError(
            f"a matrix of shape {shape} is too large; a custom workload has at most {LARGEST_DENSE} steps"
        )
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"its header claims shape {shape}, more than it holds")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
