"""Bad input: one clear error of ours before anything is drawn or allocated."""

from __future__ import annotations

import copy
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import CapacityError, PrivacyError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.source import LARGEST_ROW


@pytest.mark.parametrize("what", ["noise_multiplier", "clip_norm"])
@pytest.mark.parametrize(
    "value",
    [
        0,
        0.0,
        -0.0,
        -1,
        float("nan"),
        float("inf"),
        -float("inf"),
        "one",
        "",
        None,
        [],
        1j,
        np.array([1.0, 2.0]),
        10**400,
        "1.0",
        True,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_sigma_and_clip_norm_are_positive_and_finite(what: str, value: Any, stream: Any) -> None:
    """Zero noise, or noise of unknown size, must never look like a run."""
    with pytest.raises(PrivacyError, match=what.replace("_", " ")):
        stream(**{what: value})


@pytest.mark.parametrize("value", [1, 1.5, np.float32(0.5), np.float64(2), np.int64(3)])
def test_any_positive_number_is_a_sigma(value: Any, stream: Any) -> None:
    """And it is kept as a plain float, so that the state is plain JSON."""
    made = stream(noise_multiplier=value, clip_norm=value)
    assert type(made.state_dict()["noise_multiplier"]) is float
    assert made.noise_multiplier == made.clip_norm == float(value)


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-200, "float64"), (1e-152, "float64"), (1e-30, "float32"), (1e-20, "float32")]
)
def test_noise_that_vanishes_is_refused(scale: float, dtype: str, stream: Any) -> None:
    """sigma and clip norm are positive, each; their product is zero or a denormal: no noise, or noise on a grid."""
    with pytest.raises(PrivacyError, match="cannot hold"):
        stream(noise_multiplier=scale, clip_norm=scale, dtype=dtype)


@pytest.mark.parametrize(("scale", "dtype"), [(1e200, "float64"), (1e154, "float64"), (1e30, "float32")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_that_is_not_finite_is_refused(scale: float, dtype: str, stream: Any) -> None:
    """Infinite rows destroy the model, without an error."""
    with pytest.raises(PrivacyError, match="cannot hold"):
        stream(noise_multiplier=scale, clip_norm=scale, dtype=dtype)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-12, "float32"), (1e15, "float32"), (1e-100, "float64")])
def test_unusual_units_are_no_reason_to_refuse(scale: float, dtype: str, stream: Any, rows_of: Any) -> None:
    """Gradients in another unit: noise is the same but for the unit."""
    rows = rows_of(stream(clip_norm=0.7 * scale, dtype=dtype, run=bytes(16)))
    np.testing.assert_allclose(rows / scale, rows_of(stream(dtype=dtype, run=bytes(16))), rtol=1e-6)


@pytest.mark.parametrize("size", [0, -1, True, False, 2.5, 8.0, "8", None, [8], float("nan"), np.float64(8)])
def test_a_size_is_a_whole_number_of_at_least_one(size: Any, stream: Any) -> None:
    """True is not one element, 2.5 not two."""
    with pytest.raises(StateError, match="size"):
        stream(size=size)


def test_numpy_integers_are_whole_numbers(stream: Any) -> None:
    """Shapes often come as numpy integers."""
    made = stream(size=np.int64(8), offset=np.int32(4), total=np.uint16(12))
    assert made.next().shape == (8,)
    assert type(made.state_dict()["size"]) is int


@pytest.mark.parametrize("size", [10**15, 2**62, 10**30, LARGEST_ROW + 1])
def test_an_absurd_size_is_refused_before_allocating(size: int, stream: Any) -> None:
    """A typing error must not bring the machine down."""
    stream()
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError):
            stream(size=size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_size_beyond_the_machine_says_how_much_and_what_to_do(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 1 MiB (so simulated) a row of 10^6 elements is refused."""
    stream()
    monkeypatch.setattr("mmfact.factorize.machine.os.sysconf", lambda name: 1024)
    with pytest.raises(CapacityError, match=r"GiB.*shards"):
        stream(size=10**6)
    assert stream(size=100).next().shape == (100,)


@pytest.mark.parametrize(
    "placing",
    [
        {"offset": -1},
        {"offset": True},
        {"offset": 1.5},
        {"offset": "1"},
        {"offset": None},
        {"total": 7},
        {"total": 0},
        {"total": -8},
        {"total": True},
        {"total": 8.0},
        {"total": "8"},
        {"offset": 1, "total": 8},
        {"offset": 8, "total": 8},
        {"offset": 10**15, "total": 8},
    ],
    ids=repr,
)
def test_a_shard_outside_its_vector_is_refused(placing: dict[str, Any], stream: Any) -> None:
    """A shard that hangs over the end would overlap with another tensor's plan of elements."""
    with pytest.raises(StateError):
        stream(size=8, **placing)


@pytest.mark.parametrize("placing", [{"offset": LARGEST_ROW - 7}, {"total": LARGEST_ROW + 1}, {"offset": 10**30}])
def test_elements_beyond_the_keystream_are_refused(placing: dict[str, Any], stream: Any) -> None:
    """Beyond 2^35 elements the block counter would wrap and noise repeat within a row."""
    with pytest.raises(CapacityError, match="keystream"):
        stream(size=8, **placing)


@pytest.mark.parametrize("dtype", ["float16", np.float16, "half", "bfloat16"])
def test_half_precision_is_refused_with_the_reason(dtype: Any, stream: Any) -> None:
    """Noise on the grid of a half-precision type betrays the gradient."""
    with pytest.raises(StateError, match="grid"):
        stream(dtype=dtype)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "object", "S8", "nonsense", np.longdouble, 5, ""])
def test_other_dtypes_are_refused(dtype: Any, stream: Any) -> None:
    """Noise is drawn in float32 or float64."""
    with pytest.raises(StateError, match="float32 or float64"):
        stream(dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "f4", np.float32, np.dtype("float32"), ">f4"])
def test_spellings_of_a_dtype_give_the_same_noise(dtype: Any, stream: Any, rows_of: Any) -> None:
    """The dtype is part of the key derivation: two spellings must not be two streams, nor byte order show."""
    made = stream(dtype=dtype, run=bytes(16))
    rows = rows_of(made)
    assert rows.dtype == np.float32
    assert made.state_dict()["dtype"] == "float32"
    np.testing.assert_array_equal(rows, rows_of(stream(run=bytes(16))))


@pytest.mark.parametrize("space", ["", "Gradient", "both", None, 0, [], b"gradient"])
def test_another_space_is_refused(space: Any, stream: Any) -> None:
    """Gradient noise in iterate space is the wrong noise."""
    with pytest.raises(StateError, match="gradient or iterate"):
        stream(space=space)


@pytest.mark.parametrize(
    "run",
    [
        b"",
        bytes(15),
        bytes(17),
        bytes(32),
        16,
        "a" * 16,
        5.0,
    ],
    ids=repr,
)
def test_a_run_of_another_length_or_type_is_refused(run: Any, stream: Any) -> None:
    """A run number is no nonce: two machines that count their runs from 16 would share their noise."""
    with pytest.raises(StateError, match="16 bytes"):
        stream(run=run)


@pytest.mark.parametrize("wrong", [b"k" * 32, "key", 5])
def test_what_is_no_key_is_refused(wrong: Any, stream: Any) -> None:
    """Raw bytes are easily taken for a key; the message should name NoiseKey.from_bytes."""
    with pytest.raises(StateError, match="NoiseKey"):
        stream(key=wrong)


@pytest.mark.parametrize("name", ["\ud800", "w\udfff", None, 5, b"w", ["w"]], ids=repr)
def test_a_name_is_text(name: Any, stream: Any) -> None:
    """No name that cannot be written down, and no None taken for a tensor called 'None'."""
    with pytest.raises(StateError, match="name"):
        stream(name=name)


def test_options_are_given_by_name(case: Any, key: Any) -> None:
    """stream(artifact, size, 1.0, 0.5) would leave open which is sigma."""
    with pytest.raises(TypeError):
        NoiseStream(case("momentum").artifact, 8, 1.0, 0.5, key)  # type: ignore[misc]


@pytest.mark.parametrize("threads", [0, -1, 1.5, 2.0, True, False, "2", b"2", [2], float("nan"), 65, 10**30], ids=repr)
def test_threads_are_a_whole_number_from_1_to_64(threads: Any, stream: Any) -> None:
    """A typing error must neither start a thousand threads nor none; the message names the value."""
    with pytest.raises(StateError, match=f"threads = {re.escape(repr(threads))}"):
        stream(threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 64, np.int64(3), None])
def test_any_number_of_threads_up_to_64_will_do(threads: Any, stream: Any) -> None:
    """More than there are blocks, or cores, too; None is as good as leaving it out."""
    made = stream(threads=threads)
    assert type(made.threads) is int
    assert made.threads == (threads if threads is not None else stream().threads)
    assert np.isfinite(made.next()).all()


PUBLIC = (
    "artifact",
    "checks_participation",
    "closed",
    "clip_norm",
    "dtype",
    "horizon",
    "key",
    "name",
    "noise_multiplier",
    "offset",
    "run",
    "sensitivity",
    "size",
    "space",
    "step",
    "threads",
    "total",
)


def test_the_list_of_attributes_is_complete(stream: Any) -> None:
    """What the next test tries to set is all that a stream shows."""
    made = stream()
    shown = {name for name in dir(made) if not name.startswith("_") and not callable(getattr(made, name))}
    assert shown == set(PUBLIC)


@pytest.mark.parametrize("attribute", PUBLIC)
@pytest.mark.parametrize("restored", [False, True])
def test_an_attribute_of_a_running_stream_is_latched(
    attribute: str, restored: bool, stream: Any, rows_of: Any, key: NoiseKey
) -> None:
    """The trap: sigma changed in the middle of a run, and an accountant that goes on with the first one.

    Whatever is set, its own value too, is refused with that name; neither the record nor the rows change.
    """
    rows, made = rows_of(stream(run=bytes(16))), stream(run=bytes(16))
    rows_of(made, 3)
    if restored:
        made = NoiseStream.restore(made.artifact, made.state_dict(), key=key, resume="unpublished")
    before, ledger = getattr(made, attribute), made.ledger()
    for value in (before, 5, 2.6, "iterate", None):
        with pytest.raises(StateError, match=f"{attribute} of a running stream"):
            setattr(made, attribute, value)
        assert getattr(made, attribute) is before or getattr(made, attribute) == before
    assert made.ledger() == ledger
    np.testing.assert_array_equal(rows_of(made), rows[3:])


def test_a_new_attribute_is_refused(stream: Any) -> None:
    """`stream.noise_multiplyer = 2.6` must not look as if it had done something."""
    made = stream()
    with pytest.raises(StateError, match="running stream"):
        made.noise_multiplyer = 2.6
    assert not hasattr(made, "noise_multiplyer")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out.astype("float64" if out.dtype == np.float32 else "float32"),
        lambda out: out.astype("float16"),
        lambda out: out.view("int32" if out.dtype == np.float32 else "int64"),
        lambda out: out.view(out.dtype.newbyteorder()),
        lambda out: out.astype(complex),
        lambda out: out.astype(object),
        lambda out: out[:-1].copy(),
        lambda out: out.reshape(2, 15),
        lambda out: out[None],
        lambda out: np.repeat(out, 2)[::2],
        lambda out: out[::-1],
        lambda out: np.broadcast_to(out[:1], 30),
        lambda out: np.frombuffer(bytes(out.nbytes), out.dtype),
        lambda out: out.tolist(),
        lambda out: memoryview(out),
        lambda out: np.ma.masked_array(out, out > 0)[::2],
    ],
)
def test_an_out_of_several_blocks_that_does_not_fit_is_left_alone(
    dtype: str, spoil: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Type, byte order, shape, layout, memory that must not be written: refused before any block, and no step spent."""
    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 7)
    made, reference = (stream(size=30, dtype=dtype, run=bytes(16), threads=2) for _ in range(2))
    out = np.arange(30).astype(dtype)
    spoiled = spoil(out)
    before = copy.deepcopy(spoiled) if not isinstance(spoiled, memoryview) else None
    with pytest.raises(StateError, match=r"out must be a writeable contiguous .*shape \(30,\)"):
        made.next(spoiled)
    if before is not None:
        np.testing.assert_array_equal(spoiled, before)
    np.testing.assert_array_equal(out, np.arange(30))
    assert made.step == 0
    np.testing.assert_array_equal(made.next(out), reference.next())


@pytest.mark.parametrize("place", ["slice of a vector", "row of a matrix", "unaligned bytes", "memory map"])
def test_an_out_that_is_part_of_something_larger(place: str, stream: Any, tmp_path: Any) -> None:
    """A flat view of a trainer's buffers is served, wherever it lies, and nothing beside it is touched."""
    made, reference = stream(size=30, run=bytes(16)), stream(size=30, run=bytes(16)).next()
    if place == "slice of a vector":
        whole = np.zeros(40, np.float32)
        out = whole[3:33]
    elif place == "row of a matrix":
        whole = np.zeros((3, 30), np.float32)
        out = whole[1]
    elif place == "unaligned bytes":
        whole = np.zeros(41 * 4, np.uint8)
        out = whole[1:121].view(np.float32)
        assert not out.flags.aligned
    else:
        whole = np.memmap(tmp_path / "out", np.float32, "w+", shape=40)
        out = whole[:30]
    made.next(out)
    np.testing.assert_array_equal(out, reference)
    out[:] = 0
    assert not whole.any()
