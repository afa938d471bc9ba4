"""The keystream: RFC 8439 and RFC 5869 as published, and whole rows rebuilt from the two RFCs in plain Python."""

from __future__ import annotations

import hashlib
import hmac
import struct
from statistics import NormalDist

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import StateError
from mmfact.noise import NoiseKey
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


def reference_words(step: int, offset: int, size: int, name: str = "", dtype: str = "float64") -> list[int]:
    """The words of a row, as the docstring of mmfact.noise.source lays them out."""
    info = b"mmfact noise 1" + bytes.fromhex(DIGEST) + struct.pack(">Q", len(name.encode())) + name.encode()
    info += {"float32": b" float32", "float64": b" float64"}[dtype] + struct.pack(">Q", step)
    subkey = hkdf(SECRET, NONCE, info, 32)
    found = []
    for element in range(offset, offset + size):
        block = chacha20_block(subkey, element // 8, bytes(12))
        found.append(struct.unpack("<8Q", block)[element % 8])
    return found


def reference_row(words: list[int]) -> np.ndarray:
    """Inverse normal CDF by Wichura's AS 241 (the standard library's), on the lower tail, mirrored by the top bit."""
    normal = NormalDist()
    tails = [((word % 2**63) + 0.5) / 2.0**64 for word in words]
    values = [normal.inv_cdf(tail) if tail < 0.5 else 0.0 for tail in tails]
    return np.array([-value if word >> 63 else value for word, value in zip(words, values, strict=True)])


def source(name: str = "", dtype: str = "float64") -> NoiseSource:
    return NoiseSource(NoiseKey.from_bytes(SECRET), NONCE, DIGEST, name, np.dtype(dtype))


def test_the_block_function_of_the_reference_is_that_of_the_rfc() -> None:
    """RFC 8439 section 2.3.2 and appendix A.1 number 1: the yardstick below is right."""
    block = chacha20_block(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"))
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert chacha20_block(bytes(32), 0, bytes(12)).hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )


def test_the_cipher_of_the_library_encrypts_as_the_rfc() -> None:
    """RFC 8439 section 2.4.2, through the very calls that the source makes (counter first, then the nonce)."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    initial = (1).to_bytes(4, "little") + bytes.fromhex("000000000000004a00000000")
    stream = Cipher(algorithms.ChaCha20(bytes(range(32)), initial), mode=None).encryptor()
    assert stream.update(text).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


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
    step=st.integers(0, 2**24),
    offset=st.one_of(st.integers(0, 100), st.integers(0, LARGEST_ROW - 40)),
    size=st.integers(1, 40),
    name=st.text(st.characters(codec="utf-8"), max_size=20),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_a_row_is_what_the_rfcs_make_of_key_run_artifact_name_step(
    step: int, offset: int, size: int, name: str, dtype: str
) -> None:
    """If a field left the derivation, or an offset inside a block were off by one, noise would repeat or shift."""
    expected = reference_row(reference_words(step, offset, size, name, dtype))
    found = source(name, dtype).row(step, offset, size)
    assert found.dtype == dtype
    assert found.shape == (size,)
    # ndtri and AS 241 both claim about 1e-15; float32 rounds once.
    rtol = 1e-14 if dtype == "float64" else 2.0**-23
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-15)


@pytest.mark.parametrize("offset", [0, 1, 5, 7, 8, 9, 63, 65])
def test_raw_words_sit_at_fixed_positions_whatever_the_offset(offset: int, words: list[np.ndarray]) -> None:
    """Element e uses bytes 8e .. 8e+7 of the keystream, bit for bit."""
    source("w").row(3, offset, 50)
    assert np.concatenate(words).tolist() == reference_words(3, offset, 50, "w")


def test_the_last_block_of_the_longest_row_does_not_wrap_to_the_first(words: list[np.ndarray]) -> None:
    """The block counter has 32 bits: beyond it, elements of one row would carry equal noise."""
    source().row(0, LARGEST_ROW - 13, 13)
    assert np.concatenate(words).tolist() == reference_words(0, LARGEST_ROW - 13, 13)
    assert not set(np.concatenate(words).tolist()) & set(reference_words(0, 0, 16))


@pytest.mark.parametrize("block", [1, 3, 7, 8, 1000])
def test_the_size_of_the_working_blocks_does_not_show(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block size visible in the values would make a restart on another machine draw other noise."""
    whole = source().row(2, 5, 101)
    monkeypatch.setattr("mmfact.noise.source._BLOCK", block)
    np.testing.assert_array_equal(source().row(2, 5, 101), whole)


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_nonce_of_another_length_is_refused(length: int) -> None:
    """A short nonce would make two runs collide."""
    with pytest.raises(StateError, match="16 bytes"):
        NoiseSource(NoiseKey.from_bytes(SECRET), bytes(length), DIGEST, "", np.dtype("float64"))
