"""The artifact inside jax_privacy: its strategy as a `StreamingMatrix`, and our noise as one of its privatizers.

    privatizer(noise)                                   rows from mmfact's own key, as everywhere else
    matrix_factorization_privatizer(                    rows from JAX's pseudo-random numbers
        streaming_matrix(artifact), stddev=stddev(artifact, noise_multiplier=1.0, clip_norm=1.0), prng_key=...)

Either takes the SUM of clipped gradients. The second draws from a `jax.random` key that sits in its state, of 64 bits
by default: whoever sees a checkpoint can remove the noise, and rows that a restart repeats are not noticed. Prefer the
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmfact.factorize.errors import AdapterError
from mmfact.noise import checks
from mmfact.noise.model import ModelNoise
from mmfact.noise.recurrence import Recurrence, recurrence
from mmfact.noise.stepping import stepping
from mmfact.store.artifact import Artifact

try:
    import jax.numpy as jnp
    import optax
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix
except ImportError as error:
    raise AdapterError('mmfact.noise.jax_privacy needs jax_privacy: pip install "mmfact[jax-privacy]"') from error

from mmfact.noise.optax import add_noise


def streaming_matrix(artifact: Artifact) -> StreamingMatrix:
    """C^-1, the noising matrix that `jax_privacy.noise_addition.matrix_factorization_privatizer` takes.

    The privatizer's own `stddev` has to be `stddev(artifact, noise_multiplier=..., clip_norm=...)`: rows of C^-1 are at
    unit noise, and the sensitivity of C is not 1. Its `dtype` has to be float32 or float64: say so for bf16 gradients.

    In float32 the coefficients are rounded to it, in float64 they are exact. Past the horizon there is no row: known
    steps are refused, and where JAX traces, rows are NaN from there on.

    Raises
    ------
    PrivacyError
        float32 would round the rows too much.
    AdapterError, HorizonError, CapacityError
        In `multiply_next` and `init_multiply`: noise of lower precision; a step at or past the horizon; the dense
        strategy's history does not fit.
    """
    rules = {"float32": recurrence(artifact)}

    def rule(dtype: Any) -> Recurrence:
        name = np.dtype(dtype).name
        if name == "float64" and name not in rules:
            rules[name] = recurrence(artifact, name)
        if name not in rules:
            raise AdapterError(
                f"noise of {name} is refused, since its grid would betray gradients; pass dtype=jnp.float32 to the "
                "privatizer"
            )
        return rules[name]

    def init_multiply(like: Any) -> Any:
        dtype = np.promote_types(like.dtype, np.float32)  # gradients may be shorter than their noise

        def zeros(shape: tuple[int, ...]) -> Any:
            return jnp.zeros_like(like, dtype) if shape == like.shape else jnp.zeros(shape, dtype)

        return jnp.zeros((), jnp.int32), rule(dtype).start(like.shape, zeros)

    def multiply_next(white: Any, state: Any) -> tuple[Any, Any]:
        step, held = state
        row, held = rule(white.dtype).step(step, white, held)
        return row, (step + 1, held)

    return StreamingMatrix.from_array_implementation(init_multiply, multiply_next)


def stddev(artifact: Artifact, *, noise_multiplier: float, clip_norm: float) -> float:
    """noise_multiplier * clip_norm * sensitivity, rounded up to float32: the `stddev` of jax_privacy's privatizers.

    The sensitivity is that of the coefficients which `streaming_matrix` uses, whatever the precision.

    Raises
    ------
    PrivacyError
        noise_multiplier or clip_norm not positive and finite, or float32 cannot hold what they give.
    """
    sensitivity = max(recurrence(artifact, dtype).sensitivity for dtype in ("float32", "float64"))
    sigma, clip = checks.positive("noise multiplier", noise_multiplier), checks.positive("clip norm", clip_norm)
    scale = sigma * clip * sensitivity
    checks.check_range(scale, stepping(artifact, "gradient"), np.dtype(np.float32))
    return float(np.nextafter(np.float32(scale), np.float32(np.inf)))


def privatizer(noise: ModelNoise) -> optax.GradientTransformationExtraArgs:
    """`mmfact.noise.optax.add_noise`, with the argument names of jax_privacy's privatizers."""
    transformation = add_noise(noise)

    def update(sum_of_clipped_grads: Any, noise_state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return transformation.update(sum_of_clipped_grads, noise_state, params, **extra)

    return optax.GradientTransformationExtraArgs(transformation.init, update)
