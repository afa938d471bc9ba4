"""Does the optimizer do what the artifact was compiled for? If not, privacy is the same, but the noise not optimal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mmfact.factorize.workload import Workload

_TOLERANCE = 1e-3  # relative: schedulers multiply rates up step by step, and round on the way


class WorkloadMismatch(UserWarning):
    """The optimizer's momentum, learning rates or weight decay are not those of the compiled workload."""


class Guard:
    """Compares an optimizer's settings with the workload at every step, and warns once.

    The learning rates may differ from the workload's by one constant factor: C is the same. Weight decay must then
    differ by its inverse, since only their product counts. A custom workload says nothing that could be compared.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._factors: dict[int, float] = {}
        self._warned = workload.kind == "custom"

    def check(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare the parameter groups that step `step` is about to use: settings by torch's names, what is known.

        momentum, or betas (Adam: its first), nesterov, dampening, lr, weight_decay, decoupled_weight_decay
        """
        if self._warned or step >= self._workload.n:
            return
        found = [difference for number, group in enumerate(groups) for difference in self._compare(step, number, group)]
        if found:
            self._warned = True
            warnings.warn(
                f"at step {step} the optimizer is not the one that this artifact was compiled for "
                f"({self._workload.label()}): {'; '.join(dict.fromkeys(found))}. Privacy is unaffected, but the noise "
                "is no longer optimal: compile the workload that you train with, or set the optimizer to it",
                WorkloadMismatch,
                stacklevel=3,
            )

    def _compare(self, step: int, number: int, group: Mapping[str, Any]) -> list[str]:
        work, found = self._workload, []
        beta = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
        if not _close(float(beta), work.beta):
            found.append(f"momentum is {float(beta):g}, compiled for {work.beta:g}")
        if group.get("nesterov"):
            found.append("nesterov is on, compiled without")
        if beta and group.get("dampening"):
            found.append(f"dampening is {group['dampening']:g}, compiled without")
        if "lr" not in group:
            return found
        rate, compiled = float(group["lr"]), float(work.learning_rates[step])
        if rate == 0 and number not in self._factors:
            return found  # a warm-up from nothing, which says nothing of the factor
        factor = self._factors.setdefault(number, rate / compiled)
        if not _close(rate, factor * compiled):
            found.append(
                f"the learning rate is {rate:g}, {rate / compiled:g} times the compiled one, but it was "
                f"{factor:g} times at the first step"
            )
        decay = float(group.get("weight_decay", 0.0))
        if not _close(decay * rate, work.weight_decay * compiled):
            found.append(
                f"weight decay is {decay:g} at rate {rate:g}, compiled for {work.weight_decay:g} at rate {compiled:g}"
            )
        kind = "decoupled" if group.get("decoupled_weight_decay") else "coupled"
        if decay and kind != work.weight_decay_kind:
            found.append(f"weight decay is {kind}, compiled for {work.weight_decay_kind}")
        return found


def _close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= _TOLERANCE * max(abs(found), abs(wanted))
