"""Correlated noise as an optax transformation, under jit, lax.scan and any sharding.

    noise = ModelNoise(artifact, tensors(params), noise_multiplier=1.0, clip_norm=1.0, key=key)
    optimizer = optax.chain(add_noise(noise), optax.scale(1 / batch_size), optax.sgd(0.1, momentum=0.9))

`update` takes the SUM of clipped gradients, clipped per example over all leaves together, and gives the noisy sum.
Division is `optax.scale(1 / batch_size)`, here and nowhere else, with a constant batch size.

Rows come from the host by a callback in every step, so they are those of every other adapter bit for bit, and the
optimizer's state holds a step and a fingerprint only. With `DeviceNoise` instead of `ModelNoise` they are made on the
device: only the step's subkeys come from the host, as data and never as constants of the compiled program.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmfact.factorize.errors import AdapterError, StateError
from mmfact.noise import chacha
from mmfact.noise.model import ModelNoise
from mmfact.noise.recurrence import recurrence
from mmfact.noise.release import Shard
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import Stepping
from mmfact.store.artifact import Artifact

try:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import io_callback
except ImportError as error:
    raise AdapterError('mmfact.noise.optax needs jax and optax: pip install "mmfact[optax]"') from error


class NoiseState(NamedTuple):
    """The transformation's state, a pytree.

    Attributes
    ----------
    step : int32 array
        The next one.
    run : uint8 array of shape (16,)
        A fingerprint of the noise that the state belongs to.
    held : tuple
        What the strategy keeps for each leaf, if rows are made on the device: empty for `ModelNoise`.
    """

    step: Any
    run: Any
    held: Any


class DeviceNoise(ModelNoise):
    """A `ModelNoise` whose rows `add_noise` makes on JAX's device, in float32: equal to float32 rounding.

    What the strategy keeps between steps is then in the optimizer's state. It tells about past noise: keep a checkpoint
    of it as secret as the key, and together with the `state_dict` of the same step.

    Raises
    ------
    AdapterError
        A tensor that is not float32.
    """

    def __init__(self, artifact: Artifact, tensors: Mapping[str, int | Shard], **common: Any) -> None:
        self._latched = False
        self._rule = recurrence(artifact)
        self._turn = threading.Lock()
        super().__init__(artifact, tensors, **common)
        for name, shard in self.tensors.items():
            if shard.dtype != "float32":
                raise AdapterError(
                    f"noise on the device is float32, but tensor {name!r} is {shard.dtype}; use ModelNoise for it"
                )

    def issue(self, step: int, ids: Sequence[Any] | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Spend a step: the subkeys of its rows, 16 words for each tensor, as secret as they; and its coefficients."""
        with self._turn:  # or two threads might be given the same row
            _check_step(step, self)
            self._issue({}, ids, add=False)
        subkeys = {name: np.frombuffer(part.source.subkeys(step), "<i4") for name, part in self._parts.items()}
        return {name: words.astype(np.int32) for name, words in subkeys.items()}, self.coefficients(step)

    def coefficients(self, step: int) -> tuple[Any, ...]:
        """Of a step, as arrays of the recursion's precision; whole numbers stay whole."""
        values = self._rule.coefficients(step)
        return tuple(np.asarray(value, np.int32 if isinstance(value, int) else self._rule.dtype) for value in values)

    def _issue(self, outs: Mapping[str, Any], ids: Sequence[Any] | None, *, add: bool) -> None:
        if outs:
            raise StateError(
                "rows of a DeviceNoise are made by add_noise on the device; use ModelNoise to have them here"
            )
        super()._issue(outs, ids, add=add)

    def _sensitivity(self, way: Stepping) -> float:
        return max(super()._sensitivity(way), self._rule.sensitivity)

    def _part(self, name: str, shard: Shard, source: NoiseSource, scale: float, way: Stepping) -> Any:
        return _Elsewhere(shard, source)


class _Elsewhere:
    """A part of a release, and its stepper, that has no rows here."""

    blocks = 0
    held = ()

    def __init__(self, shard: Shard, source: NoiseSource) -> None:
        self.shard, self.source, self.stepper = shard, source, self

    def draw(self, step: int, first: int, out: Any) -> None:
        """Nothing is drawn here."""

    def catch_up(self, step: int, draw: Any, workers: Any) -> None:
        """Nothing is kept here."""

    def start_at(self, step: int) -> None:
        """As `catch_up`."""


def tensors(tree: Any) -> dict[str, Shard]:
    """The leaves of a pytree of parameters, for `ModelNoise`: by their paths in it, such as ``['dense']['bias']``.

    Noise for float64 leaves is float64, for all others float32.

    Raises
    ------
    AdapterError
        A leaf is not real floating point, or there is none: give the trainable parameters only.
    """
    found = {}
    for name, leaf in _named(jax.eval_shape(lambda tree: tree, tree)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise AdapterError(f"leaf {name} is {leaf.dtype}; noise needs real floating-point parameters only")
        if name in found:
            raise AdapterError(f"two leaves have the path {name}, and the noise of each needs a name of its own")
        found[name] = Shard(math.prod(leaf.shape), dtype="float64" if leaf.dtype == np.float64 else "float32")
    if not found:
        raise AdapterError("the tree has no leaves; give the parameters that are trained")
    return found


def add_noise(noise: ModelNoise) -> optax.GradientTransformationExtraArgs:
    """The transformation that adds the next row of `noise` to a pytree of sums of clipped gradients.

    It divides nothing and looks at no gradient: per-example gradients that are not finite are to count as zero where
    they are clipped. Sums must be float32 or float64, since one that is rounded before the noise is added no longer has
    the sensitivity of the clip norm; for bf16 parameters sum up in float32, and `optax.apply_updates` casts last.

    Where participation is checked, call ``update(sums, state, params, ids=...)`` with the whole numbers that name the
    step's examples; `optax.chain` passes them on.

    The state has to be that of the noise's next step: after a restart restore both from one checkpoint, the optimizer's
    state and ``ModelNoise.restore(artifact, state_dict, ...)``. Errors that arise while a compiled step runs come as
    `jax.errors.JaxRuntimeError`, mmfact's message at its end; the step's updates are lost.

    Parameters
    ----------
    noise : ModelNoise or DeviceNoise
        For ``tensors(params)``.

    Raises
    ------
    AdapterError
        Here: JAX runs in several processes. In `init` and `update`: leaves that are not those of `noise`, sums of low
        precision, a state of another kind of noise.
    StateError, HorizonError, ParticipationError
        In `update`: a state of another step or run; the artifact's steps are used up; as for `ModelNoise.next`.
    """
    if not isinstance(noise, ModelNoise):
        raise StateError(f"noise must be a ModelNoise or DeviceNoise for tensors(params), not {noise!r:.60}")
    if jax.process_count() > 1:
        raise AdapterError(
            f"JAX runs in {jax.process_count()} processes, each of which would issue every row; use one process, which "
            "may have many devices"
        )
    run = _fingerprint(noise)

    def init(params: Any) -> NoiseState:
        leaves = _matching(noise, params)
        held = tuple(_start(noise, leaf) for leaf in leaves.values()) if isinstance(noise, DeviceNoise) else ()
        return NoiseState(jnp.zeros((), jnp.int32), jnp.asarray(run), held)

    def update(
        updates: Any, state: NoiseState, params: Any = None, *, ids: Any = None, **_: Any
    ) -> tuple[Any, NoiseState]:
        leaves = _alone(_matching(noise, updates))
        for name, leaf in leaves.items():
            if leaf.dtype not in (np.float32, np.float64):
                raise AdapterError(
                    f"the sum of {name} is {leaf.dtype}; sum up clipped gradients in float32, and cast after the noise"
                )
        if len(state.held) != (len(leaves) if isinstance(noise, DeviceNoise) else 0):
            raise AdapterError(
                "the optimizer's state was made for another kind of noise: a state for DeviceNoise holds buffers, one "
                "for ModelNoise does not; restore with the kind of noise that it was saved with"
            )
        if any(held.dtype != np.float32 for held in jax.tree.leaves(state.held)):
            raise AdapterError("the state's buffers were cast; keep them as they are, in float32")
        if noise.checks_participation and ids is None:
            raise AdapterError("this run checks participation: call update(sums, state, params, ids=...)")
        given = () if ids is None else (jnp.asarray(ids),)
        if isinstance(noise, DeviceNoise):
            rows, held, step = _on_device(noise, leaves, state, given)
        else:
            rows, held, step = _on_host(noise, leaves, state, given)
        # In the noise's precision: finer sums would show below its grid.
        noisy = [
            (leaf.astype(row.dtype) + row).astype(leaf.dtype) for leaf, row in zip(leaves.values(), rows, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), noisy), NoiseState(step, state.run, held)

    return optax.GradientTransformationExtraArgs(init, update)


@jax.custom_batching.custom_vmap
def _alone(leaves: Any) -> Any:
    """The leaves, unless `jax.vmap` is at work: the callback would then be called once, and its row serve every sum."""
    return leaves


@_alone.def_vmap
def _(axis_size: int, batched: Any, leaves: Any) -> Any:
    raise AdapterError(
        f"update was called under jax.vmap, where one row of noise would serve {axis_size} sums; add up over the axis "
        "first, or call it outside of vmap"
    )


def _called(issue: Any, shapes: Any, *arguments: Any) -> Any:
    """What `issue` returns, called on the host once for each run of this place in the program.

    Calls need no order among themselves (`ordered`): each takes the step that the one before it gave. The barrier keeps
    the layout of what is computed from the result away from the call, which XLA could not split over devices.
    """
    return jax.lax.optimization_barrier(io_callback(issue, shapes, *arguments))


def _on_host(
    noise: ModelNoise, leaves: dict[str, Any], state: NoiseState, ids: tuple[Any, ...]
) -> tuple[list[Any], tuple[Any, ...], Any]:
    """(rows, held, next step), the rows from the host."""

    def issue(step: Any, run: Any, *ids: Any) -> Any:
        _check_state(int(step), run, noise)
        rows = noise.next(ids=_listed(ids))
        return [rows[name].reshape(leaf.shape) for name, leaf in leaves.items()], np.int32(int(step) + 1)

    shapes = [jax.ShapeDtypeStruct(leaf.shape, noise.tensors[name].dtype) for name, leaf in leaves.items()]
    rows, step = _called(issue, (shapes, jax.ShapeDtypeStruct((), np.int32)), state.step, state.run, *ids)
    return rows, (), step


def _on_device(
    noise: DeviceNoise, leaves: dict[str, Any], state: NoiseState, ids: tuple[Any, ...]
) -> tuple[list[Any], tuple[Any, ...], Any]:
    """(rows, held, next step), the rows made here from subkeys that come from the host."""

    def issue(step: Any, run: Any, *ids: Any) -> Any:
        _check_state(int(step), run, noise)
        return *noise.issue(int(step), _listed(ids)), np.int32(int(step) + 1)

    shapes = (
        {name: jax.ShapeDtypeStruct((16,), np.int32) for name, leaf in leaves.items() if leaf.size},
        jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), noise.coefficients(0)),
        jax.ShapeDtypeStruct((), np.int32),
    )
    subkeys, coefficients, step = _called(issue, shapes, state.step, state.run, *ids)
    scale = np.nextafter(np.float32(noise.noise_multiplier * noise.clip_norm * noise.sensitivity), np.float32(np.inf))
    rows, held = [], []
    for (name, leaf), before in zip(leaves.items(), state.held, strict=True):
        row, after = jnp.zeros_like(leaf), before
        if leaf.size:
            white = chacha.white(subkeys[name], 0, leaf.size, jnp).reshape(leaf.shape)
            row, after = noise._rule.advance(coefficients, white, before)
        rows.append(row * scale)
        held.append(after)
    return rows, tuple(held), step


def _listed(ids: tuple[Any, ...]) -> list[Any] | None:
    return np.asarray(ids[0]).tolist() if ids else None


def _start(noise: DeviceNoise, leaf: Any) -> Any:
    """What the strategy keeps for a leaf, laid out over devices as the leaf is."""

    def zeros(shape: tuple[int, ...]) -> Any:
        return jnp.zeros_like(leaf, np.float32) if shape == leaf.shape else jnp.zeros(shape, np.float32)

    return noise._rule.start(leaf.shape, zeros)


def _check_state(step: int, run: Any, noise: ModelNoise) -> None:
    if not np.array_equal(run, _fingerprint(noise)):
        raise StateError(
            "the optimizer's state belongs to another run of noise; restore the noise from the same checkpoint as the "
            "optimizer's state"
        )
    _check_step(step, noise)


def _check_step(step: int, noise: ModelNoise) -> None:
    if step != noise.step:
        raise StateError(
            f"the optimizer's state is of step {step}, but the next row of the noise is that of step {noise.step}, and "
            "none is issued twice; restore both from the same checkpoint"
        )


def _fingerprint(noise: ModelNoise) -> Any:
    """Of what never changes in a run."""
    fixed = (noise.run, noise.artifact.digest, noise.key.id, noise.noise_multiplier, noise.clip_norm)
    return np.frombuffer(hashlib.sha256(repr(fixed).encode()).digest()[:16], np.uint8)


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _matching(noise: ModelNoise, tree: Any) -> dict[str, Any]:
    """The leaves by name, if they are those that `noise` was made for."""
    found = _named(tree)
    has = {name: math.prod(jnp.shape(leaf)) for name, leaf in found}
    needed = {name: shard.size if shard.size == shard.total else None for name, shard in noise.tensors.items()}
    if has != needed:
        changed = [name for name in {**needed, **has} if has.get(name) != needed.get(name)]
        shapes = {name: jnp.shape(leaf) for name, leaf in found}
        described = [
            f"{name} has shape {shapes[name]}, needed are {needed[name]} elements"
            if name in shapes and needed.get(name) is not None
            else name
            for name in changed[:3]
        ]
        raise AdapterError(
            f"the leaves are not those that the noise was made for ({'; '.join(described)}): sum up over the examples "
            "first, and make the noise for tensors(tree) of the very tree whose sums it is added to, from the first "
            "step to the last"
        )
    return {name: jnp.asarray(leaf) for name, leaf in found}
