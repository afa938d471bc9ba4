"""The noise source: white Gaussian rows Z, each a pure function of key, run, step and element.

    salt    = run nonce (128 random bits)
    subkey  = HKDF-SHA256(key, salt; artifact digest, name, dtype, step)
    words   = ChaCha20(subkey) (RFC 8439), 64 bits an element: element e uses bytes 8e .. 8e+7
    normal  = inverse normal CDF of ((low 63 bits) + 1/2) / 2^64, mirrored by the top bit

so that shards, restarts and block sizes neither change nor repeat a value, and one key in two runs,
artifacts or tensors shares no row. The inverse CDF works on the lower tail, where it is accurate;
magnitudes end at 9.15, beyond which a normal lies with probability 6e-20.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from scipy.special import ndtri

from mmfact.factorize.errors import StateError
from mmfact.noise.key import NoiseKey

NONCE_BYTES = 16
# ChaCha20 counts 64-byte blocks in 32 bits: beyond this many elements a row would repeat.
LARGEST_ROW = (1 << 32) * 8

_BLOCK = 1 << 16  # elements generated at a time


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
        self._context = b"mmfact noise 1" + bytes.fromhex(digest) + len(label).to_bytes(8, "big") + label
        self._context += dtype.name.encode().rjust(8)
        self._dtype = dtype

    def __reduce__(self) -> NoReturn:
        raise StateError("a noise source holds a secret and is never pickled or copied; restore the stream instead")

    def row(self, step: int, offset: int, size: int) -> npt.NDArray[np.floating]:
        """Elements offset .. offset+size-1 of row `step`, standard normal."""
        info = self._context + step.to_bytes(8, "big")
        subkey = HKDFExpand(algorithm=hashes.SHA256(), length=32, info=info).derive(self._pseudorandom_key)
        out = np.empty(size, dtype=self._dtype)
        first, lead = divmod(offset, 8)
        initial = first.to_bytes(4, "little") + bytes(12)
        stream = Cipher(algorithms.ChaCha20(subkey, initial), mode=None).encryptor()
        if lead:
            stream.update(bytes(8 * lead))
        for start in range(0, size, _BLOCK):
            count = min(_BLOCK, size - start)
            words = np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")
            out[start : start + count] = normals(words)
        return out


def normals(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Standard normals of 64-bit words, one each; float64."""
    tail = ((words & np.uint64(2**63 - 1)).astype(np.float64) + 0.5) * 2.0**-64
    magnitude = -ndtri(np.minimum(tail, 0.5))
    return np.where(words >> np.uint64(63), magnitude, -magnitude)
