"""Keys of the noise source: 256 bits that appear in no artifact, log, repr or pickle."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from mmfact.factorize.errors import StateError
from mmfact.store.publish import sync_directory

KEY_BYTES = 32


class NoiseKey:
    """A 256-bit key. Whoever has it can subtract the noise: keep it inside the trust boundary.

    Make one with `generate`, `from_file`, `from_bytes`, `ephemeral` or (for tests only)
    `insecure_from_seed`. One key may serve many runs, artifacts and tensors.
    """

    __slots__ = ("_secret", "recoverable")

    def __init__(self, secret: bytes, *, recoverable: bool) -> None:
        if not isinstance(secret, bytes | bytearray) or len(secret) != KEY_BYTES:
            size = len(secret) if isinstance(secret, bytes | bytearray) else type(secret).__name__
            raise StateError(f"a noise key has {KEY_BYTES} bytes, not {size}; NoiseKey.generate() makes one")
        self._secret = bytes(secret)
        self.recoverable = recoverable
        """Whether a saved stream state may rely on this key being there at restore."""

    @classmethod
    def generate(cls, path: str | Path) -> NoiseKey:
        """A new key from the operating system, stored in a new file of mode 0600.

        Raises
        ------
        StateError
            The file exists already or cannot be written.
        """
        secret = secrets.token_bytes(KEY_BYTES)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secret)
                    file.flush()
                    os.fsync(file.fileno())
                sync_directory(Path(path).parent)
            except BaseException:
                os.unlink(path)  # half a key must not look like one
                raise
        except FileExistsError:
            raise StateError(f"{path} exists; use NoiseKey.from_file to read it, or give another path") from None
        except OSError as error:
            raise StateError(f"the key file {path} could not be written: {error.strerror}") from error
        return cls(secret, recoverable=True)

    @classmethod
    def from_file(cls, path: str | Path) -> NoiseKey:
        """Read a key file written by `generate`.

        Raises
        ------
        StateError
            It cannot be read, others may read it (mode beyond 0600), or it does not hold 32 bytes.
        """
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if os.name == "posix" and mode & 0o077:
                    raise StateError(f"the key file {path} has mode {mode:04o}, so others can read it; chmod 600 it")
                secret = file.read(KEY_BYTES + 1)
        except OSError as error:
            hint = "; NoiseKey.generate(path) makes one" if isinstance(error, FileNotFoundError) else ""
            raise StateError(f"the key file {path} cannot be read: {error.strerror}{hint}") from error
        if len(secret) != KEY_BYTES:
            raise StateError(f"the key file {path} does not hold exactly {KEY_BYTES} bytes")
        return cls(secret, recoverable=True)

    @classmethod
    def from_bytes(cls, secret: bytes) -> NoiseKey:
        """A key that the caller keeps, in a secret manager for one."""
        return cls(secret, recoverable=True)

    @classmethod
    def ephemeral(cls) -> NoiseKey:
        """A new key that lives in this process only, by declaration: a saved state cannot outlive it."""
        return cls(secrets.token_bytes(KEY_BYTES), recoverable=True)

    @classmethod
    def insecure_from_seed(cls, seed: int) -> NoiseKey:
        """A key that anyone can guess. For tests and papers; a run that uses it is NOT private."""
        return cls(hashlib.sha256(b"mmfact insecure seed %d" % seed).digest(), recoverable=True)

    @property
    def id(self) -> str:
        """A hash that names the key without revealing it, 16 hex digits."""
        return hmac.digest(self._secret, b"mmfact key id", "sha256")[:8].hex()

    def sign(self, purpose: str, message: bytes) -> str:
        """A message authentication code (HMAC-SHA256), hex: only the key's holder could have written it.

        `purpose` is one of a few words of ours, none the beginning of another, so that no signature serves two.
        """
        return hmac.digest(self._secret, b"mmfact " + purpose.encode() + message, "sha256").hex()

    def reveal(self) -> bytes:
        """The secret itself, for key derivation inside `mmfact.noise`."""
        return self._secret

    def __repr__(self) -> str:
        return f"NoiseKey(id={self.id})"

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a noise key is never pickled or copied into checkpoints; store it with NoiseKey.generate(path)"
        )
