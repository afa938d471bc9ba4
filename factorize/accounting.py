"""Privacy statements: a compiled artifact's, and the one of subsampled DP-SGD, its rival, by Google's dp-accounting.

dp_accounting takes most of a second to import and is loaded by the functions that need it.

Its RDP accountant is used for divergences only. Where rounding makes one of them negative, its own conversion answers
"epsilon 0" (0.6.0; seen at 131,072 steps and noise multipliers above 20); ours takes that divergence for zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.errors import PrivacyError
from mmfact.factorize.participation import Participation
from mmfact.factorize.privacy import (
    INTEGER_ORDERS,
    SMALLEST_NOISE_MULTIPLIER,
    check,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    gaussian_rdp_epsilon,
    gaussian_zcdp_epsilon,
    rdp_epsilon,
)
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import Workload

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Array = npt.NDArray[np.float64]

EXACT = "exact (Balle and Wang)"
PLD = "PLD (dp-accounting)"
RDP_FINE = "RDP, fine orders, CKS conversion"
RDP = "RDP, integer orders 2 to 255, CKS conversion"
RDP_CLASSIC = "RDP, integer orders 2 to 255, classic conversion"
ZCDP = "zCDP, rho + 2 sqrt(rho ln(1/delta))"

_UP = 1 + 1e-9

SUBSAMPLED_ACCOUNTANTS = PLD, RDP, RDP_CLASSIC

# A search over noise multipliers asks for epsilon many times: there every order up to 20 and then each 5 % more.
_FEW_ORDERS = INTEGER_ORDERS[np.unique(np.round(2 * 1.05 ** np.arange(100)).clip(2, 255).astype(int)) - 2]

# How far a noise multiplier that was searched for may lie above the smallest one, relative.
_SEARCH = 1e-3
_LARGEST = 1e6

# PLDs are rounded up to a grid. dp-accounting's own is this fine; a search begins with this part of its epsilon and
# refines until epsilon at the noise found no longer falls by much, or the grid is the finest.
_GRID, _GRID_OF_EPSILON, _FINEST_GRID, _SETTLED = 1e-4, 3e-3, 2e-5, 0.97

# A PLD leaves out tails of 1e-15, which a smaller delta would drown in. Composing many steps by FFT errs by more, up to
# about 1e-11 seen over 300,000 steps: three times that is taken off delta.
SMALLEST_DELTA, SMALLEST_SUBSAMPLED_PLD_DELTA = 1e-14, 1e-9
_FFT = 3e-11

# Of a search: below, the grid that it takes would need half a minute at 131,072 steps.
SEARCHABLE_EPSILONS = 0.01, 1e3

# Where subsampled DP-SGD is accounted for.
_SMALLEST_SUBSAMPLED = 0.01


def poisson_dpsgd_epsilon(
    noise_multiplier: float, sampling_probability: float, steps: int, delta: float, *, accountant: str = PLD
) -> float:
    """Epsilon of DP-SGD with Poisson sampling, plain or projected, rounded up.

    Projected DP-SGD releases the same noisy sums and then projects them, which is post-processing.

    Parameters
    ----------
    sampling_probability : float
        Each example is in each step with this probability, independently.
    accountant : str
        `PLD` (the tightest), `RDP`, or `RDP_CLASSIC`, which papers used: D_a + ln(1/delta) / (a - 1) (Mironov 2017).

    Raises
    ------
    PrivacyError
    """
    _check(delta)
    check(noise_multiplier=noise_multiplier)
    if noise_multiplier < _SMALLEST_SUBSAMPLED:
        raise PrivacyError(
            f"noise multiplier {noise_multiplier!r} is below {_SMALLEST_SUBSAMPLED:g}, the smallest for subsampled "
            "DP-SGD; give about 0.3 to 10"
        )
    release = _poisson_dpsgd(sampling_probability, steps)(noise_multiplier)
    if accountant == RDP_CLASSIC:
        classic = _divergences(release, INTEGER_ORDERS, steps) - math.log(delta) / (INTEGER_ORDERS - 1)
        return float(np.min(classic)) * _UP
    by_rdp = rdp_epsilon(INTEGER_ORDERS, _divergences(release, INTEGER_ORDERS, steps), delta)
    if accountant == RDP:
        return by_rdp
    if accountant == PLD:
        _check_subsampled_pld(delta)
        found, before, grid = math.inf, math.inf, max(_FINEST_GRID, _GRID_OF_EPSILON * by_rdp)
        while not _SETTLED * before < found < math.inf and grid >= _FINEST_GRID:
            before, found = found, _pld_epsilon(release, delta - _FFT, grid)
            grid /= 4
        return min(found, by_rdp)
    raise PrivacyError(f"accountant {accountant!r} is not known for subsampling; use one of {SUBSAMPLED_ACCOUNTANTS}")


def poisson_dpsgd_noise_multiplier(
    epsilon: float, delta: float, sampling_probability: float, steps: int, *, accountant: str = PLD
) -> float | None:
    """The noise multiplier that DP-SGD with Poisson sampling needs for (epsilon, delta), rounded up by about 1 %.

    None where the accountant cannot show so small an epsilon at any noise: RDP, whose orders end.

    Raises
    ------
    PrivacyError
    """
    _check(delta)
    if not SEARCHABLE_EPSILONS[0] <= epsilon <= SEARCHABLE_EPSILONS[1]:
        low, high = SEARCHABLE_EPSILONS
        raise PrivacyError(f"epsilon = {epsilon!r} of subsampled DP-SGD must be in [{low:g}, {high:g}]")
    event = _poisson_dpsgd(sampling_probability, steps)
    if accountant == PLD:
        _check_subsampled_pld(delta)
        by_pld = cache(lambda sigma, grid: _pld_epsilon(event(sigma), delta - _FFT, grid))
        grid = _GRID_OF_EPSILON * epsilon
        found = _smallest(partial(by_pld, grid=grid), epsilon, 1.0)
        while found is not None and grid >= 4 * _FINEST_GRID:
            grid /= 4
            if by_pld(found, grid=grid) > _SETTLED * epsilon:
                break
            found = _smallest(partial(by_pld, grid=grid), epsilon, found)
        return found
    if accountant == RDP:
        return _smallest(
            lambda s: rdp_epsilon(_FEW_ORDERS, _divergences(event(s), _FEW_ORDERS, steps), delta), epsilon, 1.0
        )
    raise PrivacyError(f"accountant {accountant!r} is not known for calibration; use {PLD!r} or {RDP!r}")


@dataclass(frozen=True)
class AmplifiedRival:
    """What DP-SGD with independent noise and Poisson sampling needs for the same (epsilon, delta) over the same steps.

    Attributes
    ----------
    sampling_probability : float
        epochs / n.
    assumption, label : str
        Who takes part when, in full and in a few words.
    noise_multipliers : dict of str to (float or None)
        By accountant, rounded up; None where it cannot show so small an epsilon. No PLD below a delta of 1e-9.
    rmse : float
        Of an iterate on this workload, with the smallest of them.
    """

    sampling_probability: float
    assumption: str
    label: str
    noise_multipliers: dict[str, float | None]
    rmse: float


@dataclass(frozen=True)
class PrivacyStatement:
    """What an artifact's stream guarantees at one noise multiplier, and what is assumed.

    Attributes
    ----------
    noise_multiplier : float
        sigma, as the runtime takes it: it scales the noise by sigma * clip norm * (sensitivity to one participation).
    delta : float
    epochs, separation : int
        How often an example takes part, and how many steps lie between (n for one epoch).
    sensitivity_ratio : float
        Sensitivity under this participation over that of one; rounded up.
    sensitivity_kind : {"exact", "upper bound"}
    participation, label : str
        Who may take part when, in full and in a few words: assumed by every figure of this statement.
    mu, rho : float
        Of Gaussian DP (Dong, Roth, Su 2019) and zCDP: sensitivity_ratio / sigma and mu^2 / 2; rounded up.
    epsilons : dict of str to float
        By accountant, rounded up. `EXACT` is the one to quote; the others bound the same release less tightly.
    event : str
        The release for dp-accounting.
    rmse : float
        Root mean squared error of an iterate, per coordinate, noise on the SUM of gradients at clip norm 1.
    rival : AmplifiedRival or None
        None where no accountant can search: epsilon outside `SEARCHABLE_EPSILONS`, or small at a delta below 1e-9.
    verdict : str
        Which of the two has the smaller error.
    assumptions : tuple of str
    """

    noise_multiplier: float
    delta: float
    epochs: int
    separation: int
    sensitivity_ratio: float
    sensitivity_kind: str
    participation: str
    label: str
    mu: float
    rho: float
    epsilons: dict[str, float]
    event: str
    rmse: float
    rival: AmplifiedRival | None
    verdict: str
    assumptions: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        """The exact one."""
        return self.epsilons[EXACT]


def privacy_statement(
    workload: Workload,
    strategy: Strategy,
    certificate: Certificate,
    participation: Participation,
    *,
    delta: float,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    epochs: int = 1,
) -> PrivacyStatement:
    """State the privacy of an artifact's stream, from exactly one of its noise multiplier and its epsilon.

    Parameters
    ----------
    delta : float
        In (0, 1).
    noise_multiplier, epsilon : float
        Of an epsilon the smallest noise multiplier is found, rounded up.
    epochs : int
        How often every example takes part, always in the same order. More than one is information about what further
        passes would cost: the runtime and its participation check are for one.

    Raises
    ------
    PrivacyError
        A value out of range, both or neither of `noise_multiplier` and `epsilon`.
    """
    from dp_accounting import GaussianDpEvent

    if noise_multiplier is not None and epsilon is not None:
        raise PrivacyError("give either a noise multiplier or an epsilon, not both: one follows from the other")
    _check(delta)
    separation, ratio, kind = workload.n, 1.0, strategy.sensitivity_kind
    assumed, label = "each example (or user) in at most one step", "one step an example"
    if epochs != 1:
        from mmfact.factorize.cyclic import cyclic_sensitivity

        cyclic = cyclic_sensitivity(strategy, epochs)
        separation, kind = cyclic.separation, cyclic.kind
        ratio = float(np.nextafter(cyclic.sensitivity / strategy.sensitivity(participation), np.inf))
        assumed = f"each example (or user) in at most {epochs} steps, each {separation} after the one before"
        label = f"{epochs} steps an example, {separation} apart"
    if epsilon is not None:
        effective = gaussian_noise_multiplier(epsilon, delta)
        noise_multiplier = float(np.nextafter(effective * ratio, np.inf)) if epochs != 1 else effective
    elif noise_multiplier is not None:
        check(noise_multiplier=noise_multiplier)
        effective = float(np.nextafter(noise_multiplier / ratio, 0)) if epochs != 1 else noise_multiplier
        if effective < SMALLEST_NOISE_MULTIPLIER:
            raise PrivacyError(
                f"noise multiplier {noise_multiplier!r} over {epochs} passes counts as {effective:.2g} (sensitivity "
                f"ratio {ratio:.4g}), below {SMALLEST_NOISE_MULTIPLIER:g}, which protects nothing; give about "
                f"{0.3 * ratio:.1f} to {10 * ratio:.0f}"
            )
        epsilon = gaussian_epsilon(effective, delta)
    else:
        raise PrivacyError("give either a noise multiplier or an epsilon: one follows from the other")
    mu = float(np.nextafter(1 / effective, np.inf))
    event = GaussianDpEvent(effective)
    rmse = noise_multiplier * certificate.rmse
    rival = _amplified_rival(workload, epsilon, delta, epochs)
    return PrivacyStatement(
        noise_multiplier=noise_multiplier,
        delta=delta,
        epochs=epochs,
        separation=separation,
        sensitivity_ratio=ratio,
        sensitivity_kind=kind,
        participation=assumed,
        label=label,
        mu=mu,
        rho=float(np.nextafter(mu * mu / 2, np.inf)),
        epsilons={
            EXACT: epsilon,
            PLD: _pld_epsilon(event, delta, _GRID * max(1.0, epsilon)),
            RDP_FINE: gaussian_rdp_epsilon(effective, delta),
            RDP: gaussian_rdp_epsilon(effective, delta, INTEGER_ORDERS),
            ZCDP: gaussian_zcdp_epsilon(effective, delta),
        },
        event=repr(event),
        rmse=rmse,
        rival=rival,
        verdict=_verdict(rmse, rival, epsilon, delta, epochs),
        assumptions=(
            f"participation: {assumed}; nothing is gained from sampling, and the order of the data may be known",
            "neighbouring relation: all contributions of one example (or user) replaced by zero; to replace them by "
            "another's doubles the sensitivity",
            "every contribution has norm at most the clip norm, and the noise of the stream is added to their SUM",
            "gradients may depend on everything released so far: valid because the noise is Gaussian (Denisov et al. "
            "2022, Theorem 2.1)",
            "the arithmetic of Gaussians is taken as exact; no defence against attacks on floating point is claimed",
        ),
    )


def _amplified_rival(workload: Workload, epsilon: float, delta: float, epochs: int) -> AmplifiedRival | None:
    if not SEARCHABLE_EPSILONS[0] <= epsilon <= SEARCHABLE_EPSILONS[1]:
        return None
    n, q = workload.n, epochs / workload.n
    accountants = (PLD, RDP) if delta >= SMALLEST_SUBSAMPLED_PLD_DELTA else (RDP,)
    found = {name: poisson_dpsgd_noise_multiplier(epsilon, delta, q, n, accountant=name) for name in accountants}
    independent = math.sqrt(math.fsum(workload.column_energies()) / n)  # RMSE at C = I: normF(A) / sqrt(n)
    needed = [value for value in found.values() if value is not None]
    if not needed:
        return None
    return AmplifiedRival(
        q,
        f"Poisson sampling: each example in each step, independently, with probability {epochs} / {n}, and in secret",
        f"Poisson, q = {epochs}/{n}",
        found,
        min(needed) * independent,
    )


def _verdict(rmse: float, rival: AmplifiedRival | None, epsilon: float, delta: float, epochs: int) -> str:
    low, high = SEARCHABLE_EPSILONS
    if not low <= epsilon <= high:
        return f"none; amplified DP-SGD is computed only for epsilon {low:g} to {high:g}, and this is {epsilon:.6g}"
    if rival is None:
        return (
            f"none; no accountant shows epsilon {epsilon:.6g} at delta {delta:g} for amplified DP-SGD (PLD needs a "
            f"delta of at least {SMALLEST_SUBSAMPLED_PLD_DELTA:g})"
        )
    at = f"at epsilon {epsilon:.4g}"
    if rmse < rival.rmse:
        wins = "wins" if epochs == 1 else f"would win, if the runtime supported {epochs} passes"
        return (
            f"{at} this artifact {wins}: DP-SGD amplified by Poisson sampling has {rival.rmse / rmse:.3g} times its "
            "error"
        )
    return (
        f"{at} DP-SGD amplified by Poisson sampling wins: this artifact has {rmse / rival.rmse:.3g} times its error; "
        "take that if your loader really samples so"
    )


def _check(delta: float) -> None:
    check(delta=delta)
    if delta < SMALLEST_DELTA:
        raise PrivacyError(
            f"delta = {delta!r} is below {SMALLEST_DELTA:g}, the smallest that dp-accounting can resolve"
        )


def _check_subsampled_pld(delta: float) -> None:
    if delta < SMALLEST_SUBSAMPLED_PLD_DELTA:
        raise PrivacyError(
            f"delta = {delta!r} is below {SMALLEST_SUBSAMPLED_PLD_DELTA:g}, which the FFTs of {PLD} cannot resolve "
            f"over many steps; use {RDP!r}, or a larger delta"
        )


# --- dp-accounting ------------------------------------------------------------------------------------------------


def _poisson_dpsgd(sampling_probability: float, steps: int) -> Callable[[float], DpEvent]:
    """Noise multiplier -> the event of all steps."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    if not 0 < sampling_probability <= 1:
        raise PrivacyError(f"sampling probability {sampling_probability!r} must be in (0, 1]")
    if not (isinstance(steps, int | np.integer) and steps >= 1):
        raise PrivacyError(f"steps = {steps!r} must be a whole number, at least 1")
    return lambda s: SelfComposedDpEvent(PoissonSampledDpEvent(sampling_probability, GaussianDpEvent(s)), int(steps))


def _pld_epsilon(event: DpEvent, delta: float, grid: float) -> float:
    """By privacy loss distributions on a grid: an upper bound, infinite where the grid is far too coarse.

    Neighbouring: one example added or removed, which with Poisson sampling or none is that it contributes zero.
    """
    from dp_accounting.pld import PLDAccountant

    try:
        with np.errstate(over="ignore"):  # a ratio of masses beyond 1e308 stands for an infinite loss, as it should
            found = PLDAccountant(value_discretization_interval=grid).compose(event).get_epsilon(delta)
    except OverflowError:  # e to a grid step
        return math.inf
    return float(found) * _UP + 1e-12


def _divergences(event: DpEvent, orders: Array, steps: int) -> Array:
    """Renyi divergences, raised by what the logarithms that they are made of may have lost at each step."""
    from dp_accounting.rdp import RdpAccountant

    found: Any = RdpAccountant(orders.astype(int).tolist()).compose(event).rdp
    return np.maximum(np.asarray(found), 0.0) * _UP + 1e-13 * steps


def _smallest(epsilon_of: Callable[[float], float], target: float, start: float) -> float | None:
    """The smallest noise multiplier with epsilon_of(it) <= target, at most `_SEARCH` too high."""
    from scipy.optimize import brentq

    @cache
    def gap(sigma: float) -> float:
        return math.log(min(max(epsilon_of(sigma), 1e-300), 1e300) / target)

    low = high = start
    factor = 1.05
    while gap(high) > 0:
        low, high, factor = high, high * factor, factor**2
        if high > _LARGEST:
            return None
    while gap(low) <= 0:
        low, high, factor = low / factor, low, factor**2
    tolerance = _SEARCH / 4 * high
    found = float(brentq(gap, low, high, xtol=tolerance, rtol=1e-15))
    while gap(found) > 0:
        found += tolerance
    return found
