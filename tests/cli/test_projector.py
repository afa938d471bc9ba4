"""`mmfact projector inspect`: a cache over time, one projector with its spectrum, --json, damage and bad paths."""

from __future__ import annotations

import json
import os
import re
import tracemalloc

import numpy as np
import pytest

from mmfact.store.projectors import ProjectorCache, ProjectorKey

RUN, TAG = "5" * 32, "tag-" + "6" * 32
SPECTRUM = np.array([8.0, 4.0, 2.0, 1.0, 0.125])


def key(**changes):
    fields = {"scope": RUN, "step": 0, "part": "0-of-1", "kind": "eigen", "k": 3, "m": 5, "p": 10, "storage": "float32"}
    return ProjectorKey(**({**fields, "public": "a" * 64, "parameters": "b" * 64} | changes))


def put(cache, wanted, **record):
    basis = np.ones((wanted.k, wanted.p), wanted.storage)
    return cache.put(wanted, [basis], {"eigenvalues": SPECTRUM[: wanted.k], "spectrum": SPECTRUM}, record)


@pytest.fixture
def cache(store):
    """Of a run with three refreshes, and of a tag with two halves."""
    cache = ProjectorCache(store / "projectors")
    put(cache, key(step=100), explained=0.9, distance_to_previous=0.25, gap=1.5)
    put(cache, key(step=0), explained=0.98765432, distance_to_previous=None, held_out_error=0.125, source="computed")
    put(cache, key(step=20, k=2), held_out_explained=0.75)
    for part in ("0-of-2", "1-of-2"):
        put(cache, key(scope=TAG, part=part, parameters="", storage="float16"))
    return cache


def rows(out):
    """The lines of the tables that begin with a step, split into cells."""
    return [re.split(r" {2,}", line.strip()) for line in out.splitlines() if re.match(r" *\d+  ", line)]


def test_cache_over_time(mmfact, store, cache):
    """A table for each run or tag, in the order of steps, with what was measured and a dash for what was not."""
    ran = mmfact("projector", "inspect", "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert [line for line in ran.out.splitlines() if line.startswith(("run ", "tag "))] == [
        f"run {RUN}",
        f"tag {TAG.removeprefix('tag-')}",
    ]
    headings = [re.split(r" {2,}", line.strip()) for line in ran.out.splitlines() if "explained" in line]
    measured = ["explained", "gap", "held-out explained", "held-out error", "to previous", "size", "last used"]
    assert headings[0] == ["step", "kind", "k", "m", "p", *measured]
    assert headings[1] == ["step", "part", "kind", "k", "m", "p", *measured]
    found = rows(ran.out)
    assert [row[:10] for row in found[:3]] == [
        ["0", "eigen", "3", "5", "10", "0.9877", "-", "-", "0.125", "-"],
        ["20", "eigen", "2", "5", "10", "-", "-", "0.75", "-", "-"],
        ["100", "eigen", "3", "5", "10", "0.9", "1.5", "-", "-", "0.25"],
    ]
    assert [row[:2] for row in found[3:]] == [["0", "0-of-2"], ["0", "1-of-2"]]
    size = sum(path.stat().st_size for path in cache.path.glob("*.h5"))
    assert ran.out.splitlines()[-1] == f"5 projectors, {size / 1024:.3g} KiB"


def test_path_of_a_cache_is_the_same(mmfact, store, cache, monkeypatch):
    out = mmfact("projector", "inspect", "--store", store).out
    assert mmfact("projector", "inspect", cache.path).out == out
    monkeypatch.setenv("MMFACT_STORE", str(store))
    assert mmfact("projector", "inspect").out == out


def test_looking_is_no_use(mmfact, store, cache):
    """What is looked at would otherwise never be evicted."""
    before = {path: path.stat().st_mtime_ns for path in cache.path.iterdir()}
    mmfact("projector", "inspect", "--store", store)
    for path in cache.path.glob("*.h5"):
        assert mmfact("projector", "inspect", path).code == 0
    assert {path: path.stat().st_mtime_ns for path in cache.path.iterdir()} == before


def test_json_of_a_cache(mmfact, store, cache):
    content = mmfact("projector", "inspect", "--store", store, "--json").json
    assert content["path"] == str(cache.path)
    assert [(one["scope"], one["step"], one["part"]) for one in content["projectors"]] == [
        (RUN, 0, "0-of-1"),
        (RUN, 20, "0-of-1"),
        (RUN, 100, "0-of-1"),
        (TAG, 0, "0-of-2"),
        (TAG, 0, "1-of-2"),
    ]
    first = content["projectors"][0]
    assert first["error"] is None
    assert first["record"]["explained"] == 0.98765432
    assert first["parameters"] == "b" * 64
    assert first["size_bytes"] == (cache.path / first["file"]).stat().st_size


def test_one_projector(mmfact, cache):
    """What it depends on, its record and its spectrum, with the last vector and the first left out marked."""
    path = put(cache, key(step=7), explained=0.5, source="cache")
    ran = mmfact("projector", "inspect", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"run {RUN}, step 7\n")
    assert re.search(r"^vectors +3 of 10 elements, float32, eigen, part 0-of-1$", ran.out, re.M)
    assert re.search(rf"^public +5 examples, SHA-256 {'a' * 64}$", ran.out, re.M)
    assert re.search(rf"^parameters +SHA-256 {'b' * 64}$", ran.out, re.M)
    assert re.search(r"^explained +0.5$", ran.out, re.M)
    assert re.search(r"^source +cache$", ran.out, re.M)
    assert rows(ran.out.split("spectrum")[1]) == [
        ["1", "8", "1"],
        ["2", "4", "0.5"],
        ["3", "2", "0.25", "the last vector"],
        ["4", "1", "0.125", "the first left out"],
        ["5", "0.125", "0.0156"],
    ]
    content = mmfact("projector", "inspect", path, "--json").json
    assert content["values"] == {"eigenvalues": [8.0, 4.0, 2.0], "spectrum": SPECTRUM.tolist()}
    assert content["record"] == {"explained": 0.5, "source": "cache"}
    assert content["path"] == str(path)
    assert content["k"] == 3


@pytest.mark.parametrize(
    "values", [{}, {"spectrum": np.zeros(0)}, {"spectrum": np.zeros(3)}, {"spectrum": np.array(1.0)}]
)
def test_projector_without_a_spectrum(mmfact, cache, values):
    wanted = key(step=9)
    path = cache.put(wanted, [np.ones((3, 10), "f4")], values, {})
    assert mmfact("projector", "inspect", path).code == 0
    assert mmfact("projector", "inspect", path, "--json").code == 0


def test_a_record_cannot_steer_a_terminal(mmfact, store, cache):
    """Whoever wrote it: no control characters, no markup, no line breaks."""
    path = put(cache, key(step=3), explained="\x1b[2J[red]x\n\ud800", **{"\x1b]0;x\x07": 1})
    for target in (path, cache.path):
        ran = mmfact("projector", "inspect", target)
        assert ran.code == 0
        assert "\x1b" not in ran.out
        assert "\x07" not in ran.out
        assert "?[2J[red]x??" in ran.out


def damage(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_damaged_ones_are_listed_with_the_reason(mmfact, store, cache):
    """As `mmfact list`: shown, exit code 0; asked for by itself, as `mmfact inspect`: exit code 2."""
    path = put(cache, key(step=20, k=2))
    damage(path)
    ran = mmfact("projector", "inspect", "--store", store)
    assert (ran.code, ran.err) == (0, "")
    assert rows(ran.out)[1][:2] == ["20", "damaged"]
    assert path.name in ran.out.replace("\n", "")
    assert "its name says" in ran.out
    assert ran.out.splitlines()[-1].startswith("5 projectors")
    content = mmfact("projector", "inspect", "--store", store, "--json").json["projectors"][1]
    assert (content["step"], "its name says" in content["error"], "k" in content) == (20, True, False)
    ran = mmfact("projector", "inspect", path)
    assert ran.code == 2
    assert re.fullmatch(r"mmfact: .*cannot be trusted.*\n", ran.err)
    ran = mmfact("projector", "inspect", path, "--json")
    assert ran.json["exit_code"] == 2


@pytest.mark.parametrize("seconds", [300_000_000_000, -99_999_999_999])
def test_times_without_a_date(mmfact, small_disk, seconds):
    """Beyond year 9999 and before year 1, which a tmpfs keeps."""
    cache = ProjectorCache(small_disk)
    path = put(cache, key(step=3))
    os.utime(path, (seconds, seconds))
    assert path.stat().st_mtime == seconds
    for target in (path, cache.path):
        assert re.search(r" -$", mmfact("projector", "inspect", target).out, re.M)
        assert '"last_used": "-"' in mmfact("projector", "inspect", target, "--json").out


def test_inspect_takes_no_vectors_into_memory(mmfact, cache):
    wanted = key(step=8, k=20, p=200_000)
    path = put(cache, wanted)
    tracemalloc.start()
    try:
        assert mmfact("projector", "inspect", path).code == 0
        assert tracemalloc.get_traced_memory()[1] < 5e6  # of 16
    finally:
        tracemalloc.stop()


def test_pipe_and_device(process, tmp_path):
    """Refused at once, by a process of its own, which could be ended if it hung."""
    pipe, link = (tmp_path / f"{RUN}_{step}_0-of-1_{'0' * 64}.h5" for step in (1, 2))
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    for path in (pipe, link):
        ran = process("projector", "inspect", path)
        assert ran.code == 2
        assert re.fullmatch(r"mmfact: .*it is no regular file.*\n", ran.err)
    ran = process("projector", "inspect", tmp_path)
    assert (ran.code, ran.out) == (0, f"no projectors in {tmp_path}\n")


def test_nothing_there(mmfact, store, tmp_path):
    """No cache yet is no failure, as for `mmfact list`; one in the folder below is offered."""
    ran = mmfact("projector", "inspect", "--store", store)
    assert (ran.code, ran.out) == (0, f"no projectors in {store / 'projectors'}\n")
    assert mmfact("projector", "inspect", "--store", store, "--json").json["projectors"] == []
    put(ProjectorCache(store / "projectors"), key())
    assert f"there is a cache at {store / 'projectors'}" in mmfact("projector", "inspect", store).out


@pytest.mark.parametrize(
    ("path", "code"),
    [("missing", 2), ("missing/file.h5", 2), ("x" * 300, 2), ("", 2), ("notes.h5", 2)],
    ids=["missing", "below missing", "too long", "empty", "no projector"],
)
def test_bad_paths(mmfact, tmp_path, path, code):
    (tmp_path / "notes.h5").write_text("no HDF5")
    ran = mmfact("projector", "inspect", path)
    assert ran.code == code
    assert re.fullmatch(r"mmfact: .+\n", ran.err)
    assert ran.out == ""
    assert mmfact("projector", "inspect", path, "--json").json["exit_code"] == code


def test_store_that_is_a_file(mmfact, tmp_path):
    (tmp_path / "file").write_text("")
    ran = mmfact("projector", "inspect", "--store", tmp_path / "file")
    assert ran.code == 3
    assert re.fullmatch(r"mmfact: .+\n", ran.err)


def test_unknown_subcommand_and_help(mmfact):
    assert mmfact("projector", "show").code == 2
    assert "inspect" in mmfact("projector", "--help").out


def test_process(process, store, cache):
    """The installed script, without a terminal: one JSON object and nothing else."""
    ran = process("projector", "inspect", "--store", store, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert len(json.loads(ran.out)["projectors"]) == 5
