"""Every "Bad input" of the issue: one clear message, the right exit code, no traceback, nothing in the store."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mmfact.factorize import schedule


@pytest.fixture
def refused(mmfact, store, files):
    """Run `mmfact compile` and return the one message with which it must refuse."""

    def run(*arguments, code=2):
        ran = mmfact("compile", *arguments, "--store", store)
        assert ran.code == code, (ran.code, ran.err)
        assert ran.out == ""
        assert ran.err.startswith("mmfact: "), ran.err
        assert ran.err.count("\n") == 1, f"more than one message: {ran.err}"
        assert ran.warnings == ()
        assert files(store) == []
        as_json = mmfact("compile", *arguments, "--json", "--store", store)
        assert as_json.code == code
        assert as_json.json == {"error": ran.err.removeprefix("mmfact: ").rstrip("\n"), "exit_code": code}
        return ran.err

    return run


SGD = ("--workload", "sgd", "--n", 4)
MOMENTUM = ("--workload", "momentum", "--n", 4)
PREFIX = ("--workload", "prefix-sum", "--n", 4)
DENSE = ("--strategy", "dense")
LOW_RANK = ("--strategy", "banded-low-rank")

# --- n ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefix-sum", "sgd", "momentum"])
@pytest.mark.parametrize("n", [0, -1, -(10**12)])
def test_no_steps(refused, kind, n):
    assert f"n = {n} must be a whole number of steps, at least 1" in refused("--workload", kind, "--n", n)


@pytest.mark.parametrize("kind", ["prefix-sum", "sgd", "momentum"])
@pytest.mark.parametrize(
    ("n", "strategy"),
    [
        *[(n, form) for n in (8193, 100_000, 10**7) for form in (DENSE, LOW_RANK)],
        *[(n, form) for n in (10**9, 10**12) for form in ((), DENSE, LOW_RANK)],
        ((1 << 24) + 1, ()),
    ],
    ids=str,
)
def test_too_many_steps_are_refused_before_allocating(refused, monkeypatch, kind, n, strategy):
    """The message says how much memory it would take; nothing of size n is made."""
    for maker in ("ones", "zeros", "empty", "eye", "arange", "full"):
        monkeypatch.setattr(np, maker, lambda *a, **k: pytest.fail("something was allocated"))
    begun = time.process_time()
    message = refused("--workload", kind, "--n", n, *strategy)
    assert "GiB" in message
    assert str(n) in message
    assert time.process_time() - begun < 2


def test_memory_beyond_the_largest_horizon_is_not_nothing(refused):
    """A figure that explains a refusal must not be 0."""
    message = refused("--workload", "sgd", "--n", (1 << 24) + 1)
    assert " 0 GiB" not in message


@pytest.mark.parametrize(
    "options", [DENSE, LOW_RANK, ("--method", "dense"), (*DENSE, "--method", "dense")], ids=" ".join
)
def test_dense_memory_is_stated_correctly(refused, options):
    """8 n^2 bytes for one matrix: 74.5 GiB at n = 100,000."""
    assert "74.5 GiB" in refused("--workload", "momentum", "--n", 100_000, *options)


def test_too_large_for_the_dense_method_says_what_asked_for_it(refused):
    """Momentum has a banded inverse: what asks for matrices is --method dense, and another method is the way out."""
    assert "method" in refused("--workload", "momentum", "--n", 100_000, "--method", "dense")


@pytest.mark.parametrize("strategy", [(), DENSE, LOW_RANK], ids=str)
@pytest.mark.parametrize("digits", [20, 310, 400])
def test_absurdly_many_steps(refused, digits, strategy):
    """n beyond the range of floats must not break the message that refuses it."""
    assert "GiB" in refused("--workload", "prefix-sum", "--n", "1" + "0" * digits, *strategy)


@pytest.mark.parametrize("kind", ["prefix-sum", "sgd", "momentum"])
def test_steps_missing(refused, kind):
    assert "needs --n" in refused("--workload", kind)


# --- numbers ---------------------------------------------------------------------------------------

NUMBERS = [
    ("--beta", "1", "beta = 1.0 must be in [0, 1)"),
    ("--beta", "-0.1", "beta = -0.1 must be in [0, 1)"),
    ("--beta", "2", "beta = 2.0 must be in [0, 1)"),
    ("--beta", "nan", "beta = nan must be in [0, 1)"),
    ("--beta", "inf", "beta = inf must be in [0, 1)"),
    ("--weight-decay", "-1e-9", "weight decay -1e-09 must be finite and at least 0"),
    ("--weight-decay", "nan", "weight decay nan must be finite"),
    ("--weight-decay", "inf", "weight decay inf must be finite"),
    ("--weight-decay", "1", "at step 0 is 1 or more"),
    ("--ema", "1", "ema = 1.0 must be in [0, 1)"),
    ("--ema", "-0.5", "ema = -0.5 must be in [0, 1)"),
    ("--ema", "nan", "ema = nan must be in [0, 1)"),
    ("--tolerance", "0", "tolerance 0.0 must be in (0, 1)"),
    ("--tolerance", "1", "tolerance 1.0 must be in (0, 1)"),
    ("--tolerance", "2", "tolerance 2.0 must be in (0, 1)"),
    ("--tolerance", "-1e-4", "tolerance -0.0001 must be in (0, 1)"),
    ("--tolerance", "nan", "tolerance nan must be in (0, 1)"),
]


@pytest.mark.parametrize(("option", "value", "says"), NUMBERS, ids=[f"{o} {v}" for o, v, _ in NUMBERS])
def test_numbers_outside_their_range(refused, option, value, says):
    """The message names the value and the rule."""
    assert says in refused(*MOMENTUM, option, value)


# --- shapes of strategies --------------------------------------------------------------------------

SHAPES = [
    ((), "--buffers", 0, "buffers = 0 must be"),
    ((), "--buffers", -1, "buffers = -1 must be"),
    ((), "--buffers", 3, "buffers = 3 must be between 1 and 2"),
    ((), "--buffers", 10**30, "must be between 1 and 2"),
    (LOW_RANK, "--bandwidth", 0, "bandwidth = 0 must be"),
    (LOW_RANK, "--bandwidth", -2, "bandwidth = -2 must be"),
    (LOW_RANK, "--bandwidth", 5, "bandwidth = 5 is wider than n = 4 steps"),
    (LOW_RANK, "--bandwidth", 10**30, "is wider than n = 4 steps"),
    (LOW_RANK, "--rank", 0, "rank = 0 must be"),
    (LOW_RANK, "--rank", -1, "rank = -1 must be"),
    (LOW_RANK, "--rank", 4, "rank = 4 is above 3"),
    ((*LOW_RANK, "--bandwidth", 3), "--rank", 2, "rank = 2 is above 1"),
    ((*LOW_RANK, "--bandwidth", 4), "--rank", 1, "rank = 1 is above 0"),
    (DENSE, "--buffers", 1, "buffers does not apply to strategy dense; use it with buffered"),
    (LOW_RANK, "--buffers", 1, "buffers does not apply to strategy banded-low-rank; use it with buffered"),
    ((), "--bandwidth", 1, "bandwidth does not apply to strategy buffered; use it with banded-low-rank"),
    (DENSE, "--bandwidth", 1, "bandwidth does not apply to strategy dense; use it with banded-low-rank"),
    ((), "--rank", 1, "rank does not apply to strategy buffered; use it with banded-low-rank"),
    (DENSE, "--rank", 1, "rank does not apply to strategy dense; use it with banded-low-rank"),
    (DENSE, "--rank", 0, "rank"),
]


@pytest.mark.parametrize(("strategy", "option", "value", "says"), SHAPES, ids=str)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["compile", "dry run"])
def test_shapes_that_no_strategy_has(refused, monkeypatch, strategy, option, value, says, dry):
    """Refused before the solve, and by a dry run too."""
    monkeypatch.setattr("mmfact.factorize.optimum.solve", lambda *a, **k: pytest.fail("it solved first"))
    assert says in refused(*MOMENTUM, *strategy, option, value, *dry)


@pytest.mark.parametrize(("strategy", "option", "value", "says"), SHAPES, ids=str)
def test_shapes_that_no_strategy_has_are_not_compared_either(mmfact, monkeypatch, strategy, option, value, says):
    monkeypatch.setattr("mmfact.factorize.optimum.solve", lambda *a, **k: pytest.fail("it solved first"))
    ran = mmfact("compare", *MOMENTUM, *strategy, option, value)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize("value", ["x", "1.5", "nan", "", "0x2", "1e3"])
@pytest.mark.parametrize(
    ("strategy", "option"), [((), "--buffers"), (LOW_RANK, "--bandwidth"), (LOW_RANK, "--rank")], ids=str
)
def test_shapes_that_are_no_whole_number(mmfact, store, files, strategy, option, value):
    """click's own message."""
    ran = mmfact("compile", *MOMENTUM, *strategy, option, value, "--store", store)
    assert (ran.code, ran.out) == (2, "")
    assert option in ran.err
    assert "not a valid integer" in ran.err
    assert files(store) == []


@pytest.mark.parametrize("kind", ["prefix-sum", "custom"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_the_largest_shapes_compile(mmfact, store, tmp_path, kind, n):
    """What the messages above name as the most is allowed: compiled, stored, verified."""
    np.save(tmp_path / "m.npy", np.tril(np.random.default_rng(n).uniform(0.1, 1, (n, n))) + np.eye(n))
    base = ("--workload", "custom", "--matrix", "m.npy") if kind == "custom" else ("--workload", kind, "--n", n)
    shapes = [("--buffers", max(1, n // 2)), (*LOW_RANK, "--bandwidth", n)]
    if n > 1:
        shapes += [(*LOW_RANK, "--rank", n - 1), (*LOW_RANK, "--bandwidth", n - 1, "--rank", 1)]
    for shape in shapes:
        ran = mmfact("compile", *base, *shape, "--json", "--store", store)
        assert (ran.code, ran.err, ran.warnings) == (0, "", ()), shape
        assert mmfact("verify", ran.json["ref"], "--store", store).code == 0, shape


# --- options that do not apply ---------------------------------------------------------------------

MISPLACED = [
    (PREFIX, ("--beta", 0.9)),
    (PREFIX, ("--beta", 0)),
    (SGD, ("--beta", 0.9)),
    (PREFIX, ("--lr-schedule", "cooldown")),
    (PREFIX, ("--lr-schedule", "constant")),
    (PREFIX, ("--weight-decay", 0.1)),
    (PREFIX, ("--weight-decay", "nan")),
    (PREFIX, ("--weight-decay-kind", "coupled")),
    (PREFIX, ("--ema", 0.9)),
    (PREFIX, ("--matrix", "m.npy")),
    (SGD, ("--matrix", "m.npy")),
    (MOMENTUM, ("--matrix", "m.npy")),
    (("--workload", "custom", "--matrix", "m.npy"), ("--beta", 0.9)),
    (("--workload", "custom", "--matrix", "m.npy"), ("--lr-schedule", "cooldown")),
    (("--workload", "custom", "--matrix", "m.npy"), ("--weight-decay", 0.1)),
    (("--workload", "custom", "--matrix", "m.npy"), ("--ema", 0.1)),
]


@pytest.mark.parametrize(("workload", "option"), MISPLACED, ids=lambda part: " ".join(map(str, part)))
def test_options_that_would_be_ignored(refused, tmp_path, workload, option):
    """Somebody who gives --beta to a prefix sum gets a message, not an artifact without momentum."""
    np.save(tmp_path / "m.npy", np.tril(np.ones((4, 4))))
    message = refused(*workload, *option)
    assert option[0] in message
    assert "does not apply" in message


def test_decay_kind_without_decay(refused):
    assert "--weight-decay" in refused(*SGD, "--weight-decay-kind", "decoupled")


def test_custom_without_matrix(refused):
    assert "--matrix" in refused("--workload", "custom")
    assert "--matrix" in refused("--workload", "custom", "--n", 4)


def test_structured_method_for_a_matrix(refused, tmp_path):
    np.save(tmp_path / "m.npy", np.tril(np.ones((4, 4))))
    assert "dense" in refused("--workload", "custom", "--matrix", "m.npy", "--method", "structured")


# --- schedules -------------------------------------------------------------------------------------

SCHEDULES = [
    ("coolodwn", "not known"),
    ("cooldown:", None),
    ("cooldown:fracton=0.1", "fracton"),
    ("cooldown:fraction", "fraction"),
    ("cooldown:fraction=", "must be"),
    ("cooldown:fraction=2", "must be a number in [0, 1]"),
    ("cooldown:fraction=nan", "must be a number in [0, 1]"),
    ("cooldown:final=0,fraction=0.5", "step 3"),
    ("cooldown:final=.1,final=.2", "twice"),
    ("decay:final=0,fraction=0.5", "step 2"),
    ("constant:peak=0", "positive"),
    ("constant:peak=inf", "positive"),
    ("constant:peak=-1", "positive"),
    ("step:every=0", "at least 1"),
    ("step:every=1.5", "whole number"),
    ("step:factor=nan", "positive"),
    ("warmup:start=0", "(0, 1]"),
    ("cosine:warmup=-1", "0 or more"),
    ("polynomial:power=inf", "positive"),
]


@pytest.mark.parametrize(("text", "says"), SCHEDULES, ids=[text for text, _ in SCHEDULES])
def test_schedules_that_are_none(refused, mmfact, store, text, says):
    if says is None:
        assert mmfact("compile", *SGD, "--lr-schedule", text, "--store", store).code == 0
    else:
        assert says in refused(*SGD, "--lr-schedule", text)


@pytest.mark.parametrize("text", ["", "x" * 300, "y/" * 3000], ids=["empty", "long name", "long path"])
def test_schedules_with_impossible_names(refused, text):
    """Neither a name nor a file; an empty one is not taken for none."""
    refused(*SGD, f"--lr-schedule={text}")


@pytest.mark.parametrize("rate", ["0", "-0.5", "nan", "inf", "-inf", "0.0", "1e400", "1e-400", "-0"])
@pytest.mark.parametrize("step", [0, 2, 3])
def test_schedule_file_with_a_bad_rate(refused, tmp_path, rate, step):
    """The message names the step."""
    rates = ["1.0", "0.5", "0.5", "0.1"]
    rates[step] = rate
    (tmp_path / "rates.txt").write_text("\n".join(rates))
    message = refused(*SGD, "--lr-schedule", "rates.txt")
    assert f"step {step}" in message
    assert "positive and finite" in message


def test_a_bad_rate_is_shown_as_a_person_writes_it(refused):
    """Not as np.float64(0.0)."""
    assert "learning rate 0.0 at step 2" in refused(*SGD, "--lr-schedule", "decay:final=0,fraction=0.5")


@pytest.mark.parametrize("count", [0, 1, 3, 5, 400])
def test_schedule_file_of_the_wrong_length(refused, tmp_path, count):
    (tmp_path / "rates.txt").write_text("0.5\n" * count)
    message = refused(*SGD, "--lr-schedule", "rates.txt")
    assert f"has {count} rates but n = 4" in message


@pytest.mark.parametrize(
    "content",
    [b"1\n0.5 0.5\n1\n1\n", b"1,1,1,1\n", b"1\none\n1\n1\n", b"\xff\xfe\x00\x01" * 9, b"1\n1j\n1\n1\n"],
    ids=["two a line", "commas", "a word", "binary", "complex"],
)
def test_schedule_file_that_holds_something_else(refused, tmp_path, content):
    (tmp_path / "rates.txt").write_bytes(content)
    assert "rates.txt" in refused(*SGD, "--lr-schedule", "rates.txt")


def test_schedule_file_that_is_missing_or_a_directory(refused, tmp_path):
    """One message that offers both, names and files."""
    message = refused(*SGD, "--lr-schedule", "rates.txt")
    assert "rates.txt" in message
    assert "cooldown" in message
    assert "file" in message
    (tmp_path / "rates.txt").mkdir()
    assert "rates.txt" in refused(*SGD, "--lr-schedule", "rates.txt")


# --- matrices --------------------------------------------------------------------------------------

CUSTOM = ("--workload", "custom", "--matrix")
GOOD = np.tril(np.ones((4, 4)))


def changed(i, j, value):
    A = GOOD.copy()
    A[i, j] = value
    return A


MATRICES = {
    "not square": (np.ones((3, 4)), "(3, 4)"),
    "a vector": (np.ones(4), "(4,)"),
    "a number": (np.array(1.0), "()"),
    "a cube": (np.ones((2, 2, 2)), "(2, 2, 2)"),
    "empty": (np.ones((0, 0)), "(0, 0)"),
    "upper": (GOOD.T, "above the diagonal"),
    "almost lower": (changed(1, 3, 1e-300), "row 1, column 3"),
    "zero on the diagonal": (changed(2, 2, 0.0), "step 2"),
    "singular to working precision": (changed(3, 3, 1e-17), "singular"),
    "NaN": (changed(3, 1, np.nan), "row 3, column 1"),
    "NaN above": (changed(0, 3, np.nan), "row 0, column 3"),
    "infinite": (changed(3, 3, -np.inf), "row 3, column 3"),
    "complex": (GOOD.astype(complex), "complex"),
    "booleans": (GOOD.astype(bool), "bool"),
    "text": (GOOD.astype(str), "real numbers"),
    "times": (GOOD.astype("datetime64[s]"), "datetime"),
    "records": (np.zeros((4, 4), "f8,f8"), "real numbers"),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_matrix_that_is_no_workload(refused, tmp_path, name, suffix):
    matrix, says = MATRICES[name]
    path = tmp_path / f"m{suffix}"
    np.save(path, matrix) if suffix == ".npy" else np.savez(path, matrix)
    assert says in refused(*CUSTOM, path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_matrix_that_needs_pickle(refused, tmp_path, suffix):
    """Loading a pickle runs whatever its author liked."""
    matrix = np.empty((2, 2), object)
    path = tmp_path / f"m{suffix}"
    np.save(path, matrix, allow_pickle=True) if suffix == ".npy" else np.savez(path, matrix)
    assert "does not hold an array of numbers" in refused(*CUSTOM, path)


def test_archive_with_two_arrays_or_none(refused, tmp_path):
    np.savez(tmp_path / "two.npz", A=GOOD, B=GOOD)
    message = refused(*CUSTOM, tmp_path / "two.npz")
    assert "2 arrays (A, B)" in message
    np.savez(tmp_path / "none.npz")
    assert "0 arrays" in refused(*CUSTOM, tmp_path / "none.npz")


@pytest.mark.parametrize("name", ["m.txt", "m", "m.h5", "m.NPY", "m.csv.gz"])
def test_matrix_of_unknown_suffix(refused, tmp_path, name):
    (tmp_path / name).write_text("1\n")
    assert ".npy, .npz or .csv" in refused(*CUSTOM, name)


@pytest.mark.parametrize(
    "text",
    [
        "these are words\n",
        "1,2\n3\n",
        "1;0\n1;1\n",
        "1,\n1,1\n",
        "\xe9\xe8",
        "",
        "\n\n",
        "# only a comment\n",
        "1,0\n1,x",
    ],
    ids=["words", "ragged", "semicolons", "hole", "accents", "nothing", "blank", "comment", "one word"],
)
def test_csv_of_something_else(refused, tmp_path, text):
    """One message, not a warning of numpy's and then another."""
    (tmp_path / "m.csv").write_bytes(text.encode("latin1"))
    assert refused(*CUSTOM, "m.csv")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv"])
def test_matrix_file_that_is_missing_or_a_directory(refused, tmp_path, suffix):
    path = tmp_path / f"m{suffix}"
    assert "No such file" in refused(*CUSTOM, path)
    path.mkdir()
    assert str(path) in refused(*CUSTOM, path)


def test_steps_that_contradict_the_matrix(refused, tmp_path):
    np.save(tmp_path / "m.npy", GOOD)
    assert "contradicts the matrix, which is 4 x 4" in refused(*CUSTOM, "m.npy", "--n", 5)
    assert "contradicts" in refused(*CUSTOM, "m.npy", "--n", 0)


def test_matrix_that_is_too_large_is_refused_unread(refused, tmp_path):
    """A sparse file of 3 GiB with an innocent header."""
    with (tmp_path / "m.npy").open("wb") as file:
        file.truncate(3 << 30)
    assert "3.0 GiB" in refused(*CUSTOM, "m.npy")


# The largest excess of a sound answer: the default tolerance, or rounding where nothing is approximated.
STRATEGIES = [((), 1e-4), (("--dtype", "float64"), 1e-4), (DENSE, 1e-8), ((*LOW_RANK, "--dtype", "float64"), 1e-4)]


@pytest.mark.parametrize(("strategy", "excess"), STRATEGIES, ids=str)
@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-100, 1e-59, 1e-20, 1e20, 1e59, 1e100, 1e200, 1e300])
def test_extreme_units_are_refused_or_compiled(mmfact, store, files, tmp_path, scale, strategy, excess):
    """The unit of the gradients must not matter: either the answer is as good as at 1, or one clear refusal."""
    np.save(tmp_path / "m.npy", GOOD * scale)
    ran = mmfact("compile", *CUSTOM, "m.npy", *strategy, "--json", "--store", store)
    assert ran.warnings == ()
    assert ran.code == (0 if 1e-60 <= scale <= 1e60 else 2)
    if ran.code == 0:
        assert ran.json["certificate"]["excess"] <= excess
    else:
        assert ran.code == 2
        assert ran.err.startswith("mmfact: ")
        assert files(store) == []


@pytest.mark.parametrize("peak", [schedule.SMALLEST_RATE, 1e-20, 1e-9, 1e9, 1e20, schedule.LARGEST_RATE])
@pytest.mark.parametrize("kind", ["sgd", "momentum"])
@pytest.mark.parametrize(
    ("strategy", "excess"), [((), 1e-4), (DENSE, 1e-8), ((*LOW_RANK, "--dtype", "float64"), 1e-4)], ids=str
)
def test_extreme_rates_within_the_limits(mmfact, store, kind, peak, strategy, excess):
    """Scaling eta by a constant leaves C unchanged; every rate that is not refused must compile as well as 1 does."""
    command = ("compile", "--workload", kind, "--n", 20, *strategy, "--json", "--store", store)
    ran = mmfact(*command, "--lr-schedule", f"constant:peak={peak}")
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert ran.json["certificate"]["excess"] <= excess
    assert abs(ran.json["certificate"]["excess"] - mmfact(*command).json["certificate"]["excess"]) <= 1e-6


@pytest.mark.parametrize("peak", [schedule.SMALLEST_RATE, schedule.LARGEST_RATE])
def test_decoders_that_float32_cannot_hold(refused, peak):
    """This strategy stores iterate-space numbers, whose unit is the learning rate's: refused, with the way out."""
    assert "float64" in refused(*MOMENTUM, *LOW_RANK, "--bandwidth", 2, "--lr-schedule", f"constant:peak={peak}")


TINY = [
    ("momentum", "--beta", 1e-9),
    ("momentum", "--beta", 1e-20),
    ("momentum", "--beta", 5e-324),
    ("sgd", "--ema", 1e-20),
    ("sgd", "--ema", 1e-160),
    ("sgd", "--weight-decay", 1e-20),
    ("sgd", "--weight-decay", 1e-320),
]


@pytest.mark.parametrize("option", TINY, ids=lambda option: " ".join(map(str, option)))
def test_parameters_that_are_nearly_nothing(mmfact, store, option):
    """Within their range, so they compile, as what they are in effect: prefix sums."""
    kind, *rest = option
    ran = mmfact("compile", "--workload", kind, "--n", 20, *rest, "--strategy", "dense", "--json", "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    prefix = mmfact("compile", "--workload", "prefix-sum", "--n", 20, "--strategy", "dense", "--json", "--store", store)
    loss = prefix.json["certificate"]["loss"]
    assert ran.json["certificate"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_rates_of_many_decades_go_the_dense_way_by_themselves(mmfact, store):
    """--method auto must not tell the user to give --method dense: that is what auto is for (design.md, 4)."""
    rates = ("--lr-schedule", "step:factor=1e-3,every=4")
    ran = mmfact("compile", "--workload", "sgd", "--n", 40, *rates, "--json", "--store", store)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["certificate"]["fell_back"] is True


@pytest.mark.parametrize("peak", [1e-300, 1e-61, 1e61, 1e300])
def test_rates_beyond_the_limits(refused, peak):
    assert "step 0" in refused(*SGD, "--lr-schedule", f"constant:peak={peak}")


# --- the reference ---------------------------------------------------------------------------------


def test_reference_beyond_its_size(mmfact, store):
    assert mmfact("compile", "--workload", "sgd", "--n", 65, "--store", store).code == 0
    ran = mmfact("verify", "sgd-n65", "--reference", "--store", store)
    assert ran.code == 2
    assert ran.out == ""
    assert "n = 65 is too large" in ran.err
    assert "n <= 64" in ran.err


@pytest.mark.parametrize("name", ["adam", "AdamW"])
def test_an_optimizer_that_is_no_workload_is_told_which_one_serves(mmfact, store, files, name):
    """Adam is compiled for as momentum; another unknown word has the list of workloads."""
    ran = mmfact("compile", "--workload", name, "--n", 4, "--store", store)
    assert (ran.code, ran.out, files(store)) == (2, "", [])
    assert "for Adam use momentum with --beta at its first beta" in ran.err
    assert "'momentum'" in mmfact("compile", "--workload", "lion", "--n", 4, "--store", store).err
