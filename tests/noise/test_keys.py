"""Keys: made well, stored for the owner only, and never seen in anything that is printed, saved or copied."""

from __future__ import annotations

import base64
import copy
import errno
import hashlib
import json
import os
import pickle
import stat
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import MmfactError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.source import NoiseSource

SECRET = bytes(range(0xA1, 0xC1))


def forms(secret: bytes) -> list[bytes]:
    """How a secret may look in text or bytes; base64 without its last characters, which depend on what follows."""
    texts = [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode()[:40],
        base64.urlsafe_b64encode(secret).decode()[:40],
        repr(secret)[2:-1],
        str(list(secret))[1:-1],
        str(int.from_bytes(secret, "big")),
        str(int.from_bytes(secret, "little")),
        secret.decode("latin-1"),
    ]
    return [secret, *(text.encode() for text in texts)]


def leaks(seen: Any, secret: bytes = SECRET) -> bool:
    data = seen if isinstance(seen, bytes) else str(seen).encode()
    return any(form in data for form in forms(secret))


@pytest.fixture
def secret_key() -> NoiseKey:
    return NoiseKey.from_bytes(SECRET)


@pytest.fixture
def secret_stream(stream: Any, secret_key: NoiseKey, rows_of: Any, built: Any) -> NoiseStream:
    """With buffers: 3 of 8 elements."""
    made = stream(built("buffered", "float32").artifact, key=secret_key)
    rows_of(made, 2)
    return made


def test_the_search_would_find_a_leak() -> None:
    """Every form of the secret, in the middle of something else."""
    for form in forms(SECRET):
        assert leaks(b"key: " + form + b".")
    assert leaks(repr({"key": SECRET}))
    assert leaks(json.dumps(base64.b64encode(SECRET).decode()))


def test_nothing_that_is_printed_or_saved_holds_the_secret(secret_stream: NoiseStream, secret_key: NoiseKey) -> None:
    """Whoever reads a log or a checkpoint could subtract the noise."""
    state = secret_stream.state_dict()
    restored = NoiseStream.restore(secret_stream.artifact, state, key=secret_key, resume="unpublished")
    for made in (secret_stream, restored):
        for seen in (made, vars(made), made.state_dict(), made.ledger(), made.key, [made.key], made._parts[""].source):
            assert not leaks(seen)
            assert not leaks(repr(seen))
            assert not leaks(f"{seen}")
        assert not leaks(pickle.dumps(made.state_dict()))
        assert not leaks(pickle.dumps(made.ledger()))
        assert not leaks(json.dumps([made.state_dict(buffers=False), made.ledger()]))
        boxes = made.state_dict()["buffers"]
        assert len(boxes) == 1
        assert not leaks(boxes[0])


def test_no_file_or_state_holds_what_the_noise_is_made_of(
    stream: Any, secret_key: NoiseKey, tmp_path: Path, built: Any
) -> None:
    """Neither key, nor the run's derived key, nor a row's subkeys, nor rows and buffers: each betrays the noise."""
    artifact = built("buffered", "float32").artifact
    made = stream(artifact, key=secret_key, journal=tmp_path / "journal")
    secrets, seen = [SECRET], []
    for _ in range(5):
        row = made.next()
        source = made._parts[""].source
        secrets += [source._pseudorandom_key, source.subkeys(made.step - 1)[:32], source.subkeys(made.step - 1)[32:]]
        secrets += [row.tobytes(), *(part.tobytes() for part in made._parts[""].stepper.held[0])]
        state = made.state_dict()
        made.commit()
        seen += [pickle.dumps(state), pickle.dumps(made.ledger()), *state["buffers"]]
        seen.append((tmp_path / "journal").read_bytes())
    made.skip_to(7)
    made.close()
    again = NoiseStream.restore(artifact, state, key=secret_key, journal=tmp_path / "journal", resume="unpublished")
    again.close()
    assert not leaks(vars(again._journal))
    seen += [(tmp_path / "journal").read_bytes(), repr(again).encode()]
    assert b"resumed" in seen[-2]
    assert {len(secret) for secret in secrets} == {32}  # a row and a buffer are 8 float32
    secrets = [secret for secret in secrets if any(secret)]  # a buffer that is not yet used is zero
    assert len(secrets) > 1 + 5 * 5
    assert not any(leaks(text, secret) for text in seen for secret in secrets)


def test_the_id_names_the_key_without_revealing_it(secret_key: NoiseKey) -> None:
    """16 hex digits, the same for the same secret, not a part of the secret."""
    assert len(bytes.fromhex(secret_key.id)) == 8
    assert secret_key.id == NoiseKey.from_bytes(bytes(SECRET)).id != NoiseKey.from_bytes(SECRET[::-1]).id
    assert bytes.fromhex(secret_key.id) not in SECRET
    assert secret_key.id in repr(secret_key)


def test_no_error_message_holds_the_secret(secret_stream: NoiseStream, secret_key: NoiseKey, tmp_path: Path) -> None:
    """Neither message nor traceback (without locals) of any refusal."""
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    os.chmod(path, 0o644)
    longer = tmp_path / "longer"
    longer.write_bytes(SECRET + b"x")
    os.chmod(longer, 0o600)
    state, artifact = secret_stream.state_dict(), secret_stream.artifact
    (box,) = state["buffers"]
    boxes = [bytes(len(box))]
    journal = tmp_path / "journal"
    journaled = NoiseStream(artifact, 1, noise_multiplier=1, clip_norm=1, key=secret_key, journal=journal)
    recorded = journaled.state_dict()
    attempts = [
        lambda: NoiseKey.from_file(path),
        lambda: NoiseKey.from_file(longer),
        lambda: NoiseKey.generate(path),
        lambda: NoiseKey.from_bytes(SECRET + b"x"),
        lambda: NoiseKey.from_bytes(SECRET.hex()),
        lambda: NoiseKey.from_bytes(memoryview(SECRET)),
        lambda: pickle.dumps(secret_key),
        lambda: copy.deepcopy(secret_stream),
        lambda: NoiseStream.restore(artifact, state, key=secret_key),
        lambda: NoiseStream.restore(artifact, {**state, "run": "x"}, key=secret_key, resume="unpublished"),
        lambda: NoiseStream.restore(artifact, {**state, "key": "x"}, key=secret_key, resume="unpublished"),
        lambda: NoiseStream.restore(artifact, state, key=NoiseKey.ephemeral(), resume="unpublished"),
        lambda: secret_stream.skip_to(17),
        lambda: secret_stream.next([]),
        lambda: NoiseStream(artifact, 1, noise_multiplier=0, clip_norm=1, key=secret_key),
        lambda: NoiseStream(artifact, 1, noise_multiplier=1, clip_norm=1, key=secret_key, run=SECRET),
        lambda: NoiseStream.restore(artifact, {**state, "buffers": boxes}, key=secret_key, resume="unpublished"),
        lambda: NoiseStream.restore(artifact, recorded, key=secret_key, resume="unpublished"),
        lambda: NoiseStream.restore(artifact, recorded, key=secret_key, journal=journal),
        lambda: NoiseStream.restore(artifact, recorded, key=secret_key, journal=path),
        lambda: NoiseStream(artifact, 1, noise_multiplier=1, clip_norm=1, key=secret_key, journal=journal),
    ]
    for attempt in attempts:
        with pytest.raises(MmfactError) as caught:
            attempt()
        assert not leaks("".join(traceback.format_exception(caught.value)))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_keys_sources_and_streams_are_not_pickled(
    protocol: int, secret_stream: NoiseStream, secret_key: NoiseKey
) -> None:
    """A pickle in a checkpoint would carry the key; one in a worker process would issue rows twice."""
    for thing in (secret_key, secret_stream, secret_stream._parts[""].source, {"optimizer": [secret_stream]}):
        with pytest.raises(StateError):
            pickle.dumps(thing, protocol)


def test_keys_sources_and_streams_are_not_copied(secret_stream: NoiseStream, secret_key: NoiseKey) -> None:
    """Two copies of a stream would issue the same rows."""
    for thing in (secret_key, secret_stream, secret_stream._parts[""].source):
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(StateError):
                duplicate(thing)
        with pytest.raises(StateError):
            copy.deepcopy({"inside": (thing,)})


def test_generate_makes_a_file_for_the_owner_only(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask, 32 bytes, and it reads back as the same key."""
    old = os.umask(0)
    try:
        key = NoiseKey.generate(tmp_path / "key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert len((tmp_path / "key").read_bytes()) == 32
    assert NoiseKey.from_file(tmp_path / "key").id == NoiseKey.from_file(str(tmp_path / "key")).id == key.id
    assert key.recoverable


def test_generated_keys_differ(tmp_path: Path) -> None:
    """100 from files and 100 ephemeral: no two alike."""
    ids = {NoiseKey.generate(tmp_path / str(i)).id for i in range(100)}
    ids |= {NoiseKey.ephemeral().id for _ in range(100)}
    assert len(ids) == 200


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """An overwritten key loses every checkpoint made with it; a dangling link could point anywhere."""
    NoiseKey.generate(tmp_path / "key")
    content = (tmp_path / "key").read_bytes()
    with pytest.raises(StateError, match="from_file"):
        NoiseKey.generate(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StateError):
        NoiseKey.generate(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o644, 0o660, 0o666, 0o777])
def test_a_key_file_that_others_may_touch_is_refused(mode: int, tmp_path: Path) -> None:
    """A key that others could read or replace is no secret; the message says what to do."""
    NoiseKey.generate(tmp_path / "key")
    os.chmod(tmp_path / "key", mode)
    with pytest.raises(StateError, match=f"mode {mode:04o}.*chmod 600"):
        NoiseKey.from_file(tmp_path / "key")
    os.chmod(tmp_path / "key", 0o400)
    NoiseKey.from_file(tmp_path / "key")


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64, 10_000])
def test_a_key_of_another_length_is_refused(length: int, tmp_path: Path) -> None:
    """A key cut short is guessable; a longer file is something else."""
    (tmp_path / "key").write_bytes(bytes(length))
    os.chmod(tmp_path / "key", 0o600)
    with pytest.raises(StateError, match="32 bytes"):
        NoiseKey.from_file(tmp_path / "key")
    with pytest.raises(StateError, match="32 bytes"):
        NoiseKey.from_bytes(bytes(length))


@pytest.mark.parametrize("secret", [None, "a" * 32, 32, [1] * 32, np.zeros(32, np.uint8)])
def test_what_is_no_bytes_is_no_key(secret: Any) -> None:
    """The text of a key is not the key."""
    with pytest.raises(StateError, match="32 bytes"):
        NoiseKey.from_bytes(secret)


def test_a_key_does_not_follow_the_buffer_it_came_from(secret_key: NoiseKey) -> None:
    """The caller wipes its bytearray afterwards; the key must not become zeros."""
    buffer = bytearray(SECRET)
    key = NoiseKey.from_bytes(buffer)
    buffer[:] = bytes(32)
    assert key.id == secret_key.id


def test_a_key_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    """One clear error, no traceback of the system's."""
    for attempt in (
        lambda: NoiseKey.from_file(tmp_path / "none"),
        lambda: NoiseKey.from_file(tmp_path),
        lambda: NoiseKey.generate(tmp_path / "none" / "key"),
        lambda: NoiseKey.generate(tmp_path),
    ):
        with pytest.raises(StateError, match=str(tmp_path)):
            attempt()


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written key file would make the next attempt say 'exists', and hold a key that was never used."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        NoiseKey.generate(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_the_source_keeps_no_readable_key(secret_key: NoiseKey) -> None:
    """The source needs a key derived for its run, not the key that serves all runs."""
    source = NoiseSource(secret_key, bytes(16), "00" * 32, "w", np.dtype("float64"))
    assert not leaks(vars(source))


@pytest.mark.parametrize("purpose", ["stream state", "journal"])
def test_a_signature_is_bound_to_key_purpose_and_message(purpose: str, secret_key: NoiseKey) -> None:
    """HMAC-SHA256 (RFC 2104, written out here) of 'mmfact ', purpose and message; one serves no other purpose."""
    padded = SECRET.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in padded) + b"mmfact " + purpose.encode() + b"text").digest()
    expected = hashlib.sha256(bytes(b ^ 0x5C for b in padded) + inner).hexdigest()
    assert secret_key.sign(purpose, b"text") == expected
    others = {
        secret_key.sign("stream state" if purpose == "journal" else "journal", b"text"),
        secret_key.sign(purpose, b"texu"),
        NoiseKey.from_bytes(SECRET[::-1]).sign(purpose, b"text"),
        secret_key.id,
    }
    assert expected not in others
