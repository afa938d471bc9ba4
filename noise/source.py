"""The noise source: white Gaussian rows Z, each a pure function of key, run, artifact, name, dtype, step and element.

    salt       = run nonce (128 random bits)
    subkeys    = HKDF-SHA256(key, salt; artifact digest, name, dtype, step): 32 bytes for words, 32 for second words
    words      = ChaCha20(first subkey) (RFC 8439), counter and nonce from 0: element e uses bytes b e .. b e + b - 1
    second     = ChaCha20(second subkey): element e uses bytes 8e .. 8e + 7, if its first word asks for it
    normal     = inverse normal CDF of word and second word (noise/normal.py); b = 4 bytes for float32, 8 for float64

so that shards, threads, restarts and block sizes neither change nor repeat a value, and one key in two runs, artifacts
or tensors shares no row.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from mmfact.factorize.errors import StateError
from mmfact.noise.key import NoiseKey
from mmfact.noise.normal import normals, refine

NONCE_BYTES = 16
# ChaCha20 counts blocks of 64 bytes in 32 bits: beyond this many elements the second words of a row would repeat.
LARGEST_ROW = (1 << 32) * 8

_BLOCK_BYTES = 64
_PIECE = 1 << 17  # bytes of keystream made at a time


class NoiseSource:
    """Rows of white noise for one run, artifact, tensor name and dtype."""

    def __init__(self, key: NoiseKey, nonce: bytes, digest: str, name: str, dtype: np.dtype[np.floating]) -> None:
        if len(nonce) != NONCE_BYTES:
            raise StateError(f"a run nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        extract = HMAC(nonce, hashes.SHA256())
        extract.update(key.reveal())
        self._pseudorandom_key = extract.finalize()
        # Every field is of fixed length or preceded by its length, so no two contexts spell the same bytes.
        label = name.encode()
        self._context = b"mmfact noise 2" + bytes.fromhex(digest) + len(label).to_bytes(8, "big") + label
        self._context += dtype.name.encode().rjust(8)
        self._word = np.dtype(f"<u{dtype.itemsize}")
        self._latest: tuple[int, bytes] | None = None  # step and subkeys, replaced as one

    def __reduce__(self) -> NoReturn:
        raise StateError("a noise source holds a secret and is never pickled or copied; restore the stream instead")

    def fill(self, step: int, first: int, out: npt.NDArray[Any]) -> None:
        """Elements first, first + 1, ... of row `step`, standard normal.

        They go into `out`, contiguous and of the source's dtype. Several threads may fill different arrays at once.
        """
        subkeys = self.subkeys(step)
        width = self._word.itemsize
        for start in range(0, len(out), _PIECE // width):
            piece = out[start : start + _PIECE // width]
            words = keystream(subkeys[:32], width * (first + start), width * len(piece)).view(self._word)
            for at in normals(words, piece):
                second = keystream(subkeys[32:], 8 * (first + start + at), 8).view("<u8")
                piece[at] = refine(int(words[at]), int(second[0]), 8 * width)

    def subkeys(self, step: int) -> bytes:
        """The two subkeys of a row, 32 bytes each: as secret as the row."""
        latest = self._latest
        if latest is None or latest[0] != step:
            info = self._context + step.to_bytes(8, "big")
            derived = HKDFExpand(algorithm=hashes.SHA256(), length=64, info=info).derive(self._pseudorandom_key)
            self._latest = latest = (step, derived)
        return latest[1]


_ZEROS = np.zeros(_PIECE, np.uint8)


def keystream(subkey: bytes, start: int, count: int) -> npt.NDArray[np.uint8]:
    """Bytes start, start + 1, ... of the keystream."""
    block, lead = divmod(start, _BLOCK_BYTES)
    stream = Cipher(algorithms.ChaCha20(subkey, block.to_bytes(4, "little") + bytes(12)), mode=None).encryptor()
    if lead:
        stream.update(bytes(lead))
    out = np.empty(count, np.uint8)
    stream.update_into(_ZEROS[:count].data, out.data)
    return out
