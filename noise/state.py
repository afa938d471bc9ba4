"""Saved states: signed with the run's key, and their buffers sealed with it.

Whoever knows a stream's buffers knows part of its noise, so they are as secret as the key; sealed (ChaCha20-Poly1305,
RFC 8439), a state can lie in a checkpoint that others may read.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mmfact.factorize.errors import StateError
from mmfact.noise.key import NoiseKey

STATE_VERSION = 3

_PIECE = 1 << 26  # bytes sealed at a time
_NONCE = 12


def sign(key: NoiseKey, fields: dict[str, Any]) -> str:
    """The signature of a state's plain fields.

    Raises
    ------
    TypeError, ValueError
        A field is not plain JSON.
    """
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return key.sign("stream state", text.encode())


def seal(key: NoiseKey, run: bytes, signature: str, held: tuple[npt.NDArray[Any], ...]) -> list[bytes]:
    """Encrypt and authenticate what a stepper holds, bound to the signature of its state."""
    cipher = _cipher(key, run)
    sealed = []
    for number, piece in enumerate(_pieces(held)):
        nonce = secrets.token_bytes(_NONCE)
        sealed.append(nonce + cipher.encrypt(nonce, piece, _label(signature, number)))
    return sealed


def unseal(key: NoiseKey, run: bytes, signature: str, sealed: Any, held: tuple[npt.NDArray[Any], ...]) -> None:
    """Decrypt what `seal` made into `held`, whose shapes and dtypes are those of then.

    Raises
    ------
    StateError
        It was changed, or belongs to another state.
    """
    damaged = StateError(
        "the state's buffers were changed or belong to another state; use an untouched checkpoint, or remove the field "
        "'buffers': the past rows are then drawn again"
    )
    pieces = _pieces(held)
    if not isinstance(sealed, list) or len(sealed) != len(pieces):
        raise damaged
    cipher = _cipher(key, run)
    for number, (box, piece) in enumerate(zip(sealed, pieces, strict=True)):
        try:
            opened = cipher.decrypt(bytes(box[:_NONCE]), box[_NONCE:], _label(signature, number))
        except (InvalidTag, TypeError, ValueError) as error:
            raise damaged from error
        if len(opened) != len(piece):
            raise damaged
        piece[:] = opened


def _cipher(key: NoiseKey, run: bytes) -> ChaCha20Poly1305:
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=run, info=b"mmfact sealed buffers")
    return ChaCha20Poly1305(derived.derive(key.reveal()))


def _label(signature: str, number: int) -> bytes:
    return f"{signature} {number}".encode()


def _pieces(held: tuple[npt.NDArray[Any], ...]) -> list[memoryview]:
    found = []
    for array in held:
        flat = array.data.cast("B") if array.size else memoryview(b"")
        found += [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]
    return found
