"""The artifact: one certified factorization, as the runtime and the reader see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

Array = npt.NDArray[np.float64]

SCHEMA_VERSION = 2  # of new files; 1 knew the dense strategy only; such files are read for ever


@dataclass(frozen=True, eq=False)
class Artifact:
    """A workload, its strategy and its certificate.

    Attributes
    ----------
    workload : Workload
    participation : Participation
    strategy : Strategy
        The coefficients that are streamed.
    certificate : Certificate
    multipliers : ndarray, shape (n,)
        v: from them anyone can recompute the lower bound.
    provenance : dict
        Options and versions; no times.
    digest : str
        SHA-256 over the logical content, 64 hex digits.
    schema_version : int
        Of the format it was read from; the newest for a new one.
    path : Path or None
        Where it was read from; None in memory.
    """

    workload: Workload
    participation: Participation
    strategy: Strategy
    certificate: Certificate
    multipliers: Array = field(repr=False)
    provenance: dict[str, Any] = field(repr=False)
    digest: str
    schema_version: int = SCHEMA_VERSION
    path: Path | None = None

    @property
    def n(self) -> int:
        """The horizon: steps that it may be streamed for."""
        return self.workload.n

    @property
    def A(self) -> Array:  # noqa: N802 - the field's symbol
        """The workload as an n x n array, computed at each access."""
        return self.workload.dense()

    @property
    def C(self) -> Array:  # noqa: N802
        """The strategy as an n x n array of the stored coefficients, computed at each access."""
        return self.strategy.to_dense()

    @property
    def B(self) -> Array:  # noqa: N802
        """The decoder A C^-1 as an n x n array, computed at each access."""
        return self.strategy.decoder(self.workload)
