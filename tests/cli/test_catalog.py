"""list, inspect, export, import: what is found, what differs, and what comes back from outside."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.cli.catalog import Steps
from mmfact.factorize.workload import momentum, prefix_sum
from mmfact.store.store import ArtifactStore

DENSE = ("--strategy", "dense")

# How each was compiled, and when by its ref; `coarse` has the only excess above 1e-3, `damson` is damaged.
SHELF = {
    "apple": (("--workload", "momentum", "--n", 6, *DENSE), "2026-01-04"),
    "banana": (("--workload", "prefix-sum", "--n", 40), "2026-01-02"),
    "cherry": (("--workload", "sgd", "--n", 12, *DENSE), "2026-01-03"),
    "coarse": (("--workload", "prefix-sum", "--n", 64, "--buffers", 1, "--tolerance", 0.9), "2026-01-01"),
    "damson": (("--workload", "prefix-sum", "--n", 3, *DENSE), "2026-01-05"),
}
SOUND = [name for name in SHELF if name != "damson"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, mmfact):
    """A store of four artifacts and a damaged one; only read by the tests."""
    store = tmp_path_factory.mktemp("shelf") / "store"
    for name, (options, created) in SHELF.items():
        assert mmfact("compile", *options, "--name", name, "--store", store).code == 0
        ref = store / "refs" / f"{name}.json"
        entry = json.loads(ref.read_text())
        ref.chmod(0o644)
        ref.write_text(json.dumps({**entry, "created": f"{created}T00:00:00+00:00"}))
        if name == "damson":
            path = store / entry["artifact"]
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1])
    return store


@pytest.fixture
def listed(mmfact, shelf):
    """The refs that a listing shows, which must be the same in the table and in --json."""

    def run(*options):
        content = mmfact("list", *options, "--json", "--store", shelf).json
        table = mmfact("list", *options, "--store", shelf)
        assert table.code == 0
        refs = [row["ref"] for row in content["artifacts"]]
        assert [line.split()[0] for line in table.out.splitlines()[1:]] == refs
        return refs

    return run


# --- list -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), SOUND),
        (("--workload", "prefix-sum"), ["banana", "coarse"]),
        (("--workload", "custom"), []),
        (("--strategy", "dense"), ["apple", "cherry"]),
        (("--n", "12"), ["cherry"]),
        (("--n", "6:12"), ["apple", "cherry"]),
        (("--n", "13:"), ["banana", "coarse"]),
        (("--n", ":40"), ["apple", "banana", "cherry"]),
        (("--max-excess", "1e-3"), ["apple", "banana", "cherry"]),
        (("--max-excess", "1e-8"), ["apple", "cherry"]),
        (("--strategy", "dense", "--n", "7:", "--workload", "sgd"), ["cherry"]),
    ],
)
def test_filters(listed, options, expected):
    """What was asked for, in order of names, and the damaged one always."""
    assert sorted(listed(*options)) == sorted([*expected, "damson"])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("name", ["apple", "banana", "cherry", "coarse", "damson"]),
        ("created", ["coarse", "banana", "cherry", "apple", "damson"]),
        ("n", ["apple", "cherry", "banana", "coarse"]),
        ("excess", [None, None, "banana", "coarse"]),  # the dense ones are apart by rounding only
    ],
)
def test_orders(listed, order, expected):
    """Smallest first, or last with --reverse; where nobody knows, the damaged one comes at the end of both."""
    up, down = listed("--sort", order), listed("--sort", order, "--reverse")
    for found, wanted in ((up, expected), (down, expected[::-1])):
        assert all(want in (None, name) for name, want in zip(found, wanted, strict=False)), found
    if "damson" not in expected:
        assert (up[-1], down[-1]) == ("damson", "damson")


def test_order_of_sizes(mmfact, listed, shelf):
    """By the bytes of the files; those of the damaged one count too."""
    sizes = {ref: ArtifactStore(shelf).resolve(ref).stat().st_size for ref in SHELF}
    assert listed("--sort", "size") == sorted(sizes, key=sizes.get)


def test_an_empty_answer_is_an_answer(mmfact, store):
    assert mmfact("compile", "--workload", "sgd", "--n", 3, "--name", "ref", "--store", store).code == 0
    ran = mmfact("list", "--n", 4, "--store", store)
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(rf"none of the 1 artifacts in {store} is what was asked for; .*\n", ran.out)
    assert mmfact("list", "--n", 4, "--store", store, "--json").json["artifacts"] == []


@given(first=st.none() | st.integers(0, 10**17), last=st.none() | st.integers(0, 10**17), n=st.integers(0, 10**17))
def test_ranges_of_steps(first, last, n):
    """Both ends belong to a range, and an end may be left out, but not both."""
    text = f"{'' if first is None else first}:{'' if last is None else last}"
    wrong = (first is None and last is None) or (first is not None and last is not None and last < first)
    with pytest.raises(click.UsageError) if wrong else contextlib.nullcontext():
        found = Steps().convert(text, None, None)
        assert (n in found) == ((0 if first is None else first) <= n <= (sys.maxsize if last is None else last))
        assert all(end in found for end in (first, last) if end is not None)
    assert list(Steps().convert(str(n), None, None)) == [n]


@given(st.text(alphabet="0123456789:-+. eE_٣²\n", max_size=8))
def test_any_range(text):
    """A usage error, or a range of numbers that stand in the text."""
    try:
        found = Steps().convert(text, None, None)
    except click.UsageError:
        return
    assert re.fullmatch(r"[0-9]+(:[0-9]*)?|:[0-9]+", text)
    assert len(range(found.start, min(found.stop, found.start + 1))) == 1


# --- inspect ----------------------------------------------------------------------------------------------------


def test_inspect_says_what_made_it_when_and_where(mmfact, shelf):
    """Options, versions, solver, time of the ref, file and both digests."""
    artifact = ArtifactStore(shelf).load("banana")
    out = mmfact("inspect", "banana", "--store", shelf).out
    for line in (
        "created +2026-01-02T00:00:00",
        f"file digest +{artifact.path.stem.split('-')[1]}",
        f"digest +{artifact.digest}",
        f"format +schema version {artifact.schema_version}",
        f"file +{shelf}, ",
        "options .*strategy buffered.*tolerance 0.0001",
        f"versions .*numpy {re.escape(np.__version__)}",
        f"solver .*{artifact.certificate.iterations} iterations",
        "origin +compiled",
    ):
        assert re.search(f"^{line}", out, re.M), line
    content = mmfact("inspect", "banana", "--json", "--store", shelf).json
    assert (content["created"], content["schema_version"]) == ("2026-01-02T00:00:00+00:00", artifact.schema_version)
    by_digest = mmfact("inspect", artifact.digest, "--json", "--store", shelf).json
    assert by_digest["created"] is None  # a digest is not made at a time, a ref is
    assert by_digest["digest"] == artifact.digest
    assert "created" not in mmfact("inspect", artifact.path, "--store", shelf).out


def test_diff_of_equal_artifacts(mmfact, shelf):
    digest = ArtifactStore(shelf).load("apple").digest
    ran = mmfact("inspect", "--diff", "apple", digest, "--store", shelf)
    assert (ran.code, ran.err) == (0, "")
    assert digest in ran.out
    content = mmfact("inspect", "--diff", "apple", digest, "--store", shelf, "--json").json
    assert (content["equal"], content["fields"], content["arrays"]) == (True, [], [])
    assert [one["digest"] for one in content["artifacts"]] == [digest, digest]


def test_diff_says_what_differs_and_only_that(mmfact, store):
    """The same but for beta: exit code 1, like diff; rates are equal and say so."""
    for name, beta in (("a", 0.9), ("b", 0.8)):
        options = ("--workload", "momentum", "--n", 5, "--beta", beta, "--name", name, *DENSE)
        assert mmfact("compile", *options, "--store", store).code == 0
    ran = mmfact("inspect", "--diff", "a", "b", "--store", store)
    assert ran.code == 1
    assert ran.err == "mmfact: a and b differ\n"
    assert re.search(r"^workload\.beta +0\.9 +0\.8$", ran.out, re.M)
    assert re.search(
        r"^strategy\.packed: \d+ of 15 values differ, by a relative [\d.e-]+ at most, the first at", ran.out, re.M
    )
    assert re.search(r"^equal: learning_rates$", ran.out, re.M)
    assert not re.search(r"^(workload\.n|workload\.kind|strategy\.kind|provenance)", ran.out, re.M)
    ran = mmfact("inspect", "--diff", "a", "b", "--store", store, "--json")
    assert (ran.code, ran.json["equal"]) == (1, False)
    fields = {field["name"]: (field["first"], field["second"]) for field in ran.json["fields"]}
    assert fields["workload.beta"] == (0.9, 0.8)
    assert fields["certificate.loss"] == tuple(ArtifactStore(store).load(ref).certificate.loss for ref in "ab")
    assert {array["name"] for array in ran.json["arrays"]} == {"multipliers", "strategy.packed"}


@pytest.mark.parametrize(
    "arguments",
    [("--diff", "apple"), ("apple", "--diff", "apple", "cherry"), ("apple", "cherry"), ("--diff", "apple", "nothing")],
)
def test_inspect_of_too_few_or_too_many(mmfact, shelf, arguments):
    ran = mmfact("inspect", *arguments, "--store", shelf)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err


def test_diff_with_a_damaged_one(mmfact, shelf, tmp_path):
    """No answer, which is another exit code than one that says no."""
    shutil.copytree(shelf, tmp_path / "copy")
    ran = mmfact("inspect", "--diff", "apple", "damson", "--store", tmp_path / "copy")
    assert (ran.code, ran.out) == (2, "")
    assert "damaged" in ran.err


# --- out and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["apple", "banana", "cherry"])
def test_coefficients_out_and_back(mmfact, shelf, store, tmp_path, ref):
    """The same coefficients and certificate: only the origin tells the two apart."""
    ran = mmfact("export", ref, "-o", tmp_path / "a.npz", "--coefficients", "--store", shelf)
    assert (ran.code, ran.err) == (0, "")
    options = SHELF[ref][0][:4]
    assert mmfact("import", tmp_path / "a.npz", *options, "--name", "back", "--store", store).code == 0
    back, sent = ArtifactStore(store).load("back"), ArtifactStore(shelf).load(ref)
    assert back.certificate == sent.certificate
    for name, array in sent.strategy.coefficients().items():
        np.testing.assert_array_equal(back.strategy.coefficients()[name], array)
    found = mmfact("inspect", "--diff", ArtifactStore(shelf).resolve(ref), back.path, "--store", store, "--json").json
    names = {field["name"] for field in found["fields"]} - {
        "provenance.options.tolerance",
        "provenance.options.buffers",
    }
    assert names == {"provenance.origin"}
    assert found["arrays"] == []


def test_matrices_out_and_back(mmfact, shelf, store, tmp_path):
    """A, B and C make a dense strategy of the very C."""
    content = mmfact("export", "banana", "-o", tmp_path / "a.npz", "--store", shelf, "--json").json
    assert content["arrays"] == ["A", "B", "C", "about"]
    assert content["size_bytes"] == (tmp_path / "a.npz").stat().st_size
    assert content["digest"] == ArtifactStore(shelf).load("banana").digest
    ran = mmfact("import", tmp_path / "a.npz", *SHELF["banana"][0], "--name", "back", "--store", store, "--json")
    assert ran.json["rotation"] == "none"
    back, sent = ArtifactStore(store).load("back"), ArtifactStore(shelf).load("banana")
    np.testing.assert_array_equal(back.C, sent.C)
    assert back.certificate.sensitivity == pytest.approx(sent.certificate.sensitivity, rel=1e-9)
    assert back.certificate.excess == pytest.approx(sent.certificate.excess, abs=1e-9)
    ran = mmfact("import", tmp_path / "a.npz", "--workload", "sgd", "--n", 40, "--name", "other", "--store", store)
    assert ran.code == 2
    assert "'kind': 'prefix-sum'" in ran.err


def test_export_never_overwrites(mmfact, shelf, tmp_path):
    path = tmp_path / "a.npz"
    path.write_text("mine")
    for output in (path, tmp_path / "a.npy"):
        ran = mmfact("export", "apple", "-o", output, "--store", shelf)
        assert (ran.code, ran.out) == (2, "")
    assert path.read_text() == "mine"
    ran = mmfact("export", "apple", "-o", path, "--force", "--store", shelf)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{path}: A, B, C, about of apple, ")
    np.testing.assert_array_equal(np.load(path)["C"], ArtifactStore(shelf).load("apple").C)


# --- import -----------------------------------------------------------------------------------------------------


def square_root(n):
    """The square-root Toeplitz factor of the prefix sum: coefficients of (1 - x)^(-1/2)."""
    c = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, n))])
    return np.array([[c[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("form", ["npy", "csv", "npz", "pair"])
def test_import_of_a_known_factorization(mmfact, store, tmp_path, form):
    """S = C C: sensitivity and normF(B) are the same number, so the loss is its fourth power; to 1e-10."""
    n = 16
    C, path = square_root(n), tmp_path / f"c.{'npz' if form == 'pair' else form}"
    if form == "npy":
        np.save(path, C)
    elif form == "csv":
        np.savetxt(path, C, delimiter=",", fmt="%.17g")
    else:
        np.savez(path, **({"B": C, "C": C} if form == "pair" else {"mine": C}))
    options = ("--workload", "prefix-sum", "--n", n, "--name", "root", "--store", store)
    content = mmfact("import", path, *options, "--json").json
    norms = np.sqrt((C**2).sum())
    sensitivity = float(np.sqrt((C[:, 0] ** 2).sum()))
    assert content["certificate"]["sensitivity"] == pytest.approx(sensitivity, rel=1e-12)
    assert content["certificate"]["loss"] == pytest.approx(sensitivity**2 * norms**2, rel=1e-10)
    optimum = mmfact("compile", *options[:4], *DENSE, "--store", store, "--json").json["certificate"]
    assert content["certificate"]["lower_bound"] == pytest.approx(optimum["lower_bound"], rel=1e-9)
    assert content["certificate"]["excess"] == pytest.approx(sensitivity**2 * norms**2 / optimum["loss"] - 1, rel=1e-6)
    assert (content["rotation"], content["already_there"]) == ("none", False)
    assert content["strategy"]["dtype"] == "float64"
    assert content["provenance"]["origin"] == "given"
    assert mmfact("verify", "root", "--store", store).code == 0
    again = mmfact("import", path, *options)
    assert again.code == 0
    assert "already there" in again.out
    assert "rotated" not in again.out


def test_import_says_that_it_rotated(mmfact, store, tmp_path):
    """And that the sensitivity is that of the C that was given."""
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(16, 16)))[0]
    np.save(tmp_path / "c.npy", turn @ square_root(16))
    options = ("--workload", "prefix-sum", "--n", 16, "--store", store)
    ran = mmfact("import", tmp_path / "c.npy", *options, "--name", "turned")
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"C was not lower-triangular.*the sensitivity is unchanged", ran.out)
    np.save(tmp_path / "root.npy", square_root(16))
    plain = mmfact("import", tmp_path / "root.npy", *options, "--name", "plain", "--json").json
    turned = mmfact("inspect", "turned", "--store", store, "--json").json
    shown = mmfact("inspect", "--diff", "plain", "turned", "--store", store).out
    assert all(len(set(line.split()[1:])) == 2 for line in shown.splitlines() if line.startswith("certificate"))
    for figure in ("loss", "sensitivity", "max_error"):
        assert turned["certificate"][figure] == pytest.approx(plain["certificate"][figure], rel=1e-11)


def test_import_for_a_custom_workload(mmfact, store, tmp_path):
    A = np.tril(np.random.default_rng(3).uniform(0.2, 1, (5, 5))) + np.eye(5)
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "C.npy", np.eye(5))
    options = ("--workload", "custom", "--matrix", tmp_path / "A.npy", "--name", "mine", "--dtype", "float32")
    content = mmfact("import", tmp_path / "C.npy", *options, "--store", store, "--json").json
    assert content["certificate"]["loss"] == pytest.approx((A**2).sum(), rel=1e-12)  # independent noise
    assert content["strategy"]["dtype"] == "float32"


def test_import_with_every_option_of_the_workload(mmfact, store, tmp_path):
    """The options mean what they mean to compile."""
    n = 8
    np.save(tmp_path / "C.npy", np.eye(n))
    described = ("--workload", "momentum", "--n", n, "--beta", 0.8, "--weight-decay", 0.1, "--lr-schedule", "cosine")
    described += ("--weight-decay-kind", "decoupled", "--ema", 0.5)
    assert mmfact("import", tmp_path / "C.npy", *described, "--name", "mine", "--store", store).code == 0
    assert mmfact("compile", *described, "--name", "best", "--store", store).code == 0
    mine, best = (ArtifactStore(store).load(ref) for ref in ("mine", "best"))
    assert mine.workload.same_as(best.workload)
    assert mine.certificate.excess > best.certificate.excess


SQUARE = np.tri(3)
REFUSED = {
    "singular": (np.ones((3, 3)), "rank"),
    "wide": (np.ones((2, 3)), "at least as many rows"),
    "other n": (np.eye(4), "3 steps"),
    "nan": (np.where(SQUARE > 0, np.nan, 0), "finite"),
    "complex": (SQUARE + 0j, "real numbers"),
    "pickled": (np.array([[None]], object), "pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_refused(mmfact, store, tmp_path, name, as_json):
    C, message = REFUSED[name]
    np.save(tmp_path / "c.npy", C, allow_pickle=True)
    options = ("--workload", "prefix-sum", "--n", 3, "--name", "mine", "--store", store)
    ran = mmfact("import", tmp_path / "c.npy", *options, *as_json)
    assert (ran.code, ran.warnings) == (2, ())
    assert re.match(f"mmfact: .*{message}", ran.err)
    assert not store.exists()


def test_b_c_that_is_not_a_is_refused(mmfact, store, tmp_path):
    """Factors of momentum .9 are none of momentum .95."""
    A = momentum(6).dense()
    np.savez(tmp_path / "f.npz", B=A, C=np.eye(6))
    options = ("--workload", "momentum", "--n", 6, "--name", "mine", "--store", store)
    ran = mmfact("import", tmp_path / "f.npz", *options, "--beta", 0.95)
    assert ran.code == 2
    assert "B C is not the workload's A" in ran.err
    assert mmfact("import", tmp_path / "f.npz", *options).code == 0


def test_a_ref_that_names_something_else(mmfact, store, tmp_path):
    options = ("--workload", "prefix-sum", "--n", 3, "--name", "mine", "--store", store)
    for C, code in ((np.eye(3), 0), (SQUARE, 2), (np.eye(3), 0)):
        np.save(tmp_path / "c.npy", C)
        assert mmfact("import", tmp_path / "c.npy", *options).code == code
    np.testing.assert_array_equal(ArtifactStore(store).load("mine").C, np.eye(3))
    assert len(list(store.glob("*.h5"))) == 1
    assert mmfact("import", tmp_path / "c.npy", *options[:4], "--name", "../x", "--store", store).code == 2


def test_import_brings_back_what_was_lost(mmfact, store, tmp_path):
    np.save(tmp_path / "c.npy", np.eye(3))
    options = ("--workload", "prefix-sum", "--n", 3, "--name", "mine", "--store", store, "--json")
    for missing, there in ((False, False), (False, True), (True, False)):
        if missing:
            next(store.glob("*.h5")).unlink()
        ran = mmfact("import", tmp_path / "c.npy", *options)
        assert (ran.code, ran.json["already_there"]) == (0, there)
    np.testing.assert_array_equal(ArtifactStore(store).load("mine").C, np.eye(3))


def test_what_is_imported_can_be_streamed(mmfact, store, tmp_path):
    """The runtime takes it: a row of the noise of C = 2 I has the deviation asked for, within 4.9 of its own
    standard errors over 20,000 values (false alarm 1e-6).
    """
    from mmfact import NoiseKey, NoiseStream

    np.save(tmp_path / "c.npy", 2 * np.eye(4))  # twice the sensitivity and half the noise for each unit of it
    options = ("--workload", "prefix-sum", "--n", 4, "--name", "mine", "--store", store)
    assert mmfact("import", tmp_path / "c.npy", *options).code == 0
    artifact = ArtifactStore(store).load("mine")
    assert artifact.workload.same_as(prefix_sum(4))
    size = 20_000
    stream = NoiseStream(artifact, size, noise_multiplier=3, clip_norm=1, key=NoiseKey.insecure_from_seed(1), name="x")
    assert stream.next().std() == pytest.approx(3, abs=4.9 * 3 / np.sqrt(2 * size))


@pytest.mark.parametrize("command", ["list", "inspect", "export", "import"])
def test_help_has_an_example(mmfact, command):
    ran = mmfact(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert re.search(rf"Example: mmfact {command}\b", ran.out)
