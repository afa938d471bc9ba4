"""What every strategy answers, whatever its form."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmfact.factorize.participation import Participation
from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]


class Strategy(Protocol):
    """C, n x n lower-triangular: what is released privately is C G + Z.

    Every figure comes from the coefficients exactly as they are stored and streamed, after every
    truncation and cast. Sensitivities are rounded up, losses and errors by the bound of their sums.
    With C stored, B = A C^-1 by definition, so an approximation can cost accuracy, never privacy.
    """

    @property
    def kind(self) -> str:
        """The name that `--strategy` takes."""
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

    def coefficients(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that define the strategy, by name: what an artifact stores."""
        ...

    def sensitivity(self, participation: Participation) -> float:
        """Sensitivity of C G, rounded up."""
        ...

    def loss(self, workload: Workload, participation: Participation) -> float:
        """sensitivity^2 normF(B)^2, the total squared error at unit noise."""
        ...

    def max_error(self, workload: Workload, participation: Participation) -> float:
        """sensitivity max_i norm2(B[i, :])."""
        ...

    def to_dense(self) -> Array:
        """C as an n x n float64 array, the stored coefficients exactly."""
        ...
