"""The optax transformation: its rows, whole runs against dense algebra, restarts, shardings, and what it refuses.

What depends on float64 or on several devices runs in one child process with both, which runs this file again.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import AdapterError, ParticipationError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.model import ModelNoise
from mmfact.noise.release import Shard
from mmfact.noise.source import NoiseSource

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from mmfact.noise.optax import DeviceNoise, NoiseState, add_noise, tensors  # noqa: E402

jnp = jax.numpy
Array = Any

STRATEGIES = ("buffered", "banded-low-rank", "dense")
SIGMA, CLIP, BATCH = 1.3, 0.7, 32
SCALES = {"noise_multiplier": SIGMA, "clip_norm": CLIP}
RUN = bytes(range(16))
WIDE = bool(jax.config.jax_enable_x64)
DTYPE = np.dtype(np.float64 if WIDE else np.float32)

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
kinds = pytest.mark.parametrize("kind", [ModelNoise, DeviceNoise])


@pytest.fixture
def params() -> dict[str, Any]:
    """A matrix, a vector and an empty leaf, not in order of their names."""
    random = np.random.default_rng(0)
    return {
        "layer": {"w": jnp.asarray(random.standard_normal((7, 3)), DTYPE), "b": jnp.ones(3, DTYPE)},
        "empty": jnp.zeros((0, 2), DTYPE),
    }


@pytest.fixture
def small() -> dict[str, Any]:
    """One leaf that is quick to compile for the device, and an empty one."""
    return {"w": jnp.zeros((4, 3), DTYPE), "empty": jnp.zeros(0, DTYPE)}


@pytest.fixture
def noise_of(built: Any, params: Any, key: NoiseKey) -> Callable[..., ModelNoise]:
    """noise_of(kind=ModelNoise, strategy="buffered", tree=params, twice=False, **options), 12 steps of momentum.

    twice : the strategy is 2 C, of sensitivity 2 and so of the same noise; compiled ones have sensitivity 1.
    """

    def make(
        kind: type[ModelNoise] = ModelNoise,
        strategy: str = "buffered",
        tree: Any = None,
        twice: bool = False,
        **options: Any,
    ) -> ModelNoise:
        artifact = built(strategy, "float32", "cooldown").artifact
        if twice:
            held = artifact.strategy
            artifact = dataclasses.replace(artifact, strategy=dataclasses.replace(held, c=2 * held.c, q=2 * held.q))
        leaves = tensors(params if tree is None else tree)
        return kind(artifact, leaves, **{**SCALES, "key": key, "run": RUN, **options})

    return make


def flat(tree: Any) -> Array:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def said(call: Callable[[], Any]) -> str:
    """The last line of what the user sees of an error inside a compiled step."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call())
    return str(caught.value).strip().splitlines()[-1]


def issued(noise: ModelNoise, params: Any, steps: int, state: Any = None) -> tuple[Array, NoiseState, Any]:
    """Rows as they come out of a compiled update of sums of zero; the state, and the compiled update."""
    transformation = add_noise(noise)
    update = jax.jit(transformation.update)
    state = transformation.init(params) if state is None else state
    rows = []
    for _ in range(steps):
        noisy, state = update(zeros(params), state)
        rows.append(flat(noisy))
    return np.array(rows), state, update


@strategies
def test_rows_are_those_of_streams_of_the_same_names(strategy: str, noise_of: Any, params: Any, key: NoiseKey) -> None:
    """Bit for bit, under jit, for leaves named by their paths."""
    noise = noise_of(strategy=strategy)
    names = {"['empty']": 0, "['layer']['b']": 3, "['layer']['w']": 21}
    assert {name: shard.size for name, shard in noise.tensors.items()} == names
    streams = [
        NoiseStream(noise.artifact, size, **SCALES, key=key, run=RUN, name=name, dtype=DTYPE)
        for name, size in names.items()
        if size
    ]
    rows, _, _ = issued(noise, params, noise.horizon)
    expected = [np.concatenate([stream.next() for stream in streams]) for _ in range(noise.horizon)]
    np.testing.assert_array_equal(rows, expected)


@strategies
def test_rows_made_on_the_device_are_the_same_to_rounding(
    strategy: str, noise_of: Any, params: Any, small: Any
) -> None:
    """2e-6 of the largest value, over the whole horizon; the ledger's sensitivity is that of what was used.

    All leaves and a sensitivity of 2 where it compiles quickest, one leaf for the other strategies.
    """
    twice = strategy == "buffered"
    tree = params if twice else small
    host, device = noise_of(strategy=strategy, tree=tree), noise_of(DeviceNoise, strategy, tree, twice)
    expected, _, _ = issued(host, tree, host.horizon)
    rows, state, update = issued(device, tree, device.horizon)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert device.step == host.step == 12
    assert "HorizonError: step 12 is at or past the horizon" in said(lambda: update(zeros(tree), state))
    used, exact = device.ledger()["sensitivity"], host.ledger()["sensitivity"] * (1 + twice)
    assert exact * (1 - 1e-15) <= used <= exact * (1 + 1e-6)


def trained(noise: ModelNoise, params: Any, gradients: Any, scan: bool) -> Array:
    """Parameters after every step of SGD with momentum and schedule on given sums, shape (steps, elements)."""
    rates = jnp.asarray(noise.artifact.workload.learning_rates, DTYPE)
    beta = noise.artifact.workload.beta
    optimizer = optax.chain(add_noise(noise), optax.scale(1 / BATCH), optax.sgd(lambda i: rates[i], momentum=beta))

    def step(carry: Any, sums: Any) -> Any:
        theta, state = carry
        updates, state = optimizer.update(sums, state, theta)
        theta = optax.apply_updates(theta, updates)
        return (theta, state), theta

    carry = params, optimizer.init(params)
    if scan:
        _, path = jax.jit(lambda carry: jax.lax.scan(step, carry, gradients))(carry)
        return np.concatenate([np.reshape(leaf, (noise.horizon, -1)) for leaf in jax.tree.leaves(path)], axis=1)
    path, compiled = [], jax.jit(step)
    for i in range(noise.horizon):
        carry, theta = compiled(carry, jax.tree.map(lambda leaf: leaf[i], gradients))  # noqa: B023 - used at once
        path.append(flat(theta))
    return np.array(path)


@strategies
@pytest.mark.parametrize("scan", [False, True])
def test_a_whole_run_is_what_dense_algebra_says(
    strategy: str, scan: bool, built: Any, noise_of: Any, params: Any, key: NoiseKey
) -> None:
    """theta_0 - (A G + B Z) / batch from the same sums G and the same Z: 1e-4 relative, 1e-10 in float64."""
    noise, made = noise_of(strategy=strategy), built(strategy, "float32", "cooldown")
    n, random = noise.horizon, np.random.default_rng(2)
    gradients = jax.tree.map(lambda leaf: jnp.asarray(random.standard_normal((n, *leaf.shape)), DTYPE), params)
    G = np.concatenate([np.reshape(leaf, (n, -1)) for leaf in jax.tree.leaves(gradients)], axis=1).astype(float)
    Z = []
    for name, shard in noise.tensors.items():
        rows = np.empty((n, shard.size), DTYPE)
        source = NoiseSource(key, RUN, noise.artifact.digest, name, DTYPE)
        for step in range(n):
            source.fill(step, 0, rows[step])
        Z.append(rows)
    sensitivity = np.linalg.norm(made.C, axis=0).max()
    BZ = SIGMA * CLIP * sensitivity * (made.decoder @ np.concatenate(Z, axis=1))
    expected = flat(params) - (made.A @ G + BZ) / BATCH
    path = trained(noise, params, gradients, scan)
    assert path.dtype == DTYPE
    np.testing.assert_allclose(path, expected, rtol=0, atol=(1e-10 if WIDE else 1e-4) * np.abs(expected).max())


@kinds
def test_rows_do_not_depend_on_the_sharding(kind: type[ModelNoise], noise_of: Any) -> None:
    """Leaves split over four devices by rows, by columns and not at all; noisy sums keep the layout of the sums.

    Rows that come from the host are equal, those made on the device within 2e-6 of the largest value.
    """
    if len(jax.devices()) < 4:
        pytest.skip("runs in the child process, which has four devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    shapes = {"a": ((8, 3), ("x",)), "b": ((3, 4), (None, "x")), "c": ((5,), ())}
    if kind is DeviceNoise:
        del shapes["b"], shapes["c"]  # each takes seconds to compile
    sums = {
        name: jax.device_put(
            jnp.zeros(shape, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        )
        for name, (shape, spec) in shapes.items()
    }
    noise, reference = noise_of(kind, tree=sums), noise_of(tree=sums)
    transformation = add_noise(noise)
    update, state = jax.jit(transformation.update), transformation.init(sums)
    rows = []
    for _ in range(4):
        noisy, state = update(sums, state)
        rows.append(flat(noisy))
    assert all(noisy[name].sharding.is_equivalent_to(sums[name].sharding, sums[name].ndim) for name in sums)
    expected = np.array([np.concatenate(list(reference.next().values())) for _ in range(4)])
    tolerance = 0 if kind is ModelNoise else 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerance)


@pytest.mark.skipif(WIDE, reason="this is the child")
def test_in_float64_and_on_four_devices() -> None:
    environment = {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    chosen = "whole_run or streams_of or sharding or finer_sums"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", chosen]
    child = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout
    assert "13 passed" in child.stdout
    assert "skipped" not in child.stdout


@kinds
def test_a_restart_in_the_middle_changes_nothing(kind: type[ModelNoise], noise_of: Any, small: Any) -> None:
    """The state dictionary and the pytree of step 5, both copied to NumPy as a checkpoint has them; bit for bit."""
    noise = noise_of(kind, tree=small)
    _, state, update = issued(noise, small, 5)
    saved, tree = noise.state_dict(), jax.tree.map(np.array, state)
    whole = []
    for _ in range(4):
        noisy, state = update(zeros(small), state)
        whole.append(flat(noisy))
    restored = kind.restore(noise.artifact, saved, key=noise.key, resume="unpublished")
    rows, _, _ = issued(restored, small, 4, jax.tree.map(jnp.asarray, tree))
    np.testing.assert_array_equal(rows, whole)


@kinds
def test_the_order_of_tensors_does_not_matter(kind: type[ModelNoise], noise_of: Any, params: Any) -> None:
    """A state that went through sorted JSON names them in another order than the tree."""
    noise = noise_of(kind)
    turned = kind(noise.artifact, dict(reversed(noise.tensors.items())), **SCALES, key=noise.key, run=RUN)
    expected, _, _ = issued(noise_of(), params, 1)
    rows, _, _ = issued(turned, params, 1)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@kinds
def test_a_state_of_another_step_is_refused(kind: type[ModelNoise], noise_of: Any, small: Any) -> None:
    """An old state would repeat rows under other gradients, a later one would leave a gap; the step is not spent."""
    noise = noise_of(kind, tree=small)
    _, state, update = issued(noise, small, 3)
    for step in (0, 2, 4):
        line = said(lambda at=step: update(zeros(small), state._replace(step=jnp.asarray(at, jnp.int32))))
        assert line.endswith(
            f"StateError: the optimizer's state is of step {step}, but the next row of the noise is that of step 3, "
            "and none is issued twice; restore both from the same checkpoint"
        )
    assert noise.step == 3
    jax.block_until_ready(update(zeros(small), state))


@kinds
def test_a_fresh_state_is_that_of_step_0(kind: type[ModelNoise], noise_of: Any, small: Any) -> None:
    """And so is refused by a restored run, whose buffers it would not have."""
    noise = noise_of(kind, tree=small)
    noise.skip_to(2)
    assert add_noise(noise).init(small).step == 0


@pytest.mark.parametrize("other", [{"run": bytes(16)}, {"key": NoiseKey.insecure_from_seed(9)}, {"clip_norm": 0.8}])
def test_a_state_of_another_run_is_refused(other: dict[str, Any], noise_of: Any, params: Any) -> None:
    _, state, _ = issued(noise_of(), params, 0)
    assert "state belongs to another run" in said(lambda: issued(noise_of(**other), params, 1, state))


def test_a_step_past_the_horizon_is_refused(noise_of: Any, small: Any) -> None:
    _, state, update = issued(noise_of(tree=small), small, 12)
    assert "HorizonError: step 12 is at or past the horizon of 12 steps" in said(lambda: update(zeros(small), state))


def test_nothing_of_the_key_is_in_state_or_program(noise_of: Any, params: Any) -> None:
    """State: a step, 16 bytes of a hash, buffers. Program of the device form: neither key nor subkeys."""
    key = NoiseKey.insecure_from_seed(77)
    noise = noise_of(DeviceNoise, key=key)
    transformation = add_noise(noise)
    state = transformation.init(params)
    lowered = jax.jit(transformation.update).lower(zeros(params), state).as_text()
    assert "1634760805" in lowered  # ChaCha20's first constant would be found, so a key would be
    hidden = [key.reveal(), *(part.source.subkeys(step) for part in noise._parts.values() for step in range(12))]
    for data in hidden:
        for word in np.frombuffer(data, "<i4").tolist():
            assert str(word) not in lowered
    leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
    for data in hidden:
        assert all(data[at : at + 4] not in leaves for at in range(0, len(data), 4))
    assert len(jax.tree.leaves(add_noise(noise_of()).init(params))) == 2


def test_two_threads_never_have_the_same_subkeys(noise_of: Any) -> None:
    """Eight threads ask for the same step, in each of 12 rounds: one has it."""

    def ask(step: int) -> bool:
        try:
            noise.issue(step, None)
        except StateError:
            return False
        return True

    noise = noise_of(DeviceNoise)
    with ThreadPoolExecutor(8) as pool:
        for step in range(12):
            assert sum(pool.map(ask, [step] * 8)) == 1


def test_rows_of_a_device_noise_are_not_had_on_the_host(noise_of: Any) -> None:
    """They would be arrays that nobody filled."""
    noise = noise_of(DeviceNoise)
    outs = {name: np.zeros(shard.size, np.float32) for name, shard in noise.tensors.items()}
    for call in (noise.next, lambda: noise.next(outs), lambda: noise.add_to(outs)):
        with pytest.raises(StateError, match="use ModelNoise"):
            call()
    assert noise.step == 0


def test_sums_of_low_precision_are_refused_and_bf16_parameters_are_not(noise_of: Any, params: Any) -> None:
    """The noisy sums are not on bf16's grid: noise that was cast first would be, all of it."""
    short = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert {shard.dtype for shard in tensors(short).values()} == {"float32"}
    transformation = add_noise(noise_of())
    state = transformation.init(short)
    with pytest.raises(AdapterError, match=r"the sum of \['empty'\] is bfloat16; sum up clipped gradients in float32"):
        transformation.update(short, state)
    noisy, _ = transformation.update(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), short), state)
    values = jnp.asarray(flat(noisy))
    assert (values.astype(jnp.bfloat16).astype(values.dtype) == values).mean() < 0.2
    assert optax.apply_updates(short, noisy)["layer"]["w"].dtype == jnp.bfloat16


def test_sums_that_are_not_finite_stop_nothing(noise_of: Any, params: Any) -> None:
    """The step is taken and all other elements have their noise: data may not steer an abort."""
    expected, _, _ = issued(noise_of(), params, 1)
    sums = zeros(params)
    sums["layer"]["w"] = sums["layer"]["w"].at[2, 1].set(jnp.nan)
    noise = noise_of()
    transformation = add_noise(noise)
    noisy, _ = jax.jit(transformation.update)(sums, transformation.init(params))
    bad = np.isnan(flat(sums))
    np.testing.assert_array_equal(flat(noisy)[~bad], expected[0][~bad])
    assert np.isnan(flat(noisy)[bad]).all()
    assert noise.step == 1


def test_a_wrapper_that_drops_noisy_sums_is_refused(noise_of: Any, params: Any) -> None:
    """optax.MultiSteps updates what it wraps at every call and keeps one result in k: the second call stops it."""
    optimizer = optax.MultiSteps(add_noise(noise_of()), every_k_schedule=3, use_grad_mean=False)
    update = jax.jit(optimizer.update)
    _, state = update(zeros(params), optimizer.init(params), params)
    assert "state is of step 0, but the next row of the noise is that of step 1" in said(
        lambda: update(zeros(params), state, params)
    )


@pytest.mark.parametrize("change", ["added", "removed", "reshaped", "renamed", "shard"])
def test_other_leaves_are_refused(change: str, noise_of: Any, params: Any) -> None:
    noise, (empty, b, w) = noise_of(), noise_of().tensors
    transformation = add_noise(noise)
    state, sums = transformation.init(params), zeros(params)
    layer = sums["layer"]
    if change == "added":
        layer["v"], name = layer["b"], "['layer']['v']"
    elif change == "removed":
        del layer["b"]
        name = b
    elif change == "reshaped":
        layer["w"], name = layer["w"][:6], w
    elif change == "renamed":
        sums["other"], name = sums.pop("empty"), empty
    else:
        parts = {**tensors(params), w: Shard(20, 0, 21)}
        transformation, name = add_noise(ModelNoise(noise.artifact, parts, **SCALES)), w
    with pytest.raises(AdapterError, match="not those that the noise was made for") as caught:
        transformation.update(sums, state)
    assert name in str(caught.value)
    assert change != "reshaped" or f"{w} has shape (6, 3), needed are 21 elements" in str(caught.value)
    with pytest.raises(AdapterError):
        transformation.init(sums)
    assert noise.step == 0


def test_gradients_of_examples_instead_of_their_sum_are_refused_with_their_shape(noise_of: Any, params: Any) -> None:
    transformation = add_noise(noise_of())
    each = jax.tree.map(lambda leaf: jnp.zeros((5, *leaf.shape), DTYPE), params)
    with pytest.raises(AdapterError, match=r"\['layer'\]\['b'\] has shape \(5, 3\), needed are 3 .* over the examples"):
        transformation.update(each, transformation.init(params))


def test_a_state_of_the_other_kind_of_noise_is_refused(noise_of: Any, params: Any) -> None:
    host, device = (add_noise(noise_of(kind)) for kind in (ModelNoise, DeviceNoise))
    for one, other in ((host, device), (device, host)):
        with pytest.raises(AdapterError, match="another kind of noise"):
            one.update(zeros(params), other.init(params))


@pytest.mark.parametrize("leaf", [np.zeros(3, np.int32), np.zeros(3, np.complex64)])
def test_leaves_that_are_not_real_are_refused(leaf: Array) -> None:
    with pytest.raises(AdapterError, match=r"leaf \['n'\] is (int32|complex64)"):
        tensors({"n": leaf})


def test_an_empty_tree_is_refused() -> None:
    with pytest.raises(AdapterError, match="no leaves"):
        tensors({})


def test_what_is_no_model_noise_is_refused(noise_of: Any, key: NoiseKey) -> None:
    with pytest.raises(StateError, match="ModelNoise or DeviceNoise"):
        add_noise(NoiseStream(noise_of().artifact, 3, **SCALES, key=key))


@kinds
@pytest.mark.parametrize("way", ["vmap", "jit of vmap", "vmap of jit"])
def test_under_vmap_it_is_refused(kind: type[ModelNoise], way: str, noise_of: Any, small: Any) -> None:
    """One row would serve every sum of the axis: their differences would be free of noise. None is issued."""
    noise = noise_of(kind, tree=small)
    transformation = add_noise(noise)
    state = transformation.init(small)
    one: Callable[[Any], Any] = lambda sums: transformation.update(sums, state)[0]  # noqa: E731
    several = {"vmap": jax.vmap(one), "jit of vmap": jax.jit(jax.vmap(one)), "vmap of jit": jax.vmap(jax.jit(one))}[way]
    with pytest.raises(AdapterError, match=r"under jax\.vmap, where one row of noise would serve 3 sums"):
        several(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), zeros(small)))
    assert noise.step == 0


def test_buffers_that_were_cast_are_refused(noise_of: Any, small: Any) -> None:
    """In bf16 they would be another strategy's, whose sensitivity nobody computed."""
    noise = noise_of(DeviceNoise, tree=small)
    transformation = add_noise(noise)
    state = transformation.init(small)
    assert state.held
    cast = state._replace(held=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.held))
    with pytest.raises(AdapterError, match="buffers were cast"):
        transformation.update(zeros(small), cast)
    assert noise.step == 0


@kinds
def test_finer_sums_do_not_show_below_the_grid_of_the_noise(kind: type[ModelNoise], noise_of: Any) -> None:
    """float64 sums of 1e-12 and so on added to float32 noise: what comes out is a float32 number."""
    if not WIDE:
        pytest.skip("runs in the child process, which has float64")
    noise = noise_of(kind, tree={"w": jnp.zeros(4, np.float32)})
    transformation = add_noise(noise)
    sums = {"w": jnp.asarray([np.pi * 1e-9, 1e-12, 0.0, 1.0], np.float64)}
    noisy, _ = jax.jit(transformation.update)(sums, transformation.init({"w": jnp.zeros(4, np.float32)}))
    found = np.asarray(noisy["w"])
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, found.astype(np.float32))
    assert np.abs(found).min() > 1e-3  # noise is there


def test_several_processes_are_refused(noise_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(AdapterError, match="2 processes"):
        add_noise(noise_of())


def test_float64_on_the_device_is_refused(noise_of: Any) -> None:
    with pytest.raises(AdapterError, match="'x' is float64"):
        DeviceNoise(noise_of().artifact, {"x": Shard(3, dtype="float64")}, **SCALES)


def test_participation_is_checked_with_ids(noise_of: Any, small: Any) -> None:
    """Through optax.chain, under jit; ids that come twice are refused and the step is not spent."""
    noise = noise_of(tree=small, check_participation=True)
    optimizer = optax.chain(add_noise(noise), optax.scale(1 / BATCH))
    state = optimizer.init(small)
    with pytest.raises(AdapterError, match=r"ids=\.\.\."):
        optimizer.update(zeros(small), state)
    update = jax.jit(lambda state, ids: optimizer.update(zeros(small), state, small, ids=ids))
    _, state = update(state, jnp.array([1, 2, 3]))
    assert "ParticipationError" in said(lambda: update(state, jnp.array([4, 2, 5])))
    _, state = update(state, jnp.array([4, 5, 6]))
    assert noise.step == 2


def test_participation_is_checked_before_subkeys_are_given(noise_of: Any) -> None:
    noise = noise_of(DeviceNoise, check_participation=True)
    noise.issue(0, [1, 2, 3])
    with pytest.raises(ParticipationError):
        noise.issue(1, [4, 2])
    assert noise.step == 1


@pytest.mark.parametrize("hidden", ["jax", "optax"])
def test_a_missing_package_is_named_with_its_extra(hidden: str) -> None:
    code = f"import sys; sys.modules[{hidden!r}] = None\nimport mmfact.noise.optax"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert (
        child.stderr.strip()
        .splitlines()[-1]
        .endswith('AdapterError: mmfact.noise.optax needs jax and optax: pip install "mmfact[optax]"')
    )


def test_rows_are_new_in_every_run(built: Any, params: Any) -> None:
    """Without run= two runs under one key share no row."""
    key, artifact = NoiseKey.from_bytes(secrets.token_bytes(32)), built("buffered", "float32", "cooldown").artifact
    one, two = (issued(ModelNoise(artifact, tensors(params), **SCALES, key=key), params, 1)[0] for _ in range(2))
    assert (one != two).mean() > 0.9
