"""What the runtime asks of its arguments, and of the machine, before anything is issued or allocated."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

import numpy as np

from mmfact.factorize import machine
from mmfact.factorize.errors import CapacityError, PrivacyError, StateError
from mmfact.noise.stepping import BLOCK, Stepping
from mmfact.noise.workers import MOST_THREADS
from mmfact.store.artifact import Artifact

_LARGEST_ROUNDING = 2e-3  # of a row's white noise; the compiler stays below it


def check_artifact(artifact: Any) -> None:
    """An artifact, and nothing that looks like one."""
    if not isinstance(artifact, Artifact):
        raise StateError(f"the artifact must come from mmfact.load(ref) or ArtifactStore.save, not {artifact!r:.60}")


def positive(what: str, value: Any, why: str = "without it there is no privacy") -> float:
    """A positive finite number."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise PrivacyError(f"{what} {value!r:.40} must be a positive finite number; {why}")
    return number


def whole(what: str, value: Any, least: int) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, int) and value.bit_length() > 1024:
        raise CapacityError(f"{what} is a number of {value.bit_length()} bits, more than anything here can hold")
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise StateError(f"{what} = {value!r} must be a whole number of at least {least}")
    return int(value)


def text(what: str, value: Any) -> str:
    """Text that has an encoding."""
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise StateError(f"{what} = {value!r} must be text (no lone surrogates): it tells tensors under one key apart")
    return value


def thread_count(value: Any) -> int:
    """How many threads to use; None for all cores."""
    if value is None:
        return min(machine.threads(), MOST_THREADS)
    threads = whole("threads", value, 1)
    if threads > MOST_THREADS:
        raise StateError(
            f"threads = {threads} is more than {MOST_THREADS}; leave it out for as many as there are cores"
        )
    return threads


def check_range(scale: float, way: Stepping, dtype: np.dtype[Any]) -> None:
    """Noise must neither vanish nor overflow in `dtype`, in any row: 64 standard deviations up, 2^-24 of one down."""
    tiny, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    if not (scale * way.smallest * 2.0**-24 > tiny and scale * way.largest * 64 < most):
        raise PrivacyError(
            f"noise_multiplier * clip_norm * sensitivity = {scale:.3g} gives noise that {dtype} cannot hold; "
            "rescale the gradients and the clip norm, or use dtype float64"
        )
    if not way.largest_buffer * 64 < most:
        raise PrivacyError(
            f"the strategy's buffers reach {way.largest_buffer:.3g}, which {dtype} cannot hold; use dtype float64"
        )
    error = way.amplification * float(np.finfo(dtype).eps)
    if not error <= _LARGEST_ROUNDING:
        raise PrivacyError(
            f"in {dtype} this strategy's rows would be rounded by about {error:.1g} of their white noise "
            f"({_LARGEST_ROUNDING:g} is allowed): it subtracts numbers that nearly cancel. "
            + ("Use dtype float64" if dtype == np.float32 else "Compile the workload instead of giving its strategy")
        )


def check_memory(tensors: list[tuple[int, np.dtype[Any]]], way: Stepping, threads: int) -> None:
    """A stream holds the strategy's bytes an element, a step the output, and each thread what one block is made of."""
    needed = sum(size * (dtype.itemsize + way.memory(dtype)) for size, dtype in tensors)
    needed += threads * max(min(size, BLOCK) * (3 * dtype.itemsize + 4) for size, dtype in tensors)
    available = machine.physical_memory()
    if available is not None and needed > available:
        raise CapacityError(
            f"size = {sum(size for size, _ in tensors)} needs {needed / 2**30:.1f} GiB with this strategy's buffers, "
            f"more than this machine's {available / 2**30:.1f} GiB; split the vector into shards with offset and total"
        )
