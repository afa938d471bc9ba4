"""Learning-rate schedules: NAME[:key=value,...] or a file with one value a line."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import WorkloadError

Rates = npt.NDArray[np.float64]

# Rates are squared and inverted on the way to a factorization; within these limits nothing overflows.
SMALLEST_RATE, LARGEST_RATE = 1e-60, 1e60
_SPREAD = 1e-50


@dataclass(frozen=True)
class Schedule:
    """One learning rate a step.

    Attributes
    ----------
    name : str
        The canonical spelling: every parameter that differs from its default, in a fixed order;
        for a file, ``file-`` and 16 hex digits of the SHA-256 of its values.
    rates : ndarray, shape (n,)
        Positive and finite.
    """

    name: str
    rates: Rates


def check_rates(rates: npt.ArrayLike, n: int) -> Rates:
    """Return `rates` as read-only float64 of shape (n,); raise `WorkloadError` naming the first bad step."""
    try:
        given = np.asarray(rates)
    except ValueError:
        given = np.asarray("ragged")
    if given.dtype.kind not in "fiu":
        raise WorkloadError(f"learning rates must be {n} real numbers, not {given.dtype} of shape {given.shape}")
    eta = given.astype(np.float64)
    if eta.shape != (n,):
        raise WorkloadError(
            f"learning rates have shape {eta.shape} but n = {n} needs exactly one rate a step, shape ({n},)"
        )
    bad = ~((eta >= SMALLEST_RATE) & (eta <= LARGEST_RATE))
    if bad.any():
        step = int(np.argmax(bad))
        raise WorkloadError(
            f"learning rate {float(eta[step])!r} at step {step} is not allowed: rates must be positive and finite "
            f"(between {SMALLEST_RATE:g} and {LARGEST_RATE:g}); to freeze training, compile a shorter horizon"
        )
    if eta.min() < _SPREAD * eta.max():
        raise WorkloadError(
            f"learning rates run from {float(eta.min()):g} at step {int(np.argmin(eta))} to {float(eta.max()):g}, a "
            f"factor of more than {1 / _SPREAD:g}, which double precision cannot tell apart; raise the smallest"
        )
    eta.flags.writeable = False
    return eta


def _constant(n: int) -> Rates:
    return np.ones(n)


def _step(n: int, *, factor: float, every: float) -> Rates:
    return factor ** np.floor(np.arange(n) / every)


def _cooldown(n: int, *, fraction: float, final: float) -> Rates:
    rates, last = np.ones(n), int(n * fraction + 1e-9)
    rates[n - last :] = np.linspace(1.0, final, last)
    return rates


def _decay(n: int, *, fraction: float, final: float) -> Rates:
    rates, last = np.ones(n), int(n * fraction + 1e-9)
    rates[n - last :] = final
    return rates


def _cosine(n: int, *, final: float) -> Rates:
    # i / n and not i / (n - 1): with final = 0 the last step still has a positive rate.
    return final + (1 - final) * 0.5 * (1 + np.cos(np.pi * np.arange(n) / n))


def _polynomial(n: int, *, power: float, final: float) -> Rates:
    return final + (1 - final) * (1 - np.arange(n) / n) ** power


def _warmup(n: int, *, fraction: float, start: float) -> Rates:
    rates, first = np.ones(n), int(n * fraction + 1e-9)
    rates[:first] = np.linspace(start, 1.0, first, endpoint=False)
    return rates


@dataclass(frozen=True)
class _Shape:
    make: Callable[..., Rates]
    defaults: dict[str, float]
    about: str


SHAPES: dict[str, _Shape] = {
    "constant": _Shape(_constant, {}, "1 at every step"),
    "step": _Shape(_step, {"factor": 0.1, "every": 1000}, "times `factor` after each `every` steps"),
    "cooldown": _Shape(
        _cooldown, {"fraction": 0.25, "final": 0.05}, "linear from 1 to `final` over the last `fraction`"
    ),
    "decay": _Shape(_decay, {"fraction": 0.25, "final": 0.15}, "`final` for the last `fraction`"),
    "cosine": _Shape(_cosine, {"final": 0.0}, "half a cosine from 1 towards `final`"),
    "polynomial": _Shape(_polynomial, {"power": 1.0, "final": 0.0}, "(1 - i/n)^`power` from 1 towards `final`"),
    "warmup": _Shape(_warmup, {"fraction": 0.1, "start": 0.01}, "linear from `start` to 1, then constant"),
}

# What a key may be: the rule in words and as a test.
_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "fraction": ("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "final": ("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "start": ("a number in (0, 1]", lambda x: 1 >= x > 0),
    "factor": ("a positive number", lambda x: x > 0),
    "every": ("a whole number of at least 1", lambda x: x >= 1 and x == int(x)),
    "power": ("a positive number", lambda x: x > 0),
    "peak": ("a positive number", lambda x: x > 0),
    "warmup": ("a whole number of steps, 0 or more", lambda x: x >= 0 and x == int(x)),
}
_COMMON = {"peak": 1.0, "warmup": 0.0}


def named(text: str, n: int) -> Schedule:
    """Parse ``NAME[:key=value,...]`` into n rates.

    Every schedule also takes ``peak`` (all rates times this, default 1) and ``warmup`` (so many steps of
    1/(warmup+1), 2/(warmup+1), ... come first, and the schedule runs over the rest; default 0).

    Raises
    ------
    WorkloadError
        Unknown name or key, a value that breaks its rule, or rates that are not positive.
    """
    name, _, rest = text.partition(":")
    if name not in SHAPES:
        raise WorkloadError(
            f"schedule {name!r} is not known; use one of {', '.join(SHAPES)}, "
            "or the path of a file with one rate a line"
        )
    shape = SHAPES[name]
    values = {**shape.defaults, **_COMMON}
    if name == "warmup":
        del values["warmup"]  # the shape is the warm-up; two of them would only confuse
    defaults, seen = dict(values), set()
    for item in rest.split(",") if rest else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in values or not equals:
            raise WorkloadError(f"schedule {text!r}: {item!r} is not understood; {name} takes {_keys(defaults)}")
        if key in seen:
            raise WorkloadError(f"schedule {text!r} gives {key!r} twice; give it once")
        seen.add(key)
        rule, holds = _RULES[key]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and holds(number)):
            raise WorkloadError(f"schedule {text!r}: {key} = {value!r} must be {rule}")
        values[key] = number
    canonical = [f"{key}={values[key]:.17g}" for key in values if values[key] != defaults[key]]
    warmup = int(values.get("warmup", 0))
    if warmup >= n:
        raise WorkloadError(f"schedule {text!r}: warmup = {warmup} leaves none of the n = {n} steps; use fewer")
    ramp = np.arange(1, warmup + 1) / (warmup + 1)
    rates = np.concatenate([ramp, shape.make(n - warmup, **{key: values[key] for key in shape.defaults})])
    label = name + (":" + ",".join(_shortest(c) for c in canonical) if canonical else "")
    return Schedule(label, check_rates(rates * values["peak"], n))


def _shortest(item: str) -> str:
    key, _, value = item.partition("=")
    number = float(value)
    return f"{key}={int(number)}" if number == int(number) and abs(number) < 1e15 else f"{key}={number!r}"


def _keys(values: dict[str, float]) -> str:
    return ", ".join(f"{key} ({_RULES[key][0]}, default {value:g})" for key, value in values.items())


def from_rates(rates: npt.ArrayLike, n: int) -> Schedule:
    """A schedule from n numbers; its name is a digest of them."""
    eta = check_rates(rates, n)
    if np.all(eta == 1.0):
        return Schedule("constant", eta)
    return Schedule("file-" + hashlib.sha256(eta.astype("<f8").tobytes()).hexdigest()[:16], eta)


def from_file(path: Path, n: int) -> Schedule:
    """Read a schedule file: one learning rate a line, exactly n lines; ``#`` starts a comment.

    Raises
    ------
    WorkloadError
        The file cannot be read, a line is not one number, or there are not n of them.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"schedule file {path} cannot be read: {error}") from error
    rates = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            rates.append(float(content))
        except ValueError:
            raise WorkloadError(
                f"schedule file {path}, line {number}: {content[:40]!r} is not a number; put one learning rate a line"
            ) from None
    if len(rates) != n:
        raise WorkloadError(f"schedule file {path} has {len(rates)} rates but n = {n}; give exactly one a step")
    return from_rates(rates, n)


def parse(text: str, n: int) -> Schedule:
    """A schedule from what a user types: a known name, or else the path of a file.

    A word that is neither gets one message that offers both.
    """
    if text.partition(":")[0] in SHAPES:
        return named(text, n)
    try:
        is_file = Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or a null character
        is_file = False
    return from_file(Path(text), n) if is_file else named(text, n)
