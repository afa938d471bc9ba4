"""The noise of a model: its tensors are streams of their names under one key, run, step, journal and state.

What a stream's rows must be is tested elsewhere; here they are what a model's are compared with, bit for bit.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import CapacityError, HorizonError, MmfactError, ParticipationError, StateError
from mmfact.noise import ModelNoise, NoiseKey, NoiseStream, Shard, stepping
from mmfact.noise.source import LARGEST_ROW, NoiseSource
from mmfact.store.format import encode

STEPS = 12
TENSORS = {"weight": 7, "bias": Shard(3, dtype="float64"), "scale": 3}
SCALES = {"noise_multiplier": 1.3, "clip_norm": 0.7}
SECRET = bytes(range(100, 132))

strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])


@pytest.fixture
def artifact(built: Any) -> Any:
    return built("buffered", "float32").artifact


@pytest.fixture(scope="module")
def model(built: Any, key: NoiseKey) -> Callable[..., ModelNoise]:
    """model(artifact=<buffered>, tensors=TENSORS, **options): of run 0."""

    def make(artifact: Any = None, tensors: Any = TENSORS, **options: Any) -> ModelNoise:
        options = {**SCALES, "key": key, "run": bytes(16), **options}
        return ModelNoise(artifact or built("buffered", "float32").artifact, tensors, **options)

    return make


@pytest.fixture(scope="module")
def whole(stream: Any, rows_of: Any) -> Callable[..., dict[str, Any]]:
    """whole(artifact, tensors=TENSORS, **options): all rows of the tensors, each from a stream of its own."""

    def collect(artifact: Any, tensors: Any = TENSORS, **options: Any) -> dict[str, Any]:
        options = {"run": bytes(16), **options}
        shards = {name: entire(own) for name, own in tensors.items()}
        return {
            name: rows_of(stream(artifact, shard.total, name=name, dtype=shard.dtype, **options))
            for name, shard in shards.items()
        }

    return collect


def entire(size: int | Shard) -> Shard:
    return size if isinstance(size, Shard) else Shard(size)


def rows(made: ModelNoise, count: int | None = None) -> dict[str, Any]:
    """The next rows of every tensor; all that are left by default."""
    found = [made.next() for _ in range(made.horizon - made.step if count is None else count)]
    return {name: np.array([row[name] for row in found]) for name in made.tensors}


def equal(found: Mapping[str, Any], expected: Mapping[str, Any], first: int = 0) -> None:
    """Bit for bit, from row `first` of `expected` on."""
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert own.dtype == expected[name].dtype
        np.testing.assert_array_equal(own, expected[name][first : first + len(own)])


# Rows.


@strategies
@both_spaces
@pytest.mark.parametrize(("block", "threads"), [(1 << 16, 1), (2, 3)])
def test_the_rows_are_those_of_streams(
    strategy: str,
    space: str,
    block: int,
    threads: int,
    built: Any,
    model: Any,
    whole: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same names, key and run, in one precision or both: whoever checks a run can do it tensor by tensor."""
    artifact = built(strategy, "float32", "ema").artifact
    expected = whole(artifact, space=space)
    monkeypatch.setattr(stepping, "BLOCK", block)
    made = model(artifact, space=space, threads=threads)
    equal(rows(made), expected)
    assert made.step == STEPS
    with pytest.raises(HorizonError):
        made.next()
    assert not np.array_equal(expected["scale"], expected["bias"])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), strategy=st.sampled_from(["dense", "buffered", "banded-low-rank"]))
def test_any_split_over_processes_gives_the_same_rows(data: Any, strategy: str, built: Any, model: Any) -> None:
    """Ranks of a sharded trainer hold any part of each tensor, or nothing, and know the tensors in any order."""
    artifact = built(strategy, "float32").artifact
    totals = {"weight": 9, "bias": 1, "scale": 4}
    space = data.draw(st.sampled_from(["gradient", "iterate"]))
    expected = rows(model(artifact, totals, space=space), 3)
    ranks = data.draw(st.integers(1, 4))
    edges = {
        name: [0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n]
        for name, n in totals.items()
    }
    prints, parts = set(), []
    for rank in range(ranks):
        names = data.draw(st.permutations(list(totals)))
        held = {
            name: Shard(edges[name][rank + 1] - edges[name][rank], edges[name][rank], totals[name]) for name in names
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stepping, "BLOCK", data.draw(st.integers(1, 10)))
            made = model(artifact, held, space=space, threads=data.draw(st.integers(1, 3)))
        prints.add(made.fingerprint())
        parts.append(rows(made, 3))
        prints.add(made.fingerprint())
    assert len(prints) == 2  # before and after the rows, whatever the rank
    for name in totals:
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts], axis=1), expected[name])


def test_a_process_that_holds_nothing_keeps_step(model: Any, artifact: Any, key: NoiseKey) -> None:
    """More ranks than elements: it issues empty rows, saves and restores as the others do; no tensor may be missing."""
    made = model(tensors={"weight": Shard(0, 3, 7), "bias": Shard(0, 0, 0)})
    assert {name: row.shape for name, row in made.next().items()} == {"weight": (0,), "bias": (0,)}
    made.add_to({"weight": np.empty(0, np.float32), "bias": np.empty(0, np.float32)})
    again = ModelNoise.restore(artifact, made.state_dict(), key=key, resume="unpublished")
    assert again.step == made.step == 2
    assert again.fingerprint() == made.fingerprint()
    assert again.tensors["weight"].total == 7
    with pytest.raises(StateError, match="bias"):
        made.next({"weight": np.empty(0, np.float32)})


@strategies
@both_spaces
@pytest.mark.parametrize("threads", [1, 3])
def test_adding_is_the_sum_and_the_row(
    strategy: str, space: str, threads: int, built: Any, model: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, in each precision; after a skip too, where a stepper makes rows that nobody sees."""
    artifact = built(strategy, "float32").artifact
    expected = whole(artifact, space=space)
    monkeypatch.setattr(stepping, "BLOCK", 2)
    made, random = model(artifact, space=space, threads=threads), np.random.default_rng(1)
    for step in (0, 1, 5, 6, STEPS - 1):
        made.skip_to(step)
        sums = {name: random.standard_normal(row.shape[1]).astype(row.dtype) for name, row in expected.items()}
        before = copy.deepcopy(sums)
        assert made.add_to(sums) is None
        for name, noisy in sums.items():
            np.testing.assert_array_equal(noisy, before[name] + expected[name][step])


def test_a_stream_adds_its_row_to_a_sum(stream: Any, rows_of: Any, artifact: Any) -> None:
    """One vector, the same rule; a sum that is just right is asked for before anything is spent."""
    expected, made = rows_of(stream(artifact, run=bytes(16))), stream(artifact, run=bytes(16))
    sums = np.linspace(-5, 5, 8, dtype=np.float32)
    for wrong in (sums.astype(np.float64), sums[:7], sums[::-1], sums.tolist(), None, sums.reshape(2, 4)):
        with pytest.raises(StateError, match="gradients"):
            made.add_to(wrong)
    for step in range(STEPS):
        noisy = sums.copy()
        made.add_to(noisy)
        np.testing.assert_array_equal(noisy, sums + expected[step])


def test_rows_go_into_the_arrays_given(model: Any, artifact: Any, whole: Any) -> None:
    """Views of one buffer, as a flat model has them, are as good as arrays of their own."""
    expected, made, flat = whole(artifact, {"a": 4, "b": 3}), model(tensors={"b": 3, "a": 4}), np.empty(7, np.float32)
    for step in range(3):
        assert made.next(out := {"a": flat[:4], "b": flat[4:]}) is out
        np.testing.assert_array_equal(flat, np.concatenate([expected["a"][step], expected["b"][step]]))


BUFFER = np.zeros(20, np.float32)
READ_ONLY = np.zeros(7, np.float32)
READ_ONLY.flags.writeable = False
RIGHT = {"weight": np.zeros(7, np.float32), "bias": np.zeros(3), "scale": np.zeros(3, np.float32)}
WRONG_ARRAYS = [
    pytest.param(None, "weight", id="None"),
    pytest.param([], "weight", id="a list"),
    pytest.param({}, "weight", id="nothing"),
    pytest.param({**RIGHT, "more": np.zeros(3, np.float32)}, "more", id="one more"),
    pytest.param({**RIGHT, 5: np.zeros(3, np.float32)}, "5", id="one more, not text"),
    pytest.param({"weight": RIGHT["weight"], "bias": RIGHT["bias"]}, "scale", id="one less"),
    pytest.param({**RIGHT, "weight": [0.0] * 7}, "weight", id="no array"),
    pytest.param({**RIGHT, "weight": np.zeros(6, np.float32)}, "weight", id="too short"),
    pytest.param({**RIGHT, "weight": np.zeros((7, 1), np.float32)}, "weight", id="two axes"),
    pytest.param({**RIGHT, "bias": np.zeros(3, np.float32)}, "bias", id="another precision"),
    pytest.param({**RIGHT, "weight": np.zeros(7, np.float16)}, "weight", id="half precision"),
    pytest.param({**RIGHT, "weight": np.zeros(14, np.float32)[::2]}, "weight", id="not contiguous"),
    pytest.param({**RIGHT, "weight": READ_ONLY}, "weight", id="read only"),
    pytest.param({**RIGHT, "weight": BUFFER[:7], "scale": BUFFER[6:9]}, "share memory", id="overlap"),
    pytest.param({**RIGHT, "weight": BUFFER[2:9], "scale": BUFFER[4:7]}, "share memory", id="one in another"),
]


@pytest.mark.parametrize("call", ["next", "add_to"])
@pytest.mark.parametrize(("arrays", "named"), WRONG_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(call: str, arrays: Any, named: str, model: Any, whole: Any) -> None:
    """By name, and nothing is spent. One row that serves two tensors would cancel in their difference."""
    made = model()
    if not (call == "next" and arrays is None):
        with pytest.raises(StateError, match=named):
            getattr(made, call)(arrays)
    assert made.step == 0
    equal(rows(made), whole(made.artifact))
    assert not BUFFER.any()


def test_tied_tensors_are_refused(model: Any) -> None:
    """The same array under two names, of equal sizes."""
    made, tied = model(tensors={"encoder": 5, "decoder": 5}), np.zeros(5, np.float32)
    with pytest.raises(StateError, match=r"'(en|de)coder' and '(en|de)coder' share memory"):
        made.add_to({"encoder": tied, "decoder": tied})
    assert made.step == 0
    assert not tied.any()


# What a model is made of.


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (None, "tensors"),
        ({}, "tensors"),
        ([("weight", 5)], "tensors"),
        ("weight", "tensors"),
        (5, "tensors"),
        ({5: 5}, "name = 5"),
        ({None: 5}, "name = None"),
        ({b"weight": 5}, "name = b'weight'"),
        ({"\ud800": 5}, "name"),
        ({"weight": 0}, "size = 0"),
        ({"weight": -1}, "size = -1"),
        ({"weight": 2.0}, "size = 2.0"),
        ({"weight": True}, "size = True"),
        ({"weight": "5"}, "size = '5'"),
        ({"weight": None}, "size = None"),
        ({"weight": (5,)}, "size"),
        ({"bias": 3, "weight": np.zeros(5)}, "size"),
        ({"weight": LARGEST_ROW + 1}, "total"),
        ({"weight": 1 << 2000}, "bits"),
    ],
)
def test_what_names_no_tensors_is_refused(tensors: Any, named: str, model: Any) -> None:
    """An error of ours that shows the value."""
    with pytest.raises((StateError, CapacityError), match=named):
        model(tensors=tensors)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": -1}, "size = -1"),
        ({"size": 2.5}, "size = 2.5"),
        ({"size": True}, "size = True"),
        ({"size": 5, "offset": -1}, "offset = -1"),
        ({"size": 5, "offset": 1, "total": 5}, r"1\.\.5 does not fit .* total = 5"),
        ({"size": 0, "offset": 6, "total": 5}, "total = 5"),
        ({"size": 5, "total": 0}, "total = 0"),
        ({"size": 5, "total": 5.0}, r"total = 5\.0"),
        ({"size": 5, "total": LARGEST_ROW + 1}, "total"),
        ({"size": 5, "dtype": "float16"}, "float16"),
        ({"size": 5, "dtype": "bfloat16"}, "bfloat16"),
        ({"size": 5, "dtype": None}, "None"),
        ({"size": 5, "dtype": "f4,,"}, "f4"),
        ({"size": 5, "dtype": {"names": ["a"]}}, "names"),
        ({"size": 5, "dtype": 5}, "5"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(options: dict[str, Any], named: str) -> None:
    """Where it is made, so that the message is about that tensor."""
    with pytest.raises((StateError, CapacityError), match=named):
        Shard(**options)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), ">f4"])
def test_a_shard_spells_its_precision_one_way(dtype: Any) -> None:
    """States and fingerprints compare it."""
    assert Shard(5, dtype=dtype) == Shard(5, 0, 5, "float32")
    assert Shard(np.int64(5), np.int64(2)) == Shard(5, 2, 7)


def test_a_model_larger_than_the_machine_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors together: on a machine of 1 MiB (so simulated) each of them alone would fit."""
    monkeypatch.setattr("mmfact.factorize.machine.os.sysconf", lambda name: 1024)
    model(tensors={"a": 20_000})
    with pytest.raises(CapacityError, match=r"size = 60000 .*GiB"):
        model(tensors={"a": 20_000, "b": 20_000, "c": 20_000})


PUBLIC = (
    "artifact",
    "checks_participation",
    "closed",
    "clip_norm",
    "horizon",
    "key",
    "noise_multiplier",
    "run",
    "sensitivity",
    "space",
    "step",
    "tensors",
    "threads",
)


def test_nothing_of_a_running_model_can_be_set(model: Any, whole: Any) -> None:
    """Every public attribute, and the tensors in their mapping; the list here is complete."""
    tensors = dict(TENSORS)
    made = model(tensors=tensors)
    assert {name for name in dir(made) if not name.startswith("_") and not callable(getattr(made, name))} == set(PUBLIC)
    ledger = made.ledger()
    for name in PUBLIC:
        with pytest.raises(StateError, match=f"{name} of a running stream"):
            setattr(made, name, getattr(made, name))
    tensors["more"] = 5
    with pytest.raises(TypeError):
        made.tensors["more"] = Shard(5)
    with pytest.raises(AttributeError):
        made.tensors["weight"].size = 5
    made.ledger()["tensors"]["weight"][0] = 8
    assert made.ledger() == ledger
    equal(rows(made), whole(made.artifact))


# Failures.


@strategies
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("failing", ["bias", "scale", "weight"])
def test_a_tensor_that_fails_costs_the_step_of_all(
    strategy: str,
    add: bool,
    threads: int,
    failing: str,
    built: Any,
    model: Any,
    whole: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some tensors have their row and some not, so it is lost; every row after that is right in every tensor."""
    artifact = built(strategy, "float32").artifact
    expected, made, real = whole(artifact), model(artifact, threads=threads), NoiseSource.fill
    rows(made, 2)
    out = {name: np.zeros(own.shape[1], own.dtype) for name, own in expected.items()}

    def fill(self: NoiseSource, *given: Any) -> None:
        if failing.encode() in self._context:
            raise MemoryError("no memory")
        real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "fill", fill)
        with pytest.raises(MemoryError, match="no memory"):
            made.add_to(out) if add else made.next(out)
    assert made.step == 3
    assert not made._lock.locked()
    assert not out[failing].any()
    for name, own in out.items():
        assert not own.any() or np.array_equal(own, expected[name][2])
    equal(rows(made), expected, 3)


def test_a_forked_child_issues_nothing(model: Any, whole: Any) -> None:
    """Its rows would be this process's."""
    made = model()
    made.next()
    sums = {name: np.zeros(row.shape, row.dtype) for name, row in made.next().items()}
    for call in (made.next, lambda: made.add_to(sums), made.state_dict, lambda: made.skip_to(5)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                call()
            except StateError as error:
                code = 0 if "fork" in str(error) and not any(part.any() for part in sums.values()) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    equal(rows(made), whole(made.artifact), 2)


def test_a_model_is_not_pickled_or_copied(model: Any) -> None:
    """Two copies would issue the same rows."""
    made = model()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda it: pickle.dumps({"noise": [it]})):
        with pytest.raises(StateError):
            attempt(made)


def test_nothing_that_is_printed_or_saved_holds_the_key(built: Any) -> None:
    """In any spelling; nor the ids of examples, where they are checked."""
    secret = NoiseKey.from_bytes(SECRET)
    made = ModelNoise(built("buffered", "float32").artifact, TENSORS, key=secret, check_participation=True, **SCALES)
    made.next(ids=["patient-4711", 8150815])
    state = made.state_dict()
    again = ModelNoise.restore(made.artifact, state, key=secret, resume="unpublished")
    forms = [SECRET, SECRET.hex().encode(), base64.b64encode(SECRET), repr(SECRET).encode(), str(list(SECRET)).encode()]
    forms += [b"patient-4711", b"8150815", (8150815).to_bytes(3, "little"), (8150815).to_bytes(3, "big")]
    for seen in (made, again, vars(made), vars(again), made.ledger(), made.fingerprint(), state):
        data = f"{seen} {seen!r}".encode()
        assert not any(form in data for form in forms)
    for data in (pickle.dumps(state), pickle.dumps(made.ledger()), state["ids"], *state["buffers"]):
        assert not any(form in data for form in forms)


# States.


def parted(tensors: Mapping[str, Any]) -> list[dict[str, Shard]]:
    """Two processes' shards of the tensors, in different orders."""
    shards = {name: entire(own) for name, own in tensors.items()}
    first = {name: Shard(own.total // 2, 0, own.total, own.dtype) for name, own in reversed(shards.items())}
    second = {
        name: Shard(own.total - own.total // 2, own.total // 2, own.total, own.dtype) for name, own in shards.items()
    }
    return [first, second]


@strategies
@both_spaces
@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("before", [False, True], ids=["whole", "parted"])
@pytest.mark.parametrize("after", [False, True], ids=["whole", "parted"])
def test_a_restored_model_continues_bit_for_bit(
    strategy: str,
    space: str,
    buffers: bool,
    before: bool,
    after: bool,
    built: Any,
    model: Any,
    whole: Any,
    key: NoiseKey,
) -> None:
    """On as many processes as before or another number: other noise would not cancel what was issued.

    Saved right after rows, and right after a skip; a state without buffers passes through JSON.
    """
    artifact = built(strategy, "float32", "cooldown").artifact
    expected = whole(artifact, space=space)
    for skip in (4, 6):
        saved = model(artifact, parted(TENSORS)[1] if before else TENSORS, space=space)
        rows(saved, 4)
        saved.skip_to(skip)
        state = saved.state_dict(buffers=buffers)
        if not buffers:
            state = json.loads(json.dumps(state, sort_keys=True))
        for held in parted(TENSORS) if after else [{name: entire(own) for name, own in TENSORS.items()}]:
            made = ModelNoise.restore(artifact, state, key=key, resume="unpublished", tensors=held)
            found = rows(made)
            for name, own in held.items():
                np.testing.assert_array_equal(found[name], expected[name][skip:, own.offset : own.offset + own.size])
    default = ModelNoise.restore(artifact, state, key=key, resume="unpublished")
    assert default.tensors == saved.tensors
    equal(rows(default), rows(saved))


@pytest.mark.parametrize("saved", [("a", "b", "c"), ("c", "a", "b")])
@pytest.mark.parametrize("restored", [("a", "b", "c"), ("b", "c", "a"), None])
def test_the_order_of_the_tensors_does_not_matter(
    saved: tuple[str, ...], restored: tuple[str, ...] | None, model: Any, artifact: Any, whole: Any, key: NoiseKey
) -> None:
    """Buffers of one tensor under the name of another, of equal size, would be noise that betrays both.

    Checkpoint formats sort keys as they like, in the state's fields too.
    """
    made = model(tensors=dict.fromkeys(saved, 4))
    rows(made, 5)
    state = made.state_dict()
    tensors = None if restored is None else dict.fromkeys(restored, 4)
    for order in (sorted, reversed):
        mixed = {
            **state,
            **{field: {n: state[field][n] for n in order(state[field])} for field in ("tensors", "shards")},
        }
        again = ModelNoise.restore(artifact, mixed, key=key, resume="unpublished", tensors=tensors)
        assert again.fingerprint() == made.fingerprint()
        equal(rows(again), whole(artifact, {"a": 4, "b": 4, "c": 4}), 5)


def test_saved_buffers_are_used(model: Any, artifact: Any, key: NoiseKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same shards the next row draws its own white values only; on others, all those before too."""
    made, drawn, real = model(), [], NoiseSource.fill
    rows(made, 5)
    state = made.state_dict()

    def fill(self: NoiseSource, step: int, *given: Any) -> None:
        drawn.append(step)
        real(self, step, *given)

    monkeypatch.setattr(NoiseSource, "fill", fill)
    ModelNoise.restore(artifact, state, key=key, resume="unpublished").next()
    assert set(drawn) == {5}
    ModelNoise.restore(artifact, state, key=key, resume="unpublished", tensors=parted(TENSORS)[0]).next()
    assert set(drawn) == {0, 1, 2, 3, 4, 5}


@pytest.fixture
def state(model: Any) -> dict[str, Any]:
    made = model()
    rows(made, 5)
    return made.state_dict()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"more": 2}, "'more'"),
        ({"bias": None}, "'bias'"),
        ({"weight": 8}, "'weight'"),
        ({"weight": Shard(3, 0, 8)}, "'weight'"),
        ({"scale": Shard(3, dtype="float64")}, "'scale'"),
        ({"bias": 3}, "'bias'"),
        ({"weight": None, "kernel": 7}, "'kernel', 'weight'"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "'a', 'b', 'c' and 1 more"),
        ({"weight": "7"}, "size = '7'"),
        ({5: 7}, "name = 5"),
    ],
)
def test_a_model_that_changed_is_refused(
    change: dict[Any, Any], named: str, state: dict[str, Any], artifact: Any, key: NoiseKey
) -> None:
    """A tensor added, removed, renamed, resized or in another precision, by name: its noise would not cancel."""
    tensors = {name: shard for name, shard in {**TENSORS, **change}.items() if shard is not None}
    with pytest.raises(StateError, match=named):
        ModelNoise.restore(artifact, state, key=key, resume="unpublished", tensors=tensors)


@pytest.mark.parametrize("tensors", [{}, [], 5, "weight"])
def test_restored_on_no_tensors_is_refused(tensors: Any, state: dict[str, Any], artifact: Any, key: NoiseKey) -> None:
    """An empty model restores nothing."""
    with pytest.raises(StateError, match="tensors"):
        ModelNoise.restore(artifact, state, key=key, resume="unpublished", tensors=tensors)


CHANGES: dict[str, list[Any]] = {
    "version": [2, 4, None],
    "run": ["ab" * 16, None],
    "artifact": ["00" * 32],
    "key": ["00" * 8],
    "space": ["iterate"],
    "noise_multiplier": [0.13, "1.3", None],
    "clip_norm": [0.07],
    "tensors": [
        {},
        None,
        {"weight": [7, "float32"], "bias": [3, "float64"]},
        {"weight": [8, "float32"], "bias": [3, "float64"], "scale": [3, "float32"]},
        {"weight": [7, "float32"], "bias": [3, "float32"], "scale": [3, "float32"]},
        {"kernel": [7, "float32"], "bias": [3, "float64"], "scale": [3, "float32"]},
    ],
    "shards": [
        {},
        None,
        {"weight": [0, 6], "bias": [0, 3], "scale": [0, 3]},
        {"weight": [0, 7], "bias": [0, 3], "scale": [0, 3], "more": [0, 3]},
    ],
    "step": [4, 6, None],
    "skipped": [1],
    "committed": [1],
    "resumes": [[{"step": 1, "declared": None, "reissued": 0}], None],
    "journal": [True],
    "participation": ["00" * 32, ""],
    "ids": [b"", b"x"],
    "signature": ["00" * 32, "", None],
    "more": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [pytest.param(f, v, id=f"{f}={v!r:.40}") for f, values in CHANGES.items() for v in values]
)
def test_a_field_that_was_changed_is_refused(
    field: str, value: Any, state: dict[str, Any], artifact: Any, key: NoiseKey
) -> None:
    """Another scale or tensor under the same white rows, or an old step, betrays the gradients. Missing is as bad."""
    assert state.get(field, "absent") != value
    for altered in ({**state, field: value}, {name: own for name, own in state.items() if name != field}):
        if altered != state:
            with pytest.raises(StateError):
                ModelNoise.restore(artifact, altered, key=key, resume="unpublished")
    assert ModelNoise.restore(artifact, state, key=key, resume="unpublished").step == 5


def test_every_field_is_changed_above(state: dict[str, Any]) -> None:
    """All but the buffers, which are sealed."""
    assert set(state) - {"buffers"} <= set(CHANGES)


def test_buffers_of_another_state_are_refused(state: dict[str, Any], model: Any, artifact: Any, key: NoiseKey) -> None:
    """Swapped between tensors, of another step, one byte flipped, one left out: never noise from them."""
    other = model()
    rows(other, 6)
    boxes = state["buffers"]
    flipped = [bytes([boxes[0][0] ^ 1]) + boxes[0][1:], *boxes[1:]]
    for wrong in (other.state_dict()["buffers"], boxes[::-1], boxes[1:], [*boxes, boxes[0]], flipped, None, []):
        with pytest.raises(StateError, match="buffers"):
            ModelNoise.restore(artifact, {**state, "buffers": wrong}, key=key, resume="unpublished")


def test_streams_and_models_are_not_restored_as_each_other(
    state: dict[str, Any], stream: Any, artifact: Any, key: NoiseKey, tmp_path: Path
) -> None:
    """One error of ours, with and without a journal."""
    with pytest.raises(StateError):
        NoiseStream.restore(artifact, state, key=key, resume="unpublished")
    with pytest.raises(StateError):
        ModelNoise.restore(artifact, stream(artifact).state_dict(), key=key, resume="unpublished")
    made = stream(artifact, journal=tmp_path / "journal")
    other = made.state_dict()
    made.close()
    with pytest.raises(StateError):
        ModelNoise.restore(artifact, other, key=key, resume="unpublished", journal=tmp_path / "journal")


def test_one_journal_and_one_commit_serve_all_tensors(
    model: Any, artifact: Any, whole: Any, key: NoiseKey, tmp_path: Path
) -> None:
    """A line a row, however many tensors; a committed checkpoint goes on undeclared, an older one never."""
    path, expected = tmp_path / "journal", whole(artifact)
    made = model(journal=path)
    rows(made, 2)
    older = made.state_dict()
    made.add_to({name: np.zeros(own.shape[1], own.dtype) for name, own in expected.items()})
    state = made.state_dict()
    made.commit()
    lines = [json.loads(line.split(b"\t")[0]) for line in path.read_bytes().splitlines()]
    assert lines[1:] == [{"issued": 1}, {"issued": 2}, {"issued": 3}, {"committed": 3}]
    assert lines[0]["tensors"] == {"weight": [7, "float32"], "bias": [3, "float64"], "scale": [3, "float32"]}
    made.close()
    with pytest.raises(StateError, match="journal"):
        ModelNoise.restore(artifact, state, key=key, resume="unpublished")
    with pytest.raises(StateError, match="committed"):
        ModelNoise.restore(artifact, older, key=key, journal=path, resume="unpublished")
    again = ModelNoise.restore(artifact, state, key=key, journal=path)
    assert again.ledger()["resumes"] == [{"step": 3, "declared": None, "reissued": 0}]
    equal(rows(again, 1), expected, 3)
    again.close()
    with pytest.raises(StateError, match="1 or more rows"):
        ModelNoise.restore(artifact, state, key=key, journal=path)
    last = ModelNoise.restore(artifact, state, key=key, journal=path, resume="unpublished", tensors=parted(TENSORS)[0])
    assert last.ledger()["resumes"][-1] == {"step": 3, "declared": "unpublished", "reissued": 1}
    equal(rows(last), {name: own[:, : own.shape[1] // 2] for name, own in expected.items()}, 3)


def test_the_ledger_names_the_tensors(model: Any) -> None:
    """For whoever signs: JSON-ready, with the elements and precision of each."""
    made = model()
    rows(made, 3)
    ledger = json.loads(json.dumps(made.ledger(), allow_nan=False))
    assert ledger["tensors"] == {"weight": [7, "float32"], "bias": [3, "float64"], "scale": [3, "float32"]}
    assert (ledger["issued"], ledger["skipped"], ledger["committed"]) == (3, 0, 0)
    assert ledger["participation"] == {"schema": "single", "checked": False}
    assert repr(made).startswith("ModelNoise(")
    assert "3 tensors" in repr(made)


# Fingerprints.


def test_what_processes_must_agree_on_changes_the_fingerprint(built: Any, model: Any, stream: Any) -> None:
    """Each difference alone, so that processes which would not make one release notice before they do."""
    skipped, issued = model(), model()
    skipped.skip_to(1)
    issued.next()
    different = {
        "none": model(),
        "artifact": model(built("buffered", "float64").artifact),
        "strategy": model(built("dense", "float32").artifact),
        "key": model(key=NoiseKey.insecure_from_seed(5)),
        "run": model(run=b"\1" * 16),
        "sigma": model(noise_multiplier=1.3000000000000003),
        "clip norm": model(clip_norm=0.7000000000000001),
        "space": model(space="iterate"),
        "step": issued,
        "skipped": skipped,
        "one more": model(tensors={**TENSORS, "more": 1}),
        "one less": model(tensors={"weight": 7, "bias": TENSORS["bias"]}),
        "renamed": model(tensors={"kernel": 7, "bias": TENSORS["bias"], "scale": 3}),
        "resized": model(tensors={**TENSORS, "weight": 8}),
        "precision": model(tensors={**TENSORS, "scale": Shard(3, dtype="float64")}),
        "a stream": stream(run=bytes(16)),
    }
    prints = {what: made.fingerprint() for what, made in different.items()}
    assert len(set(prints.values())) == len(prints)
    assert all(len(bytes.fromhex(own)) == 32 for own in prints.values())
    assert model().fingerprint() == prints["none"]


def test_shards_of_one_vector_agree(stream: Any) -> None:
    """Streams that are parts of one vector, too; not those of another length."""
    parts = [stream(size=size, offset=offset, total=20, run=bytes(16)) for size, offset in ((8, 0), (8, 8), (4, 16))]
    assert len({part.fingerprint() for part in parts}) == 1
    assert stream(size=8, total=21, run=bytes(16)).fingerprint() != parts[0].fingerprint()


OTHER_PROCESS = """
import sys
import mmfact
from mmfact.noise import ModelNoise, NoiseKey, Shard
made = ModelNoise(
    mmfact.load(sys.argv[1]), {"scale": Shard(0, 3, 3), "bias": Shard(1, 2, 3, "float64"), "weight": Shard(2, 5, 7)},
    noise_multiplier=1.3, clip_norm=0.7, key=NoiseKey.insecure_from_seed(2024), run=bytes(16),
)
print(made.fingerprint())
row = made.next()
print(row["weight"].tobytes().hex(), row["bias"].tobytes().hex())
"""


def test_processes_agree(model: Any, artifact: Any, whole: Any, tmp_path: Path) -> None:
    """A process of its own, with the artifact from its file and shards of the same tensors: fingerprint and rows."""
    content = encode(artifact)
    path = tmp_path / f"{artifact.digest}-{hashlib.sha256(content).hexdigest()}.h5"
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    expected = whole(artifact)
    assert done.stdout.split() == [
        model().fingerprint(),
        expected["weight"][0, 5:].tobytes().hex(),
        expected["bias"][0, 2:].tobytes().hex(),
    ]


# Participation.


@pytest.fixture(params=["stream", "model"])
def checked(request: pytest.FixtureRequest, model: Any, stream: Any) -> Callable[..., Any]:
    """checked(**options): a stream, or a model, of run 0 that checks participation."""

    def make(**options: Any) -> Any:
        options = {"run": bytes(16), "check_participation": True, **options}
        return model(**options) if request.param == "model" else stream(model().artifact, 7, name="weight", **options)

    return make


def weight(row: Any) -> Any:
    """Of a model's row or a stream's."""
    return row["weight"] if isinstance(row, Mapping) else row


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of white values from here on."""
    seen: list[int] = []
    real = NoiseSource.fill

    def fill(self: NoiseSource, step: int, *given: Any) -> None:
        seen.append(step)
        real(self, step, *given)

    monkeypatch.setattr(NoiseSource, "fill", fill)
    return seen


REFUSED = [
    pytest.param([7, 1], ParticipationError, "1 of step 2", id="took part before"),
    pytest.param(["b"], ParticipationError, "'b' of step 2", id="took part before, text"),
    pytest.param(np.array([9, 8, 9]), ParticipationError, "9 is there twice", id="twice in a step"),
    pytest.param(None, StateError, "ids=", id="missing"),
    pytest.param("abc", MmfactError, "ids", id="text instead of a list"),
    pytest.param(5, MmfactError, "ids", id="a number instead of a list"),
    pytest.param([1.5], MmfactError, "1.5", id="no id"),
]


@pytest.mark.parametrize(("ids", "error", "named"), REFUSED)
@pytest.mark.parametrize("call", ["next", "add_to"])
def test_a_step_is_refused_before_anything_is_drawn(
    ids: Any, error: type[Exception], named: str, call: str, checked: Any, whole: Any, drawn: list[int]
) -> None:
    """It is not spent, and nothing of its ids is remembered: the same row then serves the step without the offender."""
    made = checked()
    expected = whole(made.artifact)["weight"]
    made.next(ids=[1, 2, 3])
    zeros = made.next(ids=["a", "b"])
    for array in zeros.values() if isinstance(zeros, Mapping) else [zeros]:
        array[:] = 0
    before = made.ledger()
    drawn.clear()
    for _ in range(2):
        with pytest.raises(error, match=named):
            made.next(ids=ids) if call == "next" else made.add_to(zeros, ids=ids)
    assert not drawn
    assert not weight(zeros).any()
    assert made.ledger() == before
    assert made.step == 2
    assert not made._lock.locked()
    np.testing.assert_array_equal(weight(made.next(ids=[7, 8, 9])), expected[2])
    np.testing.assert_array_equal(weight(made.next(ids=[])), expected[3])


def test_ids_that_nobody_checks_are_refused(model: Any, stream: Any) -> None:
    """Whoever gives them believes that they are checked."""
    for made in (model(), stream()):
        for ids in ([1, 2], []):
            with pytest.raises(StateError, match="check_participation=True"):
                made.next(ids=ids)
        assert made.step == 0
        assert not made.checks_participation


def test_the_ledger_shows_what_was_checked(checked: Any) -> None:
    """How many examples took part, and how often at most; a step without any counts too."""
    made = checked()
    assert made.checks_participation
    first = made.ledger()["participation"]
    assert (first["schema"], first["checked"], first["steps"], first["examples"]) == ("single", True, 0, 0)
    made.next(ids=range(100))
    made.next(ids=[])
    made.next(ids=["x"])
    seen = made.ledger()["participation"]
    assert (seen["steps"], seen["examples"], seen["most"]) == (3, 101, 1)
    json.dumps(made.ledger(), allow_nan=False)


@pytest.mark.parametrize("buffers", [True, False])
def test_a_restored_run_remembers_who_took_part(buffers: bool, checked: Any, whole: Any, key: NoiseKey) -> None:
    """From before the state; whoever took part after it may again, in the rows that are issued again."""
    made = checked()
    expected = whole(made.artifact)["weight"]
    made.next(ids=[1, 2])
    made.skip_to(3)
    made.next(ids=["a"])
    state = made.state_dict(buffers=buffers)
    record = made.ledger()["participation"]
    made.next(ids=[5])
    for _ in range(2):  # the second time from the state of a restored run
        again = type(made).restore(made.artifact, state, key=key, resume="unpublished")
        assert again.checks_participation
        assert again.ledger()["participation"] == record
        for repeated in ([2], ["a"], [5, 1]):
            with pytest.raises(ParticipationError):
                again.next(ids=repeated)
        with pytest.raises(StateError, match="ids"):
            again.next()
        state = again.state_dict(buffers=buffers)
        np.testing.assert_array_equal(weight(again.next(ids=[5, 6])), expected[4])


def test_ids_that_were_tampered_with_are_refused(checked: Any, key: NoiseKey) -> None:
    """Removed, emptied, cut, flipped, of an earlier step, of another run: none is restored, so nobody is forgotten."""
    made = checked()
    made.next(ids=[1, 2])
    earlier = made.state_dict()
    made.next(ids=[3])
    state = made.state_dict()
    other = checked(run=b"\1" * 16)
    other.next(ids=[1, 2])
    ids = state["ids"]
    flipped = ids[:-1] + bytes([ids[-1] ^ 1])
    for wrong in (b"", None, ids[:-8], flipped, earlier["ids"], other.state_dict()["ids"], ids.hex(), 5):
        with pytest.raises(StateError):
            type(made).restore(made.artifact, {**state, "ids": wrong}, key=key, resume="unpublished")
    for gone in (("ids",), ("participation",), ("ids", "participation")):
        left = {name: value for name, value in state.items() if name not in gone}
        with pytest.raises(StateError):
            type(made).restore(made.artifact, left, key=key, resume="unpublished")
    with pytest.raises(StateError):
        type(made).restore(made.artifact, {**state, "ids": None, "participation": None}, key=key, resume="unpublished")


def test_examples_of_a_row_that_was_lost_have_taken_part(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of the row may have been seen, so its examples are used up; the run goes on with others."""
    made = checked()

    def fill(self: NoiseSource, *given: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "fill", fill)
        with pytest.raises(MemoryError):
            made.next(ids=[1])
    assert made.step == 1
    with pytest.raises(ParticipationError):
        made.next(ids=[1])
    made.next(ids=[2])
    assert made.ledger()["participation"]["examples"] == 2


def test_ids_that_cannot_be_read_do_not_spend_the_step(checked: Any) -> None:
    """An iterable of the caller's that raises in the middle: its error comes out, and the step can be tried again."""
    made = checked()

    def broken() -> Any:
        yield 1
        raise RuntimeError("the loader failed")

    with pytest.raises(RuntimeError, match="the loader failed"):
        made.next(ids=broken())
    assert made.step == 0
    made.next(ids=[1])
    assert made.step == 1


def test_a_refused_step_is_one_that_may_have_been_issued(checked: Any, key: NoiseKey, tmp_path: Path) -> None:
    """Its line is in the journal before its ids are looked at: that errs on the safe side, and the run goes on."""
    path = tmp_path / "journal"
    made = checked(journal=path)
    made.next(ids=[1])
    state = made.state_dict()
    made.commit()
    with pytest.raises(ParticipationError):
        made.next(ids=[1])
    made.close()
    with pytest.raises(StateError, match="unpublished"):
        type(made).restore(made.artifact, state, key=key, journal=path)
    again = type(made).restore(made.artifact, state, key=key, journal=path, resume="unpublished")
    again.next(ids=[2])
    assert again.step == 2


def test_names_of_every_kind_tell_tensors_apart(model: Any, artifact: Any, key: NoiseKey) -> None:
    """Empty, with dots, spaces and letters of all alphabets; a state of them passes through JSON."""
    names = ["", ".", "layer.0.weight", "layer.0", "weight", "größe", "重み", "a\nb", "a\tb", "0", "%s", "x" * 1000]
    made = model(tensors=dict.fromkeys(names, 4))
    first = made.next()
    for one, other in itertools.combinations(names, 2):
        assert not np.intersect1d(first[one], first[other]).size
    state = json.loads(json.dumps(made.state_dict(buffers=False)))
    equal(rows(ModelNoise.restore(artifact, state, key=key, resume="unpublished"), 2), rows(made, 2))
