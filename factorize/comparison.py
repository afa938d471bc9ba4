"""A certified strategy beside every classic mechanism, on one workload."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mmfact.factorize import baselines, compiler
from mmfact.factorize.certificate import Certificate
from mmfact.factorize.compiler import Options
from mmfact.factorize.optimum import Progress, silent
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import Workload, prefix_sum

# How close to the optimum of prefix sums the strategy is that stands for it.
_PREFIX_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    """One mechanism's figures at unit noise.

    Attributes
    ----------
    name, how : str
    loss, rmse, max_error : float
        See `mmfact.factorize.certificate.Certificate`.
    ratio : float
        loss / lower bound, at least 1.
    buffers : int
        Vectors of model size that streaming keeps or draws again.
    bytes_per_parameter : int
        Of a float32 stream.
    """

    name: str
    how: str
    loss: float
    rmse: float
    max_error: float
    ratio: float
    buffers: int
    bytes_per_parameter: int


@dataclass(frozen=True)
class Comparison:
    """Rows by increasing loss; `left_out` gives a reason for each mechanism that is not among them."""

    rows: tuple[Row, ...]
    lower_bound: float
    left_out: dict[str, str]


def compare(
    workload: Workload,
    strategy: Strategy,
    certificate: Certificate,
    participation: Participation,
    *,
    on_progress: Callable[[Progress], None] = silent,
) -> Comparison:
    """Set `strategy` beside the baselines and beside the post-processed optimum of prefix sums.

    The latter is B = M S^-1 B_S of Denisov et al. 2022, section 5: what a momentum workload gains over it is what it
    is worth to optimise for the optimizer that one really runs.
    """
    bound = certificate.lower_bound

    def row(name: str, how: str, loss: float, max_error: float, buffers: int, memory: int) -> Row:
        return Row(name, how, loss, math.sqrt(loss / workload.n), max_error, loss / bound, buffers, memory)

    figures = certificate.loss, certificate.max_error, strategy.buffers, strategy.bytes_per_parameter
    rows = [row("this", f"mmfact, {strategy.kind}", *figures)]
    if workload.kind != "prefix-sum":
        prefix = compiler.compile(
            prefix_sum(workload.n), Options(dtype="float64", tolerance=_PREFIX_TOLERANCE), on_progress=on_progress
        ).strategy
        rows.append(
            row(
                "prefix-sum optimum",
                "made for prefix sums, its noise run through this optimizer",
                *prefix.errors(workload, participation),
                prefix.buffers,
                prefix.bytes_per_parameter,
            )
        )
    for one in baselines.baselines(workload, participation, on_progress=lambda name: on_progress(Progress(name))):
        rows.append(row(one.name, one.how, one.loss, one.max_error, one.buffers or 0, 4 * (one.buffers or 0)))
    rows.sort(key=lambda row: row.loss)
    return Comparison(tuple(rows), bound, baselines.left_out(workload))
