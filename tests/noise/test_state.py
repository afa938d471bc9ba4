"""Saving and restoring: bit for bit, only by declaration, and never from a state that belongs elsewhere."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hmac
import json
import pickle
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import MmfactError, StateError
from mmfact.noise import NoiseKey, NoiseStream, stepping
from mmfact.noise import state as state_module
from mmfact.noise.source import NoiseSource

STEPS = 12  # of the artifacts that `built` makes

FIELDS = (
    "version",
    "step",
    "committed",
    "skipped",
    "run",
    "artifact",
    "key",
    "name",
    "offset",
    "size",
    "total",
    "space",
    "dtype",
    "noise_multiplier",
    "clip_norm",
    "resumes",
    "journal",
    "shards",
    "participation",
    "signature",
)

strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.fixture
def state(stream: Any, rows_of: Any) -> dict[str, Any]:
    """The state after 5 steps of the default stream, 3 of them committed."""
    made = stream(name="w", offset=3, total=20)
    rows_of(made, 3)
    made.state_dict()
    made.commit()
    rows_of(made, 2)
    return made.state_dict()


@pytest.fixture(scope="session")
def signed(key: NoiseKey) -> Any:
    """signed(state): without buffers, with the signature that the default key's holder would give it if it is JSON."""

    def sign(state: dict[str, Any]) -> dict[str, Any]:
        unsigned = {name: value for name, value in state.items() if name not in ("signature", "buffers")}
        try:
            text = json.dumps(unsigned, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError):
            return state
        message = b"mmfact stream state" + text.encode()
        return {**unsigned, "signature": hmac.digest(key.reveal(), message, "sha256").hex()}

    return sign


@pytest.fixture(scope="session")
def restore(case: Any, key: NoiseKey) -> Any:
    """restore(state, **options): under the default artifact and key, declared unpublished."""

    def call(state: Any, **options: Any) -> NoiseStream:
        options = {"key": key, "resume": "unpublished", **options}
        return NoiseStream.restore(options.pop("artifact", case("momentum").artifact), state, **options)

    return call


@settings(deadline=None, max_examples=40)
@given(
    step=st.integers(0, 16),
    space=st.sampled_from(["gradient", "iterate"]),
    dtype=st.sampled_from(["float32", "float64"]),
    coefficients=st.sampled_from(["float32", "float64"]),
    offset=st.integers(0, 20),
    name=st.text(st.characters(codec="utf-8"), max_size=5),
    sigma=st.floats(1e-3, 1e3),
)
def test_a_restored_stream_continues_bit_for_bit(
    step: int,
    space: str,
    dtype: str,
    coefficients: str,
    offset: int,
    name: str,
    sigma: float,
    case: Any,
    stream: Any,
    rows_of: Any,
    restore: Any,
) -> None:
    """Through JSON text, at any step: other noise after a restart would no longer cancel what was issued before."""
    artifact = case("momentum", dtype=coefficients).artifact
    made = stream(artifact, space=space, dtype=dtype, offset=offset, name=name, noise_multiplier=sigma)
    rows_of(made, step)
    again = restore(json.loads(json.dumps(made.state_dict(buffers=False))), artifact=artifact)
    assert (again.step, again.run, again.name) == (step, made.run, name)
    np.testing.assert_array_equal(rows_of(again), rows_of(made))


def test_a_shard_restored_continues_its_shard(state: dict[str, Any], stream: Any, rows_of: Any, restore: Any) -> None:
    """The restored shard is still elements 3..10 of the whole."""
    whole = stream(size=20, name="w", run=bytes.fromhex(state["run"]))
    np.testing.assert_array_equal(rows_of(restore(state)), rows_of(whole)[5:, 3:11])


def test_the_state_is_plain_and_does_not_follow_the_stream(stream: Any) -> None:
    """A state that changed after it was saved would restore to a step it was not saved at."""
    made = stream()
    plain, state = made.state_dict(buffers=False), made.state_dict()
    text = json.dumps(plain, allow_nan=False)
    assert set(plain) == set(FIELDS)
    assert set(state) == {*FIELDS, "buffers"}
    assert all(type(piece) is bytes for piece in state["buffers"])
    made.next()
    made.commit()
    assert json.dumps(plain) == text


@pytest.mark.parametrize("resume", [None, "", "published", "UNPUBLISHED", True, 1, b"unpublished"])
def test_without_the_declaration_nothing_is_restored(resume: Any, state: dict[str, Any], restore: Any) -> None:
    """Rows after the checkpoint are issued again; only the caller can know that nothing of them left."""
    with pytest.raises(StateError, match="unpublished"):
        restore(state, resume=resume)


def test_the_declaration_has_no_default(state: dict[str, Any], case: Any, key: NoiseKey) -> None:
    """Not given is not declared, and it cannot be given by position."""
    with pytest.raises(StateError, match="unpublished"):
        NoiseStream.restore(case("momentum").artifact, state, key=key)
    with pytest.raises(TypeError):
        NoiseStream.restore(case("momentum").artifact, state, key, "unpublished")  # type: ignore[misc]


def test_another_artifact_is_refused(state: dict[str, Any], case: Any, restore: Any) -> None:
    """The noise would not cancel: also when only the dtype of the coefficients differs."""
    for other in (case("prefix-sum").artifact, case("momentum", dtype="float32").artifact):
        with pytest.raises(StateError, match="artifact"):
            restore(state, artifact=other)


def test_another_key_is_refused(state: dict[str, Any], restore: Any) -> None:
    """With another key the rows to come would be independent of those issued."""
    with pytest.raises(StateError, match="key"):
        restore(state, key=NoiseKey.insecure_from_seed(5))


@pytest.mark.parametrize("found", [0, 1, 2, 4, "3", None, 3.5, True])
def test_another_version_is_refused(found: Any, state: dict[str, Any], restore: Any, signed: Any) -> None:
    """A layout of before or later must not be guessed at, even where the key's holder signed it."""
    for altered in ({**state, "version": found}, signed({**state, "version": found})):
        with pytest.raises(StateError, match="version"):
            restore(altered)


@pytest.mark.parametrize("field", FIELDS)
def test_a_state_without_one_of_its_fields_is_refused(field: str, state: dict[str, Any], restore: Any) -> None:
    """Half a checkpoint is none."""
    with pytest.raises(StateError, match=f"{field}|signature|state_dict"):
        restore({name: value for name, value in state.items() if name != field})


@pytest.mark.parametrize("damaged", [None, [], "state", 5, b"", {}])
def test_what_is_no_state_is_refused(damaged: Any, restore: Any) -> None:
    """Another file's content: one clear error."""
    with pytest.raises(StateError):
        restore(damaged)


WRONG = {
    "step": [None, "5", 5.0, True, -1, 10**30],
    "committed": [None, "5", 5.0, True, -1, 6],
    "skipped": [None, "5", 5.0, True, -1, 6],
    "run": [None, "", "00" * 15, "00" * 17, "zz" * 16, 5, b"\x00" * 16],
    "artifact": [None, "", "00" * 32, 5],
    "key": [None, "", "00" * 8, 5],
    "offset": [None, "3", 3.0, True, -1, 13],
    "size": [None, "8", 8.0, True, 0, -1, 18, 10**15],
    "total": ["20", 20.0, True, 0, 10, 10**15],
    "space": [None, "", "both", 5],
    "dtype": ["", "float16", "int64", 5],
    "noise_multiplier": [None, "x", 0, -1, float("nan"), float("inf"), []],
    "clip_norm": [None, "x", 0, -1, float("nan"), float("inf"), {}],
    "resumes": [None, 5],
    "journal": [None, True, 1, "journal"],
}
WRONGS = [pytest.param(field, value, id=f"{field}={value!r}") for field, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("field", "value"), WRONGS)
def test_a_field_that_cannot_be_is_refused(
    field: str, value: Any, state: dict[str, Any], restore: Any, signed: Any
) -> None:
    """Wrong type, length or range: refused with an error of ours, also where the key's holder signed it."""
    with pytest.raises(StateError):
        restore({**state, field: value})
    with pytest.raises(MmfactError):
        restore(signed({**state, field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 4),
        ("step", 6),
        ("committed", 4),
        ("run", "ab" * 16),
        ("name", "v"),
        ("offset", 4),
        ("size", 7),
        ("total", 21),
        ("total", None),
        ("space", "iterate"),
        ("dtype", "float64"),
        ("dtype", None),
        ("noise_multiplier", 0.13),
        ("noise_multiplier", "1.3"),
        ("clip_norm", 0.07),
        ("resumes", [{"step": 1, "declared": "unpublished", "reissued": None}]),
        ("resumes", {}),
        ("journal", True),
        ("journal", None),
        ("shards", {"": [3, 7]}),
        ("shards", {}),
        ("participation", "00" * 32),
        ("participation", ""),
        ("ids", b""),
        ("signature", ""),
        ("signature", "00" * 32),
        ("signature", "é"),
        ("signature", None),
        ("another", 1),
    ],
)
def test_a_field_that_was_changed_is_noticed(field: str, value: Any, state: dict[str, Any], restore: Any) -> None:
    """Old white rows at another sigma, or new ones under an old step, betray the gradients."""
    assert state.get(field, "absent") != value
    with pytest.raises(StateError):
        restore({**state, field: value})


def test_the_signature_is_the_keys(state: dict[str, Any], signed: Any, restore: Any) -> None:
    """HMAC-SHA256 under the key over all but the buffers: only its holder can write a state that is believed."""
    assert {**signed(state), "buffers": state["buffers"]} == state
    other = NoiseKey.insecure_from_seed(5)
    with pytest.raises(StateError, match="signature"):
        restore(signed({**state, "key": other.id}), key=other)
    assert restore(signed({**state, "step": 6})).step == 6


def test_the_order_of_the_fields_does_not_matter(state: dict[str, Any], restore: Any) -> None:
    """Checkpoint formats sort keys as they like."""
    assert restore(dict(sorted(state.items(), reverse=True))).step == restore(state).step == 5


def test_a_state_whose_key_is_lost_is_not_made(stream: Any) -> None:
    """A key made in the stream dies with it, so a checkpoint of it would be one that nobody can use."""
    with pytest.raises(StateError, match=r"NoiseKey\.(generate|ephemeral)"):
        stream(key=None).state_dict()


def test_every_declared_key_can_be_saved(tmp_path: Any, stream: Any, rows_of: Any, restore: Any) -> None:
    """Persisted, kept by the caller, or declared ephemeral."""
    keys = [NoiseKey.generate(tmp_path / "key"), NoiseKey.from_bytes(b"k" * 32), NoiseKey.ephemeral()]
    for key in keys:
        made = stream(key=key)
        rows_of(made, 3)
        np.testing.assert_array_equal(rows_of(restore(made.state_dict(), key=key)), rows_of(made))
    made = stream(key=keys[0])
    rows_of(made, 3)
    again = restore(made.state_dict(), key=NoiseKey.from_file(tmp_path / "key"))
    np.testing.assert_array_equal(rows_of(again), rows_of(made))


def test_every_resume_is_on_record(stream: Any, rows_of: Any, restore: Any) -> None:
    """A signer must see how often, and where, rows may have been issued twice."""
    made = stream()
    assert made.ledger()["resumes"] == []
    for step in (2, 2, 7):
        made.skip_to(step)
        made = restore(json.loads(json.dumps(made.state_dict(buffers=False))))
    expected = [{"step": step, "declared": "unpublished", "reissued": None} for step in (2, 2, 7)]
    assert made.ledger()["resumes"] == made.state_dict()["resumes"] == expected


def counts(stream: NoiseStream) -> tuple[int, int]:
    ledger = stream.ledger()
    return ledger["issued"], ledger["committed"]


def test_commit_and_ledger_count_rows(stream: Any, rows_of: Any, restore: Any) -> None:
    """issued runs ahead of committed; a state that was restored was durable, so its step counts as committed."""
    made = stream()
    assert counts(made) == (0, 0)
    rows_of(made, 3)
    assert counts(made) == (3, 0)
    made.state_dict()
    assert counts(made) == (3, 0)
    rows_of(made, 2)
    made.commit()
    assert counts(made) == (5, 3)
    made.commit()
    assert counts(made) == (5, 3)
    again = restore(made.state_dict())
    assert counts(again) == (5, 5)
    again.commit()
    assert counts(again) == (5, 5)
    assert counts(made) == (5, 3)


def test_there_is_nothing_to_commit_before_a_state(stream: Any, rows_of: Any) -> None:
    """A commit without a state would give up rows that no checkpoint covers."""
    made = stream()
    rows_of(made, 3)
    for step in (None, 0, 3):
        with pytest.raises(StateError, match="state_dict"):
            made.commit(step)
    assert counts(made) == (3, 0)


def test_commit_of_an_earlier_state(stream: Any, rows_of: Any) -> None:
    """Checkpoints written while training goes on: their step, between the last commit and the last state."""
    made = stream()
    for _ in range(3):
        rows_of(made, 2)
        made.state_dict()
    rows_of(made, 1)
    made.commit(2)
    assert counts(made) == (7, 2)
    made.commit(np.int64(4))
    assert counts(made) == (7, 4)
    for step in (0, 3, 7, 16, 10**30, -1, 4.0, "4", True):
        with pytest.raises(StateError):
            made.commit(step)
    assert counts(made) == (7, 4)
    made.commit()
    assert counts(made) == (7, 6)


def test_more_committed_than_issued_is_refused(state: dict[str, Any], restore: Any, signed: Any) -> None:
    """Such a state comes from no stream."""
    with pytest.raises(StateError, match="committed"):
        restore(signed({**state, "committed": 6}))


def test_the_ledger_says_what_a_signer_needs(case: Any, stream: Any) -> None:
    """Digest, sigma, clip norm, the sensitivity used, participation, run, key id, horizon and versions; JSON-ready."""
    made = stream(space="iterate", name="w")
    ledger = json.loads(json.dumps(made.ledger(), allow_nan=False))
    artifact = case("momentum").artifact
    expected = {
        "artifact": artifact.digest,
        "workload": artifact.workload.spec(),
        "participation": {"schema": "single", "checked": False},
        "noise_multiplier": 1.3,
        "clip_norm": 0.7,
        "sensitivity": made.sensitivity,
        "space": "iterate",
        "name": "w",
        "run": made.run.hex(),
        "key": made.key.id,
        "horizon": 16,
    }
    assert {name: ledger[name] for name in expected} == expected
    assert {"mmfact", "numpy", "numba", "cryptography"} <= set(ledger["versions"])


def test_what_is_handed_out_cannot_change_the_record(state: dict[str, Any], restore: Any) -> None:
    """A reader that edits its copy of the ledger must not edit the ledger, nor an old state the restored stream."""
    made = restore(state)
    made.ledger()["resumes"][0]["step"] = 0
    made.state_dict()["resumes"][0]["declared"] = "nothing"
    saved = made.state_dict()
    again = restore(saved)
    saved["resumes"][0]["step"] = 0
    entry = {"step": 5, "declared": "unpublished", "reissued": None}
    assert made.ledger()["resumes"] == [entry]
    assert again.ledger()["resumes"] == [entry, entry]


def test_the_restored_noise_uses_the_recomputed_sensitivity(
    state: dict[str, Any], case: Any, rows_of: Any, restore: Any
) -> None:
    """A file with the same digest and a lying certificate restores to the same rows."""
    honest = case("momentum").artifact
    lying = dataclasses.replace(honest, certificate=dataclasses.replace(honest.certificate, sensitivity=1e-3))
    np.testing.assert_array_equal(rows_of(restore(state, artifact=lying)), rows_of(restore(state)))


def test_the_ledger_tells_skipped_steps_from_issued_rows(stream: Any) -> None:
    """A reviewer counts releases: a step that was skipped released nothing."""
    made = stream()
    made.next()
    made.skip_to(4)
    made.next()
    ledger = made.ledger()
    assert (ledger["issued"], ledger["skipped"], made.step) == (2, 3, 5)


@strategies
@both_spaces
@both_dtypes
def test_bit_for_bit_at_every_step(
    strategy: str, space: str, dtype: str, built: Any, stream: Any, rows_of: Any, restore: Any
) -> None:
    """All rows to come after a restart at any step, with the saved buffers and without, are those without a restart."""
    artifact = built(strategy, dtype).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16)}
    expected = rows_of(stream(artifact, 5, **options))
    made = stream(artifact, 5, **options)
    for step in range(STEPS + 1):
        with_buffers, without = made.state_dict(), made.state_dict(buffers=False)
        for state in (with_buffers, without):
            again = restore(state, artifact=artifact)
            assert again.step == step
            np.testing.assert_array_equal(rows_of(again).reshape(-1, 5), expected[step:])
        if step < STEPS:
            np.testing.assert_array_equal(made.next(), expected[step])


@strategies
@both_spaces
def test_bit_for_bit_from_state_to_state(
    strategy: str, space: str, built: Any, stream: Any, rows_of: Any, restore: Any
) -> None:
    """A run that is restored at every step, in three ways and with skips on the way: still the same rows."""
    artifact = built(strategy, "float32").artifact
    options = {"space": space, "run": bytes(16)}
    expected = rows_of(stream(artifact, 5, **options))
    made, skipped = stream(artifact, 5, **options), 0
    for step in range(STEPS):
        if step in (2, 3, 7):
            made.skip_to(step + 1)
            skipped += 1
        else:
            np.testing.assert_array_equal(made.next(), expected[step])
        made = restore(made.state_dict(buffers=step % 3 > 0), artifact=artifact)
        if step % 4 == 3:
            made = restore(made.state_dict(), artifact=artifact)  # before anything was drawn
    ledger = made.ledger()
    assert (ledger["issued"], ledger["skipped"], ledger["committed"]) == (STEPS - skipped, skipped, STEPS)
    assert len(ledger["resumes"]) == STEPS + STEPS // 4


@strategies
@both_spaces
@pytest.mark.parametrize("step", [1, 6, STEPS])
def test_a_stream_that_lags_saves_its_buffers_of_now(
    strategy: str, space: str, step: int, built: Any, stream: Any, rows_of: Any, restore: Any
) -> None:
    """After `skip_to` the buffers are still those of the last row: saved under a later step they are wrong noise."""
    artifact = built(strategy, "float32").artifact
    for first in range(step):
        expected = rows_of(stream(artifact, 5, space=space, run=bytes(16)))
        made = stream(artifact, 5, space=space, run=bytes(16))
        rows_of(made, first)
        made.skip_to(step)
        again = restore(made.state_dict(), artifact=artifact)
        assert again.ledger()["skipped"] == step - first
        for run in (again, made):
            np.testing.assert_array_equal(rows_of(run).reshape(-1, 5), expected[step:])


@strategies
@both_spaces
def test_blocks_left_behind_are_saved_as_of_now(
    strategy: str,
    space: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    restore: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five blocks on two threads, of which a failed row left some behind: the state is of its step in all of them."""
    monkeypatch.setattr(stepping, "BLOCK", 4)
    artifact = built(strategy, "float32").artifact
    options = {"space": space, "run": bytes(16), "threads": 2}
    expected = rows_of(stream(artifact, 18, **options))
    real = NoiseSource.fill
    for first in (0, 8, 16):

        def fill(self: NoiseSource, step: int, at: int, out: Any, first: int = first) -> None:
            if (step, at) == (4, first):
                raise MemoryError
            real(self, step, at, out)

        made = stream(artifact, 18, **options)
        rows_of(made, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NoiseSource, "fill", fill)
            with pytest.raises(MemoryError):
                made.next()
        again = restore(made.state_dict(), artifact=artifact)
        assert again.step == 5
        np.testing.assert_array_equal(rows_of(again), expected[5:])


@strategies
@both_spaces
def test_saved_buffers_spare_the_past(
    strategy: str,
    space: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    restore: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With buffers the next row draws its own white row and no other; without, and for dense always, all of them."""
    artifact = built(strategy, "float32").artifact
    made = stream(artifact, 5, space=space)
    rows_of(made, 7)
    drawn: list[int] = []
    real = NoiseSource.fill

    def fill(self: NoiseSource, step: int, *given: Any) -> None:
        drawn.append(step)
        real(self, step, *given)

    monkeypatch.setattr(NoiseSource, "fill", fill)
    for buffers in (True, False):
        again = restore(made.state_dict(buffers=buffers), artifact=artifact)
        assert drawn == []
        again.next()
        assert drawn == ([7] if buffers and strategy != "dense" else list(range(8)))
        drawn.clear()
        again.next()
        assert drawn == [8]
        drawn.clear()


@pytest.fixture
def sealed(built: Any, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, NoiseStream]:
    """The artifact and a stream after 5 steps, whose states hold 12 sealed pieces: 3 buffers of 64 bytes by 16."""
    monkeypatch.setattr(state_module, "_PIECE", 16)
    artifact = built("buffered", "float32").artifact
    made = stream(artifact, 16, dtype="float32")
    rows_of(made, 5)
    return artifact, made


def test_many_pieces_restore_as_one(sealed: Any, rows_of: Any, restore: Any) -> None:
    """Buffers beyond what one message may hold: 3 buffers of 16 float32, 16 bytes at a time, in order."""
    artifact, made = sealed
    state = made.state_dict()
    assert [len(piece) for piece in state["buffers"]] == [12 + 16 + 16] * 12
    np.testing.assert_array_equal(rows_of(restore(state, artifact=artifact)), rows_of(made))


def test_a_piece_may_end_anywhere(
    built: Any, stream: Any, rows_of: Any, restore: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end inside a number, a last one that is shorter, one for all, and none for an empty stepper."""
    artifact = built("banded-low-rank", "float32").artifact
    made = stream(artifact, 5, space="gradient", run=bytes(16))
    rows_of(made, 4)
    expected = rows_of(stream(artifact, 5, space="gradient", run=bytes(16)))[4:]
    lengths = [array.nbytes for array in made._parts[""].stepper.held]
    for piece in (1, 7, 40, 60, 1 << 26):
        monkeypatch.setattr(state_module, "_PIECE", piece)
        state = made.state_dict()
        assert len(state["buffers"]) == sum(-(-length // piece) for length in lengths)
        np.testing.assert_array_equal(rows_of(restore(state, artifact=artifact)), expected)


def test_the_sealed_buffers_do_not_show_them(sealed: Any) -> None:
    """Who reads a checkpoint must not learn past noise: no 4 bytes of a buffer in place, no run of 8 anywhere."""
    _, made = sealed
    state = made.state_dict()
    held = made._parts[""].stepper.held[0].tobytes()
    assert len(held) == 3 * 16 * 4
    assert np.count_nonzero(made._parts[""].stepper.held[0]) == 3 * 16
    boxes = b"|".join(state["buffers"])
    assert not any(held[i : i + 8] in boxes for i in range(len(held) - 7))
    for number, box in enumerate(state["buffers"]):
        plain = held[16 * number : 16 * number + 16]
        assert all(box[12 + i : 16 + i] != plain[i : i + 4] for i in range(0, 16, 4))
    assert held not in pickle.dumps(state)


def test_no_nonce_comes_twice(sealed: Any, restore: Any) -> None:
    """States of one step share a key, and two messages under one nonce show their difference; 40 states, 480 pieces."""
    artifact, made = sealed
    states = [made.state_dict() for _ in range(20)]
    again = restore(states[0], artifact=artifact)
    states += [again.state_dict() for _ in range(20)]
    boxes = [box for state in states for box in state["buffers"]]
    assert len({box[:12] for box in boxes}) == len({box[12:] for box in boxes}) == len(boxes) == 480


def test_the_seal_is_the_documented_one(sealed: Any, key: NoiseKey) -> None:
    """ChaCha20-Poly1305 under HKDF-SHA256 (RFC 5869, written out here) of key and run, bound to signature and place."""
    _, made = sealed
    state = made.state_dict()
    extracted = hmac.digest(made.run, key.reveal(), "sha256")
    derived = hmac.digest(extracted, b"mmfact sealed buffers\x01", "sha256")
    opened = [
        ChaCha20Poly1305(derived).decrypt(box[:12], box[12:], f"{state['signature']} {number}".encode())
        for number, box in enumerate(state["buffers"])
    ]
    assert b"".join(opened) == made._parts[""].stepper.held[0].tobytes()


def refused_or_replayed(state: dict[str, Any], expected: Any, restore: Any, rows_of: Any, **options: Any) -> None:
    """Refused as it is; the same rows where the field is taken out."""
    with pytest.raises(StateError, match="buffers"):
        restore(state, **options)
    plain = {name: value for name, value in state.items() if name != "buffers"}
    np.testing.assert_array_equal(rows_of(restore(plain, **options)), expected)


def test_every_flipped_bit_of_the_buffers_is_noticed(built: Any, stream: Any, rows_of: Any, restore: Any) -> None:
    """Nonce, buffers and tag of a piece of 40 bytes: 320 bits, each flipped alone; other numbers are other noise."""
    artifact = built("buffered", "float32").artifact
    made = stream(artifact, 1)
    rows_of(made, 5)
    state = made.state_dict()
    (box,) = state["buffers"]
    assert len(box) == 12 + 3 * 4 + 16
    for bit in range(8 * len(box)):
        flipped = bytearray(box)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StateError, match="buffers"):
            restore({**state, "buffers": [bytes(flipped)]}, artifact=artifact)
    refused_or_replayed({**state, "buffers": [bytes(flipped)]}, rows_of(made), restore, rows_of, artifact=artifact)


def test_pieces_that_do_not_belong_are_noticed(sealed: Any, rows_of: Any, restore: Any) -> None:
    """Swapped, missing, extra, cut, or not bytes at all: never other numbers."""
    artifact, made = sealed
    state = made.state_dict()
    boxes, expected = state["buffers"], rows_of(made)
    swapped = [boxes[1], boxes[0], *boxes[2:]]
    alike = [boxes[0], boxes[0], *boxes[2:]]
    wrong: list[Any] = [
        swapped, alike, boxes[::-1], boxes[:-1], boxes[1:], [*boxes, boxes[-1]], [*boxes, b""], [], None, b"",
        b"".join(boxes), tuple(boxes[:-1]), {}, dict(enumerate(boxes)), 5, "buffers", [None] * 12, [5] * 12,
        [b""] * 12, ["x" * 44] * 12, [list(box) for box in boxes], [bytes(44)] * 12,
    ]  # fmt: skip
    wrong += [[boxes[0][:length], *boxes[1:]] for length in range(44)]
    wrong += [[boxes[0] + b"\0", *boxes[1:]], [b"\0" + boxes[0], *boxes[1:]]]
    for buffers in wrong:
        with pytest.raises(StateError, match="buffers"):
            restore({**state, "buffers": buffers}, artifact=artifact)
    refused_or_replayed({**state, "buffers": swapped}, expected, restore, rows_of, artifact=artifact)


def test_buffers_of_another_state_are_noticed(
    sealed: Any, rows_of: Any, restore: Any, stream: Any, key: NoiseKey
) -> None:
    """An earlier step, another run, another key, shard, name or record of the same step: numbers that do not fit."""
    artifact, made = sealed
    state, others = made.state_dict(), []
    again = restore(state, artifact=artifact)
    others.append(again.state_dict())  # the same step and numbers, but another record
    options: list[dict[str, Any]] = [
        {"run": bytes(16)},
        {"name": "v"},
        {"offset": 1},
        {"noise_multiplier": 1.4},
        {"key": NoiseKey.insecure_from_seed(5)},
    ]
    for option in options:
        other = stream(artifact, 16, **{"run": made.run, **option})
        rows_of(other, 5)
        others.append(other.state_dict())
    earlier = stream(artifact, 16, run=made.run)
    rows_of(earlier, 4)
    others.append(earlier.state_dict())
    skipping = stream(artifact, 16, run=made.run)
    skipping.skip_to(5)
    others.append(skipping.state_dict())
    expected = rows_of(made)
    for other in others:
        refused_or_replayed({**state, "buffers": other["buffers"]}, expected, restore, rows_of, artifact=artifact)
        one = [other["buffers"][0], *state["buffers"][1:]]
        refused_or_replayed({**state, "buffers": one}, expected, restore, rows_of, artifact=artifact)


def test_a_refused_state_leaves_nothing_behind(sealed: Any, rows_of: Any, restore: Any) -> None:
    """The last piece is damaged, the others were opened already: the next attempt starts from nothing."""
    artifact, made = sealed
    state = made.state_dict()
    damaged = {**state, "buffers": [*state["buffers"][:-1], bytes(44)]}
    with pytest.raises(StateError):
        restore(damaged, artifact=artifact)
    assert state == {**damaged, "buffers": state["buffers"]}
    np.testing.assert_array_equal(rows_of(restore(state, artifact=artifact)), rows_of(made))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_through_checkpoint_formats(protocol: int, sealed: Any, rows_of: Any, restore: Any) -> None:
    """Pickle (what torch.save writes) beside other things, copies, and JSON with the bytes in base64."""
    artifact, made = sealed
    state = made.state_dict()
    text = json.dumps({**state, "buffers": [base64.b64encode(box).decode() for box in state["buffers"]]})
    read = json.loads(text)
    forms = [
        pickle.loads(pickle.dumps({"model": [1.0], "noise": {"w": state}}, protocol))["noise"]["w"],
        copy.deepcopy(state),
        {**read, "buffers": [base64.b64decode(box) for box in read["buffers"]]},
        {**state, "buffers": [bytearray(box) for box in state["buffers"]]},
        {**state, "buffers": [memoryview(box) for box in state["buffers"]]},
    ]
    expected = rows_of(made)
    for form in forms:
        np.testing.assert_array_equal(rows_of(restore(form, artifact=artifact)), expected)


def test_the_buffers_cost_what_the_stream_holds(built: Any, stream: Any, rows_of: Any) -> None:
    """The state without them stays a few hundred bytes whatever the size; with them, 28 bytes beside the buffers."""
    artifact = built("buffered", "float32").artifact
    made = stream(artifact, 100_000)
    rows_of(made, 2)
    assert len(json.dumps(made.state_dict(buffers=False))) < 1000
    assert sum(map(len, made.state_dict()["buffers"])) == 3 * 4 * 100_000 + 28
