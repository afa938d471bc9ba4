"""The keystream: RFC 8439 and RFC 5869 as published, and whole rows rebuilt from the two RFCs in plain Python."""

from __future__ import annotations

import hashlib
import hmac
import struct
from statistics import NormalDist

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import StateError
from mmfact.noise import NoiseKey
from mmfact.noise import source as noise_source
from mmfact.noise.source import LARGEST_ROW, NoiseSource

SECRET = bytes(range(100, 132))
NONCE = bytes(range(16))
DIGEST = hashlib.sha256(b"some artifact").hexdigest()


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439 section 2.3, word by word."""
    mask = 0xFFFFFFFF
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter]
    start += struct.unpack("<3I", nonce)
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for target, other, mixed, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[target] = (x[target] + x[other]) & mask
            turned = x[mixed] ^ x[target]
            x[mixed] = ((turned << left) | (turned >> (32 - left))) & mask

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) & mask for a, b in zip(x, start, strict=True)))


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256."""
    pseudorandom = hmac.digest(salt or bytes(32), secret, "sha256")
    out, block, count = b"", b"", 0
    while len(out) < length:
        count += 1
        block = hmac.digest(pseudorandom, block + info + bytes([count]), "sha256")
        out += block
    return out[:length]


def subkeys(step: int, name: str, dtype: str) -> tuple[bytes, bytes]:
    """For first and second words, as the docstring of mmfact.noise.source says."""
    info = b"mmfact noise 2" + bytes.fromhex(DIGEST) + struct.pack(">Q", len(name.encode())) + name.encode()
    info += {"float32": b" float32", "float64": b" float64"}[dtype] + struct.pack(">Q", step)
    derived = hkdf(SECRET, NONCE, info, 64)
    return derived[:32], derived[32:]


def keystream_words(subkey: bytes, first: int, count: int, form: str) -> list[int]:
    """Word e has bytes width e .. width e + width - 1 of the keystream."""
    width = struct.calcsize(form)
    start, end = width * first, width * (first + count)
    blocks = range(start // 64, -(-end // 64))
    stream = b"".join(chacha20_block(subkey, block, bytes(12)) for block in blocks)
    return list(struct.unpack(f"<{count}{form}", stream[start - 64 * blocks[0] :][: width * count]))


def reference_words(step: int, first: int, count: int, name: str = "", dtype: str = "float64") -> list[int]:
    form = "I" if dtype == "float32" else "Q"
    return keystream_words(subkeys(step, name, dtype)[0], first, count, form)


def second_words(step: int, first: int, count: int, name: str = "", dtype: str = "float64") -> list[int]:
    return keystream_words(subkeys(step, name, dtype)[1], first, count, "Q")


def split(word: int, dtype: str) -> tuple[int, int]:
    """Sign and cell of a word."""
    bits = 32 if dtype == "float32" else 64
    signed = word - 2**bits if word >> (bits - 1) else word
    return (1, 2 ** (bits - 1) - 1 - signed) if signed >= 0 else (-1, 2 ** (bits - 1) - 1 - (-1 - signed))


def outermost(word: int, dtype: str) -> bool:
    """Whether p < 2^-16 (float32) or 2^-32."""
    return split(word, dtype)[1] < (2**16 if dtype == "float32" else 2**32)


def reference_row(step: int, first: int, count: int, name: str = "", dtype: str = "float64") -> list[float]:
    """With the standard library's inverse normal CDF: its own AS 241, about 1e-16 beside the larger of 1 and |z|."""
    bits, row = (32 if dtype == "float32" else 64), []
    for at, word in enumerate(reference_words(step, first, count, name, dtype), first):
        sign, cell = split(word, dtype)
        within = 0.5
        if outermost(word, dtype):
            within = (second_words(step, at, 1, name, dtype)[0] + 0.5) / 2.0**64
        tail = (cell + within) / 2.0**bits
        row.append(-sign * NormalDist().inv_cdf(tail) if tail < 0.5 else 0.0)
    return row


def source(name: str = "", dtype: str = "float64") -> NoiseSource:
    return NoiseSource(NoiseKey.from_bytes(SECRET), NONCE, DIGEST, name, np.dtype(dtype))


def row(made: NoiseSource, step: int, first: int, count: int, dtype: str = "float64") -> np.ndarray:
    out = np.full(count, np.nan, dtype)
    made.fill(step, first, out)
    return out


def is_near(found: np.ndarray, expected: list[float]) -> None:
    """Float64: two inverse CDFs of 1e-16. Float32: 2 units in the last place, each at most 2^-23 of a value."""
    rtol = 2e-15 if found.dtype == "float64" else 2.0**-22
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=2e-16)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every second word that is used from here on."""
    seen: list[int] = []
    real = noise_source.refine

    def record(word: int, second: int, bits: int) -> float:
        seen.append(second)
        return real(word, second, bits)

    monkeypatch.setattr(noise_source, "refine", record)
    return seen


@pytest.fixture
def all_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element asks for its second word."""
    real = noise_source.normals

    def every(words: np.ndarray, out: np.ndarray) -> list[int]:
        real(words, out)
        return list(range(len(words)))

    monkeypatch.setattr(noise_source, "normals", every)


def test_the_block_function_of_the_reference_is_that_of_the_rfc() -> None:
    """RFC 8439 section 2.3.2: the yardstick of this file is right."""
    block = chacha20_block(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"))
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_the_cipher_of_the_reference_encrypts_as_the_rfc() -> None:
    """RFC 8439 section 2.4.2: blocks in a row, the counter first in the second half of the state, a nonce not zero."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    nonce = bytes.fromhex("000000000000004a00000000")
    stream = b"".join(chacha20_block(bytes(range(32)), counter, nonce) for counter in (1, 2))
    assert bytes(a ^ b for a, b in zip(text, stream, strict=False)).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


VECTORS = [
    (
        bytes(32),
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\x01",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        b"\x00\xff" + bytes(30),
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]


@pytest.mark.parametrize(("subkey", "counter", "expected"), VECTORS, ids=["A.1.1", "A.1.2", "A.1.3", "A.1.4"])
def test_the_keystream_of_the_source_is_that_of_the_rfc(subkey: bytes, counter: int, expected: str) -> None:
    """RFC 8439 appendix A.1, numbers 1 to 4 (nonce 0, as here), through the very function that the source calls."""
    assert noise_source.keystream(subkey, 64 * counter, 64).tobytes().hex() == expected
    assert noise_source.keystream(subkey, 64 * counter + 17, 30).tobytes().hex() == expected[34:94]
    assert chacha20_block(subkey, counter, bytes(12)).hex() == expected


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)
def test_key_derivation_is_that_of_the_rfc(secret: bytes, salt: bytes, info: bytes, expected: str) -> None:
    """RFC 5869 appendix A.1 to A.3: for the reference, and for HMAC and HKDFExpand as the source calls them."""
    length = len(expected) // 2
    assert hkdf(secret, salt, info, length).hex() == expected
    extract = HMAC(salt, hashes.SHA256())
    extract.update(secret)
    derived = HKDFExpand(algorithm=hashes.SHA256(), length=length, info=info).derive(extract.finalize())
    assert derived.hex() == expected


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.one_of(st.integers(0, 2**24), st.integers(0, 2**64 - 1)), min_size=1, max_size=3),
    offset=st.one_of(
        st.integers(0, 100), st.integers(0, LARGEST_ROW - 40), st.integers(1, 80).map(LARGEST_ROW.__sub__)
    ),
    size=st.integers(1, 40),
    name=st.text(st.characters(codec="utf-8"), max_size=20),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_a_row_is_what_the_rfcs_make_of_key_run_artifact_name_step(
    steps: list[int], offset: int, size: int, name: str, dtype: str
) -> None:
    """If a field left the derivation, or an offset inside a block were off by one, noise would repeat or shift."""
    size = min(size, LARGEST_ROW - offset)
    made = source(name, dtype)
    for step in steps:
        is_near(row(made, step, offset, size, dtype), reference_row(step, offset, size, name, dtype))


def test_a_long_row_is_what_the_rfcs_make_of_it_second_words_too(words: list[np.ndarray], second: list[int]) -> None:
    """200,003 elements of float32: those with an outermost first word (6 expected) and both ends of a piece."""
    found = row(source("w", "float32"), 7, 1001, 200_003, "float32")
    assert {len(piece) for piece in words[:-1]} == {32768}
    all_words = np.concatenate(words)
    far = [at for at, word in enumerate(all_words.tolist()) if outermost(word, "float32")]
    assert len(far) >= 3
    for at in [*far, 0, 32767, 32768, 200_002]:
        is_near(found[at : at + 1], reference_row(7, 1001 + at, 1, "w", "float32"))
    # Beyond what one word resolves a value is rounded once, so within half a unit in the last place.
    exact = np.array([reference_row(7, 1001 + at, 1, "w", "float32")[0] for at in far])
    assert (np.abs(found[far] - exact) <= 0.5000001 * np.spacing(np.abs(found[far]))).all()
    assert second == [second_words(7, 1001 + at, 1, "w", "float32")[0] for at in far]


# Elements of row 0 whose first word is in an outermost cell of float64: a search of 2^33 elements found them.
FAR = (2_649_976_685, 2_948_322_075, 7_172_471_199)


@pytest.mark.parametrize("element", FAR)
def test_far_elements_of_float64_are_what_the_rfcs_make_of_them(element: int, second: list[int]) -> None:
    """End to end, one element in 2^31: its neighbours keep one word, it has its second word of the other keystream."""
    found = row(source(), 0, element - 2, 5)
    is_near(found, reference_row(0, element - 2, 5))
    assert abs(found[2]) > 6.23
    assert second == second_words(0, element, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0, 1, 5, 7, 8, 9, 15, 16, 17, 63, 65])
@pytest.mark.usefixtures("all_outermost")
def test_words_sit_at_fixed_positions_whatever_the_offset(
    offset: int, dtype: str, words: list[np.ndarray], second: list[int]
) -> None:
    """Element e uses bytes 4e .. 4e+3 or 8e .. 8e+7 of one keystream and 8e .. 8e+7 of the other, bit for bit."""
    row(source("w", dtype), 3, offset, 50, dtype)
    assert np.concatenate(words).tolist() == reference_words(3, offset, 50, "w", dtype)
    assert second == second_words(3, offset, 50, "w", dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("all_outermost")
def test_the_last_block_of_the_longest_row_does_not_wrap_to_the_first(
    dtype: str, words: list[np.ndarray], second: list[int]
) -> None:
    """The block counter has 32 bits: beyond it, elements of one row would carry equal noise.

    Float32's first words end at half of that; second words and float64's end with the counter.
    """
    row(source(dtype=dtype), 0, LARGEST_ROW - 13, 13, dtype)
    assert np.concatenate(words).tolist() == reference_words(0, LARGEST_ROW - 13, 13, dtype=dtype)
    assert second == second_words(0, LARGEST_ROW - 13, 13, dtype=dtype)
    start = reference_words(0, 0, 16, dtype=dtype) + second_words(0, 0, 16, dtype=dtype)
    assert not set(np.concatenate(words).tolist() + second) & set(start)
    assert second_words(0, LARGEST_ROW - 8, 8, dtype=dtype) == list(
        struct.unpack("<8Q", chacha20_block(subkeys(0, "", dtype)[1], 2**32 - 1, bytes(12)))
    )


@pytest.mark.parametrize(("dtype", "element"), [("float32", 31296), ("float64", FAR[-1])])
@pytest.mark.parametrize("piece", [8, 24, 56, 64, 72, 1000])
def test_the_size_of_the_working_pieces_does_not_show(
    piece: int, dtype: str, element: int, words: list[np.ndarray], second: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes; a size visible in the values would make a restart on another machine draw other noise.

    2,601 elements around one that has a second word, bit for bit.
    """
    whole = row(source(dtype=dtype), 0, element - 1300, 2601, dtype)
    assert len(words) == 1
    monkeypatch.setattr(noise_source, "_PIECE", piece)
    pieces = row(source(dtype=dtype), 0, element - 1300, 2601, dtype)
    assert len(words) == 1 + -(-2601 // (piece // whole.itemsize))
    assert len(second) >= 2
    assert whole.tobytes() == pieces.tobytes()


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_nonce_of_another_length_is_refused(length: int) -> None:
    """A short nonce would make two runs collide."""
    with pytest.raises(StateError, match="16 bytes"):
        NoiseSource(NoiseKey.from_bytes(SECRET), bytes(length), DIGEST, "", np.dtype("float64"))
