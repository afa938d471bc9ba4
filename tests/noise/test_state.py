"""Saving and restoring: bit for bit, only by declaration, and never from a state that belongs elsewhere."""

from __future__ import annotations

import dataclasses
import hmac
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import MmfactError, StateError
from mmfact.noise import NoiseKey, NoiseStream

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
    "signature",
)


@pytest.fixture
def state(stream: Any, rows_of: Any) -> dict[str, Any]:
    """The state after 5 steps of the default stream, 3 of them committed."""
    made = stream(name="w", offset=3, total=20)
    rows_of(made, 3)
    made.commit()
    rows_of(made, 2)
    return made.state_dict()


@pytest.fixture(scope="session")
def signed(key: NoiseKey) -> Any:
    """signed(state): with the signature that the default key's holder would give it, if it can be written as JSON."""

    def sign(state: dict[str, Any]) -> dict[str, Any]:
        unsigned = {name: value for name, value in state.items() if name != "signature"}
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
    again = restore(json.loads(json.dumps(made.state_dict())), artifact=artifact)
    assert (again.step, again.run, again.name) == (step, made.run, name)
    np.testing.assert_array_equal(rows_of(again), rows_of(made))


def test_a_shard_restored_continues_its_shard(state: dict[str, Any], stream: Any, rows_of: Any, restore: Any) -> None:
    """The restored shard is still elements 3..10 of the whole."""
    whole = stream(size=20, name="w", run=bytes.fromhex(state["run"]))
    np.testing.assert_array_equal(rows_of(restore(state)), rows_of(whole)[5:, 3:11])


def test_the_state_is_plain_and_does_not_follow_the_stream(stream: Any) -> None:
    """A state that changed after it was saved would restore to a step it was not saved at."""
    made = stream()
    state = made.state_dict()
    text = json.dumps(state, allow_nan=False)
    assert set(state) == set(FIELDS)
    made.next()
    made.commit()
    assert json.dumps(state) == text


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


@pytest.mark.parametrize("found", [0, 2, "1", None, 1.5])
def test_another_version_is_refused(found: Any, state: dict[str, Any], restore: Any) -> None:
    """A later layout must not be guessed at."""
    with pytest.raises(StateError, match="version"):
        restore({**state, "version": found})


@pytest.mark.parametrize("field", FIELDS)
def test_a_state_without_one_of_its_fields_is_refused(field: str, state: dict[str, Any], restore: Any) -> None:
    """Half a checkpoint is none."""
    with pytest.raises(StateError, match=f"{field}|signature"):
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
        ("resumes", [{"step": 1, "declared": "unpublished"}]),
        ("resumes", {}),
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
    """HMAC-SHA256 under the key over everything else: only its holder can write a state that is believed."""
    assert signed(state) == state
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
        made = restore(json.loads(json.dumps(made.state_dict())))
    expected = [{"step": step, "declared": "unpublished"} for step in (2, 2, 7)]
    assert made.ledger()["resumes"] == made.state_dict()["resumes"] == expected


def test_commit_and_ledger_count_rows(stream: Any, rows_of: Any, restore: Any) -> None:
    """issued runs ahead of committed; both survive a restart."""
    made = stream()

    def counts(stream: NoiseStream) -> tuple[int, int]:
        ledger = stream.ledger()
        return ledger["issued"], ledger["committed"]

    assert counts(made) == (0, 0)
    rows_of(made, 3)
    assert counts(made) == (3, 0)
    made.commit()
    rows_of(made, 2)
    assert counts(made) == (5, 3)
    assert counts(restore(made.state_dict())) == (5, 3)
    made.commit()
    made.commit()
    assert counts(made) == (5, 5)


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
        "participation": "single",
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
    assert {"mmfact", "numpy", "scipy", "cryptography"} <= set(ledger["versions"])


def test_what_is_handed_out_cannot_change_the_record(state: dict[str, Any], restore: Any) -> None:
    """A reader that edits its copy of the ledger must not edit the ledger, nor an old state the restored stream."""
    made = restore(state)
    made.ledger()["resumes"][0]["step"] = 0
    made.state_dict()["resumes"][0]["declared"] = "nothing"
    assert made.ledger()["resumes"] == [{"step": 5, "declared": "unpublished"}]


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
