"""ChaCha20 and the map to normals in array operators: against RFC 8439, the CPU's keystream and its rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.factorize.errors import CapacityError
from mmfact.noise import chacha
from mmfact.noise.key import NoiseKey
from mmfact.noise.normal import normals, refine
from mmfact.noise.source import LARGEST_ROW, NoiseSource, keystream

Array = Any

# RFC 8439, appendix A.1, test vectors 1, 2 and 4: key, counter, the start of the block.
VECTORS = [
    (bytes(32), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
    (bytes(32), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
    (bytes([0, 255]) + bytes(30), 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"),
]


def namespace(library: str) -> ModuleType:
    return pytest.importorskip({"jax": "jax.numpy"}.get(library, library))


def words(data: bytes, xp: ModuleType) -> Array:
    return xp.asarray(np.frombuffer(data, "<i4").astype(np.int32))


def compiled(function: Callable[..., Any], xp: ModuleType) -> Callable[..., Array]:
    if xp.__name__ == "jax.numpy":
        import jax

        function = jax.jit(function)
    return lambda *arguments: np.asarray(function(*arguments))


def ulps(found: Array, expected: Array) -> float:
    return float((np.abs(found.astype(float) - expected) / np.spacing(np.abs(expected).astype(np.float32))).max())


libraries = pytest.mark.parametrize("library", ["numpy", "torch", "jax"])


@libraries
def test_blocks_are_those_of_the_rfc(library: str) -> None:
    xp = namespace(library)
    for key, counter, expected in VECTORS:
        (block,) = compiled(lambda key, at: chacha.blocks(key, at, xp), xp)(
            words(key, xp), xp.asarray(np.array([counter], np.int32))
        )
        assert block.astype("<i4").tobytes().hex().startswith(expected)


@given(st.binary(min_size=32, max_size=32), st.integers(0, (1 << 32) - 5))
def test_words_are_those_of_the_keystream(key: bytes, counter: int) -> None:
    """To the last block of the counter's 32 bits."""
    xp = np
    counters = (np.arange(5, dtype=np.uint32) + np.uint32(counter)).view(np.int32)
    found = chacha.blocks(words(key, xp), counters, xp)
    assert found.astype("<i4").tobytes() == keystream(key, 64 * counter, 5 * 64).tobytes()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_words_are_the_same_in_every_library(library: str) -> None:
    xp, key = namespace(library), secrets.token_bytes(32)
    counters = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, 257).astype(np.int32)
    found = compiled(lambda key, at: chacha.blocks(key, at, xp), xp)(words(key, xp), xp.asarray(counters))
    np.testing.assert_array_equal(found, chacha.blocks(words(key, np), counters, np))


@libraries
@pytest.mark.parametrize(
    ("first", "count"), [(0, 1), (5, 300_001), ((1 << 32) + 13, 70_000), (LARGEST_ROW - 1000, 1000)]
)
def test_rows_are_those_of_the_source(library: str, first: int, count: int) -> None:
    """Within 2 units in the last place, across the ends of blocks, beyond 2^32 elements and at the last ones."""
    if library == "jax" and first > 5:
        pytest.skip("one long row is compiled; positions are computed by the same code in NumPy and torch")
    xp = namespace(library)
    source = NoiseSource(NoiseKey.insecure_from_seed(5), bytes(16), "ab" * 32, "w", np.dtype(np.float32))
    expected = np.empty(count, np.float32)
    source.fill(3, first, expected)
    found = compiled(lambda subkeys: chacha.white(subkeys, first, count, xp), xp)(words(source.subkeys(3), xp))
    assert found.dtype == np.float32
    assert found.shape == (count,)
    assert ulps(found, expected) <= 2
    if library == "numpy":  # whose operations are those of numba, but for the outermost cells
        assert (found != expected).sum() <= 3e-4 * count


@libraries
def test_outermost_cells_have_their_second_words(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 320 words but one lie there, so that JAX must go on after those it expects; positive and negative.

    Blocks are given by their counters: first words from one table, pairs of second words, 0 and all ones too, from
    another. The reference is normal.py's.
    """
    xp, first, count = namespace(library), 16 * 7 + 3, 320
    random = np.random.default_rng(4)
    cells = random.integers(0, 1 << 16, (40, 16))
    cells[:, 3] = 0
    cells[9, 2] = (1 << 31) - 1  # the smallest normal
    signs = random.integers(0, 2, (40, 16)).astype(bool)
    table = np.where(signs, (1 << 31) - 1 - cells, (1 << 31) + cells).astype(np.uint32)
    second = random.integers(0, 1 << 64, (60, 8), dtype=np.uint64) >> random.integers(0, 64, (60, 8), dtype=np.uint64)
    second[20] = 0
    second[21] = np.uint64((1 << 64) - 1)
    pairs = second.view("<u4")
    subkeys = words(bytes([1, 0, 0, 0] * 8 + [2, 0, 0, 0] * 8), xp)

    def blocks(key: Array, counters: Array, xp: ModuleType) -> Array:
        one, two = (xp.asarray(rows.view(np.int32)) for rows in (table, pairs))
        inside = (counters >= 0) & (counters < 40)
        return xp.where((key[0] == 1) & inside[:, None], one[counters % 40], two[counters % 60])

    monkeypatch.setattr(chacha, "blocks", blocks)
    found = compiled(lambda subkeys: chacha.white(subkeys, first, count, xp), xp)(subkeys)
    drawn = table.reshape(-1)[first : first + count]
    expected = np.empty(count, np.float32)
    outermost = normals(drawn, expected)
    assert len(outermost) == count - 1
    for at in outermost:
        expected[at] = refine(int(drawn[at]), int(second.reshape(-1)[first + at]), 32)
    assert ulps(found, expected) <= 2
    assert np.abs(expected).max() > 7


@libraries
def test_tails_are_those_of_the_cpu_over_all_cells(library: str) -> None:
    """Every cell with a random second word, the outermost with second words of every length: within 2 units."""
    xp, random = namespace(library), np.random.default_rng(6)
    cell = np.concatenate([np.arange(1 << 16), np.zeros(5000, int), random.integers(0, 10, 5000)])
    second = random.integers(0, 1 << 64, len(cell), dtype=np.uint64)
    second[1 << 16 :] >>= random.integers(0, 64, 10_000, dtype=np.uint64)
    halves = second.view("<u4").reshape(-1, 2).T.copy().view(np.int32)
    found = compiled(lambda cell, low, high: chacha._far(cell, low, high, xp), xp)(
        *(xp.asarray(array) for array in (cell.astype(np.int32), *halves))
    )
    expected = np.array([refine((1 << 31) - 1 - k, s, 32) for k, s in zip(cell.tolist(), second.tolist(), strict=True)])
    assert ulps(found, expected) <= 2


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_normals_are_those_of_the_cpu_over_a_million_words(library: str) -> None:
    """Library square roots and contracted products differ in the last place: within 2 units of the CPU's."""
    xp, random = namespace(library), np.random.default_rng(8)
    drawn = random.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    expected = np.empty(len(drawn), np.float32)
    normals(drawn, expected)
    found = compiled(lambda word: chacha._normals(word, 2147483647 - chacha._folded(word), xp), xp)(
        xp.asarray(drawn.view(np.int32))
    )
    assert ulps(found, expected) <= 2


def test_a_trace_holds_no_subkey() -> None:
    jax = pytest.importorskip("jax")
    subkeys = words(bytes(range(64)), jax.numpy)
    lowered = jax.jit(lambda subkeys: chacha.white(subkeys, 0, 64, jax.numpy)).lower(subkeys).as_text()
    known = chacha._CONSTANT  # would be found
    assert all(str(word) in lowered for word in known)
    for word in np.asarray(subkeys).tolist():
        assert str(word) not in lowered


def test_more_than_one_call_can_index_is_refused() -> None:
    with pytest.raises(CapacityError, match="count = 2147483648 is more than"):
        chacha.white(np.zeros(16, np.int32), 0, 1 << 31, np)
