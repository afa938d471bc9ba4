"""The participation check: whether the examples of every step are those that the privacy statement assumes.

It keeps a keyed hash of every id, 8 bytes, and nothing else of it: without the key a saved state tells how many
examples there were, not which. It looks at ids alone, never at gradients, so no private value steers a refusal.

The hashes lie in sorted arrays, each at least twice as long as the next (two that are not are merged): a step is a few
binary searches. An id that comes again is always found. Two of N ids share a hash with a probability of N^2 / 2^65
(2.7e-6 for 1e7 ids, 2.7e-4 for 1e8), and then a new one is refused; a refused step can be given again without it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import ParticipationError, StateError
from mmfact.factorize.participation import Participation
from mmfact.noise import checks
from mmfact.noise.key import NoiseKey
from mmfact.noise.source import NONCE_BYTES

_VERSION = 1
_HASH = np.dtype("<u8")
_SIGNATURE_DIGITS = 64
_LARGEST_ID = 1024  # bits
_WHOLE = (int, np.integer)  # a union type takes twice as long to ask

Hashes = npt.NDArray[np.uint64]


class ParticipationCheck:
    """Refuses a step in which an example takes part more often than the schema allows: more than once in the run.

    Parameters
    ----------
    participation : Participation
        The artifact's.
    key : NoiseKey
        The run's: the hashes are made, and states signed, under subkeys of it.
    run : bytes
        The run nonce, 16 bytes: hashes and states of one run mean nothing in another.

    Notes
    -----
    An id is whatever the privacy statement protects: a number or name of the example, or of the user whose examples are
    clipped together. It must be the same wherever that example appears; 1, "1" and b"1" are three ids. Where several
    processes share a step, one check must see the ids of all of them.

    Raises
    ------
    StateError
        The arguments are of other types.
    """

    def __init__(self, participation: Participation, key: NoiseKey, run: bytes) -> None:
        if not isinstance(participation, Participation):
            raise StateError(f"participation must be the artifact's participation, not {participation!r:.60}")
        if not isinstance(key, NoiseKey):
            raise StateError("key must be the run's NoiseKey")
        if not isinstance(run, bytes) or len(run) != NONCE_BYTES:
            raise StateError(f"run must be the {NONCE_BYTES} bytes of the run's nonce, not {run!r:.60}")
        self.participation = participation
        self._key, self._run = key, run
        self._keyed = hashlib.blake2b(key=bytes.fromhex(key.sign("participation ids", run)), digest_size=_HASH.itemsize)
        self._lock = threading.Lock()
        self._place: tuple[int, int, list[Hashes]] = (0, 0, [])  # next step, steps, hashes: replaced as one

    @property
    def step(self) -> int:
        """The earliest step that can be admitted: the one after the last."""
        return self._place[0]

    def admit(self, step: int, ids: Iterable[Any]) -> None:
        """Take note of who takes part in `step`, or refuse the step as a whole; nothing of it is then remembered.

        Parameters
        ----------
        step : int
            Later than every step before; steps may be left out.
        ids : iterable of int, str or bytes
            A list, a one-dimensional array or tensor, or the like: one id for each clipped contribution of the step.
            Empty for an empty step.

        Raises
        ------
        ParticipationError
            An example took part in an earlier step, or is there twice: two contributions in one step are two
            participations. Or an id is none.
        StateError
            The step is not later than the last.
        """
        step = checks.whole("step", step, 0)
        values = listed(ids)
        hashes = np.frombuffer(b"".join(map(self._hash, values)), _HASH)
        order = np.argsort(hashes)
        hashes = hashes[order]
        with self._lock:
            following, steps, runs = self._place
            if step < following:
                raise StateError(
                    f"step {step} is not later than step {following - 1}, whose ids were given already; give each step "
                    "once, in order"
                )
            again = np.zeros(len(hashes), np.bool_)
            again[1:] = hashes[1:] == hashes[:-1]
            if again.any():
                raise ParticipationError(
                    f"the id {values[order[again.argmax()]]!r:.80} is there twice in step {step}, and two "
                    "contributions are two participations; leave one out, or clip a user's examples together and give "
                    "the id once"
                )
            for run in runs:
                again |= run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes
            if again.any():
                raise ParticipationError(
                    f"the id {values[order[again.argmax()]]!r:.80} of step {step} took part in an earlier step, but "
                    f"the artifact's participation is {self.participation.kind!r}, each example in at most one step; "
                    "leave it out of this step, and mend the data loader"
                )
            self._place = (step + 1, steps + 1, _merged([*runs, hashes]) if len(hashes) else runs)

    def result(self) -> dict[str, Any]:
        """What the ledger says of the check so far: steps and examples seen, and how often one took part at most."""
        _, steps, runs = self._place
        examples = sum(map(len, runs))
        return {
            "schema": self.participation.kind,
            "checked": True,
            "steps": steps,
            "examples": examples,
            "most": min(examples, 1),
        }

    def state(self) -> bytes:
        """What `restore` needs besides key and run, signed: a line of plain JSON, and 8 bytes for every example.

        The hashes are in the order of their values, so they do not tell either who took part together.
        """
        with self._lock:
            following, steps, runs = self._place
            if len(runs) > 1:
                runs = [np.sort(np.concatenate(runs), kind="stable")]
                self._place = (following, steps, runs)
        fields = {
            "version": _VERSION,
            "run": self._run.hex(),
            "schema": self.participation.kind,
            "step": following,
            "steps": steps,
        }
        body = b"".join([json.dumps(fields).encode(), b"\n", *(run.tobytes() for run in runs)])
        return body + _sign(self._key, body)

    @classmethod
    def restore(cls, participation: Participation, key: NoiseKey, run: bytes, state: bytes) -> ParticipationCheck:
        """The check as it was when `state` was saved: later steps are forgotten, and can be given again.

        So it must go on from the same checkpoint as the noise, where the same rule holds: steps after it may be issued
        again only if nothing computed from them was published.

        Raises
        ------
        StateError
            The state was changed, or belongs to another key, run, schema or version.
        """
        check = cls(participation, key, run)
        if not isinstance(state, bytes):
            raise StateError(f"the participation check's state must be the bytes that state() gave, not {state!r:.40}")
        body, signature = state[:-_SIGNATURE_DIGITS], state[-_SIGNATURE_DIGITS:]
        if not hmac.compare_digest(_sign(key, body), signature):
            raise StateError(
                "the participation check's state was changed, is not whole, or belongs to another key; use an "
                "untouched checkpoint and the run's key"
            )
        line, _, hashes = body.partition(b"\n")
        fields = json.loads(line)
        needed = {"version": _VERSION, "run": run.hex(), "schema": participation.kind}
        for name, value in needed.items():
            if fields[name] != value:
                raise StateError(
                    f"the participation check's state is of {name} {fields[name]}, not {value}; use a checkpoint of "
                    "this run"
                )
        check._place = (fields["step"], fields["steps"], [np.frombuffer(hashes, _HASH)] if hashes else [])
        return check

    def __reduce__(self) -> NoReturn:
        raise StateError("a participation check holds a secret and is never pickled or copied; use state()")

    def __repr__(self) -> str:
        seen = self.result()
        return f"ParticipationCheck({seen['schema']}, step={self.step}, examples={seen['examples']})"

    def _hash(self, value: Any) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(_spelled(value))
        return keyed.digest()


def listed(ids: Any) -> list[Any]:
    """A list of Python values from arrays and tensors of any library."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise ParticipationError(
            f"ids must be a list, a one-dimensional array or a tensor of ids, not {type(ids).__name__}; an empty step "
            "has ids=[]"
        )
    return list(values)


def _spelled(value: Any) -> bytes:
    """An id as bytes, no two the same."""
    if isinstance(value, _WHOLE) and not isinstance(value, bool):
        number = int(value)
        if number.bit_length() > _LARGEST_ID:
            raise ParticipationError(f"an id is a number of {number.bit_length()} bits; at most {_LARGEST_ID} are read")
        return b"i" + number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b" + value
    raise ParticipationError(
        f"the id {value!r:.80} is of type {type(value).__name__}; ids are whole numbers, text or bytes, the same at "
        "every appearance of an example"
    )


def _merged(runs: list[Hashes]) -> list[Hashes]:
    """Each sorted array at least twice as long as the next: adding n hashes in all moves each about log2(n) times."""
    while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
        runs[-2:] = [np.sort(np.concatenate(runs[-2:]), kind="stable")]  # finds the two sorted parts, and merges them
    return runs


def _sign(key: NoiseKey, body: bytes) -> bytes:
    return key.sign("participation state", hashlib.sha256(body).digest()).encode()
