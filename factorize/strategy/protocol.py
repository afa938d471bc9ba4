"""What every strategy answers, whatever its form."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmfact.factorize.participation import Participation
from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]

DTYPES = ("float32", "float64")


class Strategy(Protocol):
    """C, n x n lower-triangular: what is released privately is C G + Z.

    Every figure comes from the coefficients exactly as they are stored and streamed, after every
    truncation and cast. Sensitivities are rounded up, losses and errors by the bound of their sums.
    With C stored, B = A C^-1 by definition (and with B stored, C = B^-1 A), so an approximation can
    cost accuracy, never privacy.
    """

    @property
    def kind(self) -> str:
        """The name that `--strategy` takes."""
        ...

    @property
    def sensitivity_kind(self) -> str:
        """ "exact" up to rounding in the last digits, or "upper bound"."""
        ...

    @property
    def n(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Precision of the stored coefficients."""
        ...

    @property
    def buffers(self) -> int:
        """Vectors of model size that streaming keeps (or, for the dense strategy, draws again)."""
        ...

    @property
    def bytes_per_parameter(self) -> int:
        """What a float32 stream keeps for each parameter of the model, beside its output."""
        ...

    @property
    def cost(self) -> int:
        """Multiply-adds a step and element of the model, at most, beside drawing the white noise."""
        ...

    def parameters(self) -> dict[str, int]:
        """Whole numbers that, with n, give the shape of every array in `coefficients`."""
        ...

    def coefficients(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that define the strategy, by name: what an artifact stores."""
        ...

    def sensitivity(self, participation: Participation) -> float:
        """Sensitivity of C G, rounded up."""
        ...

    def errors(self, workload: Workload, participation: Participation) -> tuple[float, float]:
        """(loss, max error): sensitivity^2 normF(B)^2, the total squared error at unit noise, and
        sensitivity max_i norm2(B[i, :])."""
        ...

    def amplification(self) -> float:
        """The largest standard deviation that a step's sums reach, relative to their white noise.

        Streaming in a precision of eps errs by about eps times this in every row.
        """
        ...

    def noise_range(self) -> tuple[float, float]:
        """Of the standard deviations of a row of C^-1 Z: its own fresh part at the least, all of it at the most."""
        ...

    def row_deviations(self) -> Array:
        """The standard deviation of every row of C^-1 Z, shape (n,)."""
        ...

    def to_dense(self) -> Array:
        """C as an n x n float64 array, of the stored coefficients exactly."""
        ...

    def noising(self) -> Array:
        """C^-1, n x n: turns white noise into gradient-space noise."""
        ...

    def decoder(self, workload: Workload) -> Array:
        """B = A C^-1, n x n lower-triangular."""
        ...
