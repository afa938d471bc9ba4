"""Artifacts of the streamed strategies, changed with digests that fit: a refusal in words, or a failed check."""

from __future__ import annotations

import numpy as np
import pytest

from mmfact.factorize.participation import single
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.store.store import ArtifactStore


@pytest.fixture(scope="module")
def buffered(vault):
    return ArtifactStore(vault).load("buffered")


@pytest.fixture(scope="module")
def arrays(buffered):
    return {f"strategy.{name}": array.copy() for name, array in buffered.strategy.coefficients().items()}


def at(array: np.ndarray, index, value) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def refused(mmfact, store, ref, *, codes=(1,)) -> str:
    """Every command answers in words: verify with 1, the others with 2 (or, when the file loads, with 0)."""
    ran = mmfact("verify", ref, "--store", store)
    assert ran.code in codes, (ran.code, ran.err)
    assert ran.err.startswith("mmfact: ")
    assert ran.err.count("\n") == 1
    as_json = mmfact("verify", ref, "--json", "--store", store)
    assert as_json.code == ran.code
    assert as_json.json["passed"] is False
    for command in ("inspect", "compare"):
        other = mmfact(command, ref, "--json", "--store", store)
        assert other.code in (0, 2), other.err
        assert other.json
    (entry,) = mmfact("list", "--json", "--store", store).json["artifacts"]
    assert entry["ref"] == ref
    assert mmfact("list", "--store", store).code == 0
    return ran.err


# --- content that no such strategy has -------------------------------------------------------------

VALUES = {
    "c of 0": ("c", 7, 0.0),
    "c negative": ("c", 7, -1.0),
    "c NaN": ("c", 0, np.nan),
    "c infinite": ("c", 39, np.inf),
    "c tiny": ("c", 39, 1e-38),
    "c immense": ("c", 3, 3e38),
    "c a little larger": ("c", slice(None), 1.001),
    "g NaN": ("g", (5, 0), np.nan),
    "g infinite": ("g", (5, 0), -np.inf),
    "g immense": ("g", (5, 0), 1e38),
    "decay NaN": ("decay", (39, 0), np.nan),
    "decay that explodes": ("decay", slice(None), 1e9),
    "decay beyond float64": ("decay", slice(None), 9e29),
    "q NaN": ("q", (0, 0), np.nan),
    "q infinite": ("q", (39, 0), np.inf),
    "q immense": ("q", slice(None), 1e29),
    "q of 0": ("q", slice(None), 0.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(mmfact, vault, store, forge, arrays, name):
    which, index, value = VALUES[name]
    key = f"strategy.{which}"
    forge(vault, "buffered", store, "odd", arrays={key: at(arrays[key], index, value).astype(arrays[key].dtype)})
    refused(mmfact, store, "odd")


SHAPES = {
    "c too short": ("c", lambda array: array[:-1]),
    "c too long": ("c", lambda array: np.append(array, array[:1])),
    "c a column": ("c", lambda array: array[:, None]),
    "c of float64": ("c", lambda array: array.astype("<f8")),
    "all but c of float64": ("g", lambda array: array.astype("<f8")),
    "c big-endian": ("c", lambda array: array.astype(">f4")),
    "c of whole numbers": ("c", lambda array: np.ones(len(array), "<i4")),
    "c of half precision": ("c", lambda array: array.astype("<f2")),
    "g with one buffer less": ("g", lambda array: array[:, 1:]),
    "g flat": ("g", lambda array: array.ravel()),
    "g turned": ("g", lambda array: np.ascontiguousarray(array.T)),
    "g a row less": ("g", lambda array: array[1:]),
    "decay a cube": ("decay", lambda array: array[:, :, None]),
    "q with one buffer more": ("q", lambda array: np.hstack([array, array[:, :1]])),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_types(mmfact, vault, store, forge, arrays, name):
    which, change = SHAPES[name]
    forge(vault, "buffered", store, "odd", arrays={f"strategy.{which}": change(arrays[f"strategy.{which}"])})
    refused(mmfact, store, "odd")


SPECS = {
    "one buffer more": lambda spec: spec["strategy"].update(buffers=spec["strategy"]["buffers"] + 1),
    "no buffers": lambda spec: spec["strategy"].update(buffers=0),
    "buffers negative": lambda spec: spec["strategy"].update(buffers=-1),
    "buffers immense": lambda spec: spec["strategy"].update(buffers=10**12),
    "buffers a text": lambda spec: spec["strategy"].update(buffers="2"),
    "buffers true": lambda spec: spec["strategy"].update(buffers=True),
    "buffers a fraction": lambda spec: spec["strategy"].update(buffers=2.0),
    "buffers missing": lambda spec: spec["strategy"].pop("buffers"),
    "a parameter too many": lambda spec: spec["strategy"].update(rank=1),
    "another kind": lambda spec: spec["strategy"].update(kind="dense"),
    "another kind and its parameters": lambda spec: spec.update(
        strategy={"kind": "banded-low-rank", "bandwidth": 2, "rank": 2}
    ),
    "dense": lambda spec: spec.update(strategy={"kind": "dense"}),
    "unknown kind": lambda spec: spec["strategy"].update(kind="magic"),
    "kind missing": lambda spec: spec["strategy"].pop("kind"),
    "kind a list": lambda spec: spec["strategy"].update(kind=["buffered"]),
    "strategy a list": lambda spec: spec.update(strategy=["buffered"]),
    "strategy missing": lambda spec: spec.pop("strategy"),
    "n larger": lambda spec: spec["workload"].update(n=41),
    "n immense": lambda spec: spec["workload"].update(n=1 << 24),
    "n beyond": lambda spec: spec["workload"].update(n=10**18),
    "a dataset unlisted": lambda spec: spec["datasets"].pop("strategy.g"),
    "a dataset too many": lambda spec: spec["datasets"].update({"strategy.x": spec["datasets"]["strategy.g"]}),
    "a custom workload": lambda spec: spec["workload"].update(kind="custom"),
    "a sensitivity of 1": lambda spec: spec["certificate"].update(sensitivity=1.0),
    "a sensitivity a little low": lambda spec: spec["certificate"].update(
        sensitivity=spec["certificate"]["sensitivity"] * (1 - 1e-8)
    ),
    "a sensitivity of NaN": lambda spec: spec["certificate"].update(sensitivity=float("nan")),
    "a participation that is none": lambda spec: spec["participation"].update(kind="many"),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs(mmfact, vault, store, forge, name):
    forge(vault, "buffered", store, "odd", SPECS[name])
    refused(mmfact, store, "odd")


# --- another strategy under the same certificate, its sensitivity made to fit ----------------------


def swapped(arrays, a, b):
    return {f"strategy.{a}": arrays[f"strategy.{b}"], f"strategy.{b}": arrays[f"strategy.{a}"]}


OTHERS = {
    "independent noise": lambda arrays: {
        "strategy.c": np.ones_like(arrays["strategy.c"]),
        "strategy.q": np.zeros_like(arrays["strategy.q"]),
    },
    "one column": lambda arrays: {"strategy.c": at(arrays["strategy.c"], 12, 2.0)},
    "one diagonal entry smaller": lambda arrays: {"strategy.c": at(arrays["strategy.c"], 12, 0.5)},
    "g and q swapped": lambda arrays: swapped(arrays, "g", "q"),
    "decay and q swapped": lambda arrays: swapped(arrays, "decay", "q"),
    "time reversed": lambda arrays: {name: array[::-1].copy() for name, array in arrays.items()},
    "g negative": lambda arrays: {"strategy.g": -arrays["strategy.g"]},
    "no memory": lambda arrays: {"strategy.decay": np.zeros_like(arrays["strategy.decay"])},
    "perfect memory": lambda arrays: {"strategy.decay": np.ones_like(arrays["strategy.decay"])},
    "memory that grows": lambda arrays: {"strategy.decay": np.full_like(arrays["strategy.decay"], 2.0)},
    "g a little larger": lambda arrays: {"strategy.g": arrays["strategy.g"] * np.float32(1.001)},
    "q a little larger": lambda arrays: {"strategy.q": arrays["strategy.q"] * np.float32(1.001)},
    "decay a little smaller": lambda arrays: {"strategy.decay": arrays["strategy.decay"] * np.float32(0.999)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_strategy(mmfact, vault, store, forge, arrays, name):
    """Its sensitivity is stated as it is; its loss is not, so it does not load, and verify says no."""
    changed = OTHERS[name](arrays)
    mixed = {key.removeprefix("strategy."): array.copy() for key, array in {**arrays, **changed}.items()}
    sensitivity = BufferedStrategy(**mixed).sensitivity(single())
    forge(
        vault,
        "buffered",
        store,
        "other",
        lambda spec: spec["certificate"].update(sensitivity=sensitivity),
        changed,
    )
    message = refused(mmfact, store, "other")
    assert "loss" in message or "max error" in message
    assert mmfact("inspect", "other", "--store", store).code == 2


def test_what_changes_nothing_passes(mmfact, vault, store, forge, arrays, buffered):
    """-g and -q are the same C; 2 C with twice the sensitivity is the same mechanism."""
    changed = {name: -arrays[name] for name in ("strategy.g", "strategy.q")}
    forge(vault, "buffered", store, "same", arrays=changed)
    assert mmfact("verify", "same", "--store", store).code == 0
    changed = {name: arrays[name] * 2 for name in ("strategy.c", "strategy.q")}
    twice = 2 * buffered.certificate.sensitivity
    forge(vault, "buffered", store, "twice", lambda spec: spec["certificate"].update(sensitivity=twice), changed)
    assert mmfact("verify", "twice", "--store", store).code == 0


# --- banded-low-rank -------------------------------------------------------------------------------

LOW_RANK = {
    "NaN in the band": lambda a: {"band": at(a["band"], (3, 1), np.nan)},
    "diagonal of 0": lambda a: {"band": at(a["band"], (3, 0), 0.0)},
    "diagonal negative": lambda a: {"band": at(a["band"], (3, 0), -1.0)},
    "an entry above the diagonal": lambda a: {"band": at(a["band"], (0, 3), 1.0)},
    "left where nothing is": lambda a: {"left": at(a["left"], (0, 0), 1.0)},
    "right where nothing is": lambda a: {"right": at(a["right"], (39, 0), 1.0)},
    "left infinite": lambda a: {"left": at(a["left"], (39, 0), np.inf)},
    "band immense": lambda a: {"band": a["band"] * np.float32(1e37)},
    "a narrower band": lambda a: {"band": a["band"][:, :-1]},
    "one rank less": lambda a: {"left": a["left"][:, :-1], "right": a["right"][:, :-1]},
    "of two precisions": lambda a: {"left": a["left"].astype("<f8")},
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_low_rank_content(mmfact, vault, store, forge, name):
    given = ArtifactStore(vault).load("low-rank").strategy.coefficients()
    changed = LOW_RANK[name](given)
    forge(vault, "low-rank", store, "odd", arrays={f"strategy.{key}": array for key, array in changed.items()})
    refused(mmfact, store, "odd")


def test_low_rank_of_another_strategy(mmfact, vault, store, forge):
    """No low rank at all, the sensitivity made to fit."""
    artifact = ArtifactStore(vault).load("low-rank")
    given = artifact.strategy.coefficients()
    changed = {"left": np.zeros_like(given["left"])}
    other = BandedLowRankStrategy(**{**{k: a.copy() for k, a in given.items()}, **changed}, workload=artifact.workload)
    forge(
        vault,
        "low-rank",
        store,
        "other",
        lambda spec: spec["certificate"].update(sensitivity=other.sensitivity(single())),
        {"strategy.left": changed["left"]},
    )
    assert "loss" in refused(mmfact, store, "other")


SPECS_LOW_RANK = {
    "bandwidth 0": {"bandwidth": 0},
    "bandwidth beyond n": {"bandwidth": 41},
    "rank -1": {"rank": -1},
    "rank immense": {"rank": 10**9},
    "rank a text": {"rank": "6"},
}


@pytest.mark.parametrize("name", SPECS_LOW_RANK)
def test_low_rank_specs(mmfact, vault, store, forge, name):
    forge(vault, "low-rank", store, "odd", lambda spec: spec["strategy"].update(SPECS_LOW_RANK[name]))
    refused(mmfact, store, "odd")
