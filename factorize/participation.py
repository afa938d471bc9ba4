"""Who may contribute when, and what that makes of the sensitivity of a strategy."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import WorkloadError


@dataclass(frozen=True)
class Participation:
    """A participation schema.

    Attributes
    ----------
    kind : str
        ``"single"``: each example (or user) contributes to at most one step.
    """

    kind: str = "single"

    def __post_init__(self) -> None:
        if self.kind != "single":
            raise WorkloadError(
                f"participation {self.kind!r} is not known; this version supports 'single' "
                "(each example in at most one step)"
            )

    def sensitivity(self, column_norms: npt.NDArray[np.float64]) -> float:
        """Sensitivity of C G to one participant, from the column norms of C.

        Single participation: max_j ``norm2(C[:, j])`` (Denisov et al. 2022, section 2). The
        caller hands over norms that are already rounded up.
        """
        return float(np.max(column_norms))


def single() -> Participation:
    """Each example contributes to at most one step."""
    return Participation("single")
