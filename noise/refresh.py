"""What is known of a projector at each refresh: the figures 1 and 2 of Zhou, Wu, Banerjee 2020, along a run.

All of it is made of public gradients and of noisy ones, so it may be stored and shown. The energy of the signal in a
noisy gradient is estimated by subtracting that of the noise, whose variance is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmfact.factorize.errors import ProjectorError
from mmfact.noise.projector import (
    Array,
    Projector,
    Shards,
    explained_energy,
    reconstruction_error,
    subspace_distance,
    top_eigenspace,
)

_CERTAIN = 4  # standard deviations of the noise's energy that a signal's must exceed


@dataclass(frozen=True)
class Refresh:
    """One refresh of a projector.

    Attributes
    ----------
    step : int
        Counted from 0.
    source : {"computed", "cache", "drawn"}
    explained : float or None
        Part of the public gradients' energy that lies in the subspace. None for a random projection.
    gap : float or None
        lambda_k - lambda_(k+1) of the public gradients' second moment.
    rank : int
        Of the public gradients; 0 for a random projection.
    held_out_explained, held_out_error : float or None
        Part of the energy of other public gradients in the subspace; mean of |g - VV'g| / |g| over them.
    distance_to_held_out : float or None
        ||VV' - WW'||, W of these other gradients, where they have the rank for it.
    distance_to_previous : float or None
        ||VV' - WW'||, W of the refresh before. None for a random projection.
    noisy_explained : float or None
        Part of the private mean gradient's energy in the subspace, estimated from the noisy one. None where the noise
        hides it (the estimated energy is below four standard deviations of the noise's).

    Figures of gradients in the subspace are None for directions that are not orthonormal ("random-plain").
    """

    step: int
    source: str
    explained: float | None
    gap: float | None
    rank: int
    held_out_explained: float | None = None
    held_out_error: float | None = None
    distance_to_held_out: float | None = None
    distance_to_previous: float | None = None
    noisy_explained: float | None = None

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def observe(
    projector: Projector,
    step: int,
    source: str,
    *,
    previous: Projector | None,
    held_out: Mapping[str, Any] | None,
    shards: Shards,
) -> Refresh:
    """All figures but that of the noisy gradient."""
    seen: dict[str, float] = {}
    if previous is not None and projector.kind == "eigen":
        seen["distance_to_previous"] = subspace_distance(projector, previous, shards)
    if held_out is not None and projector.kind != "random-plain":
        with suppress(ProjectorError):  # gradients that are not finite, or fewer than k independent ones: no figure
            seen["held_out_explained"] = explained_energy(projector, held_out, shards)
            seen["held_out_error"] = reconstruction_error(projector, held_out, shards)
            if projector.kind == "eigen":
                other = top_eigenspace(held_out, projector.k, shards=shards)
                seen["distance_to_held_out"] = subspace_distance(projector, other, shards)
    return Refresh(step, source, projector.explained, projector.gap, projector.rank, **seen)


def noisy_explained(coefficients: Array, squared_norm: float, elements: float, deviation: float) -> float | None:
    """The part of a mean gradient's energy in the subspace, from the noisy mean.

    Parameters
    ----------
    coefficients : ndarray, shape (k,)
        V' times the noisy mean.
    squared_norm : float
        Of the noisy mean.
    elements : float
        p.
    deviation : float
        The noise's standard deviation in one element.
    """
    variance = deviation**2
    signal = squared_norm - elements * variance
    if not (math.isfinite(signal) and signal > _CERTAIN * variance * math.sqrt(2 * elements)):
        return None
    return float((np.square(coefficients).sum() - len(coefficients) * variance) / signal)
