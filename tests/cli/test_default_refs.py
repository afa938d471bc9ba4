"""Default refs: every option that is not the default shows, and no two requests share one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule, workload
from mmfact.factorize.compiler import Options
from mmfact.factorize.errors import WorkloadError
from mmfact.store.store import check_ref

SHOWN = [
    (("prefix-sum",), "prefix-sum-n4"),
    (("sgd",), "sgd-n4"),
    (("momentum",), "momentum-n4"),
    (("momentum", "--beta", 0.9), "momentum-n4"),
    (("momentum", "--beta", 0.95), "momentum-n4-beta0.95"),
    (("momentum", "--beta", 0), "momentum-n4-beta0.0"),
    (("sgd", "--lr-schedule", "constant"), "sgd-n4"),
    (("sgd", "--lr-schedule", "cooldown"), "sgd-n4-cooldown"),
    (("sgd", "--lr-schedule", "cooldown:fraction=0.25,final=0.05"), "sgd-n4-cooldown"),
    (("sgd", "--lr-schedule", "cooldown:final=0.1,fraction=0.5"), "sgd-n4-cooldown-fraction0.5-final0.1"),
    (("sgd", "--weight-decay", 0.01), "sgd-n4-wd0.01"),
    (("sgd", "--weight-decay", 0.01, "--weight-decay-kind", "coupled"), "sgd-n4-wd0.01"),
    (("sgd", "--weight-decay", 0.01, "--weight-decay-kind", "decoupled"), "sgd-n4-wd0.01-decoupled"),
    (("sgd", "--ema", 0.9), "sgd-n4-ema0.9"),
    (("sgd", "--dtype", "float32"), "sgd-n4"),
    (("sgd", "--dtype", "float64"), "sgd-n4-float64"),
    (("sgd", "--strategy", "buffered"), "sgd-n4"),
    (("sgd", "--buffers", 1), "sgd-n4-buffers1"),
    (("sgd", "--buffers", 2, "--dtype", "float64"), "sgd-n4-buffers2-float64"),
    (("sgd", "--strategy", "dense"), "sgd-n4-dense"),
    (("sgd", "--strategy", "dense", "--dtype", "float64"), "sgd-n4-dense"),
    (("sgd", "--strategy", "dense", "--dtype", "float32"), "sgd-n4-dense-float32"),
    (("sgd", "--strategy", "banded-low-rank"), "sgd-n4-banded-low-rank"),
    (("sgd", "--strategy", "banded-low-rank", "--dtype", "float32"), "sgd-n4-banded-low-rank"),
    (("sgd", "--strategy", "banded-low-rank", "--dtype", "float64"), "sgd-n4-banded-low-rank-float64"),
    (("sgd", "--strategy", "banded-low-rank", "--bandwidth", 2), "sgd-n4-banded-low-rank-bandwidth2"),
    (("sgd", "--strategy", "banded-low-rank", "--rank", 2), "sgd-n4-banded-low-rank-rank2"),
    (
        ("sgd", "--strategy", "banded-low-rank", "--rank", 1, "--bandwidth", 2),
        "sgd-n4-banded-low-rank-bandwidth2-rank1",
    ),
    (("sgd", "--tolerance", 0.0001), "sgd-n4"),
    (("sgd", "--tolerance", 0.001), "sgd-n4-tolerance0.001"),
    (("sgd", "--method", "auto"), "sgd-n4"),
    (("sgd", "--method", "structured"), "sgd-n4-structured"),
    (("sgd", "--method", "fixed-point"), "sgd-n4-fixed-point"),
]


@pytest.mark.parametrize(("options", "ref"), SHOWN, ids=lambda part: " ".join(map(str, part)) if part else "")
def test_what_the_ref_says(mmfact, store, options, ref):
    """The ref is how a person finds the artifact again: every choice is in it, no default is."""
    kind, *rest = options
    ran = mmfact("compile", "--workload", kind, "--n", 4, *rest, "--json", "--store", store)
    assert ran.json["ref"] == ref
    assert (store / "refs" / f"{ref}.json").is_file()


def test_the_dense_strategy_and_the_dense_method_are_not_one_name(mmfact, store):
    """Two requests that a person may well make in one store; the second must not hear of "something else"."""
    refs = set()
    for options in (("--strategy", "dense"), ("--method", "dense"), ("--strategy", "dense", "--method", "dense")):
        ran = mmfact("compile", "--workload", "sgd", "--n", 4, *options, "--json", "--store", store)
        assert ran.code == 0, ran.err
        assert "dense" in ran.json["ref"]
        refs.add(ran.json["ref"])
    assert len(refs) == 3


def test_all_options_at_once(mmfact, store):
    ran = mmfact(
        *("compile", "--workload", "momentum", "--n", 6, "--beta", 0.5, "--lr-schedule", "decay:peak=0.25"),
        *("--weight-decay", 0.125, "--weight-decay-kind", "decoupled", "--ema", 0.75, "--dtype", "float64"),
        *("--tolerance", 0.01, "--method", "fixed-point", "--buffers", 2, "--json", "--store", store),
    )
    ref = ran.json["ref"]
    for part in ("beta0.5", "decay", "peak0.25", "wd0.125", "decoupled", "ema0.75", "buffers2", "float64"):
        assert part in ref.split("-")
    assert "tolerance0.01" in ref.split("-")
    assert ref.endswith("-fixed-point")


def test_contents_of_files_show(mmfact, store, tmp_path):
    """Two files of one name, two refs: a file is known by what it holds."""
    refs = set()
    for last in (0.5, 0.25):
        (tmp_path / "rates.txt").write_text(f"1\n1\n1\n{last}\n")
        arguments = ("--workload", "sgd", "--n", 4, "--lr-schedule", "rates.txt")
        refs.add(mmfact("compile", *arguments, "--json", "--store", store).json["ref"])
        np.save(tmp_path / "m.npy", np.tril(np.ones((3, 3))) * last)
        arguments = ("--workload", "custom", "--matrix", "m.npy")
        refs.add(mmfact("compile", *arguments, "--json", "--store", store).json["ref"])
    assert len(refs) == 4


def test_long_requests_have_a_ref_too(mmfact, store):
    """Every digit of every option is more than 200 characters; a request that is legal must not fail for its name."""
    digits = 0.12345678901234568
    command = (
        *("compile", "--workload", "momentum", "--n", 6, "--beta", digits),
        *("--lr-schedule", f"cooldown:fraction={digits},final={digits},peak={digits},warmup=1"),
        *("--weight-decay", digits / 1e6, "--weight-decay-kind", "decoupled", "--ema", digits, "--dtype", "float64"),
        *("--tolerance", digits / 1e3, "--method", "structured", "--buffers", 3, "--json", "--store", store),
    )
    first = mmfact(*command)
    assert first.code == 0, first.err
    again = mmfact(*command)
    assert again.json["already_there"] is True
    assert again.json["ref"] == first.json["ref"]
    other = mmfact(*[0.12345678901234566 if part == digits else part for part in command])
    assert other.json["ref"] != first.json["ref"]


def test_immense_parameters_have_a_ref_too(mmfact, store):
    """`every` may be any whole number: 1e250 is a schedule that never steps."""
    ran = mmfact("compile", "--workload", "sgd", "--n", 4, "--lr-schedule", "step:every=1e250", "--store", store)
    assert ran.code == 0, ran.err


# --- no two requests share one ---------------------------------------------------------------------

fractions = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.05, 0.15]) | st.floats(0, 0.999)
texts = st.sampled_from(["constant", "step", "cooldown", "decay", "cosine", "polynomial", "warmup"])
keys = st.sampled_from(["fraction", "final", "start", "factor", "every", "power", "peak", "warmup"])
values = st.sampled_from(["0.5", "1", "2", "0.1", "0.05", "1e-05", "10", "1.5", "0.25", "3"])
schedules = st.builds(
    lambda name, items: name + (":" + ",".join(f"{k}={v}" for k, v in items) if items else ""),
    texts,
    st.lists(st.tuples(keys, values), max_size=3, unique_by=lambda item: item[0]),
)


@st.composite
def requests(draw):
    """A workload and options, as the command line would build them."""
    n = draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["prefix-sum", "sgd", "momentum", "custom"]))
    try:
        if kind == "prefix-sum":
            w = workload.prefix_sum(n)
        elif kind == "custom":
            n = min(n, 3)
            entries = st.sampled_from([1.0, 0.5, 2.0])
            w = workload.custom(np.tril(np.reshape(draw(st.lists(entries, min_size=n * n, max_size=n * n)), (n, n))))
        else:
            from_file = draw(st.booleans())
            rates = (
                schedule.from_rates(draw(st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=n, max_size=n)), n)
                if from_file
                else schedule.named(draw(schedules), n)
            )
            decay = draw(st.sampled_from([0.0, 0.01, 0.1]) | st.floats(0, 0.2))
            chosen = {"learning_rates": rates, "weight_decay": decay, "ema": draw(fractions)}
            if decay:
                chosen["weight_decay_kind"] = draw(st.sampled_from(["coupled", "decoupled"]))
            w = workload.sgd(n, **chosen) if kind == "sgd" else workload.momentum(n, beta=draw(fractions), **chosen)
        strategy = draw(st.sampled_from(["buffered", "banded-low-rank", "dense"]))
        few = st.none() | st.integers(1, 3)
        shape = {"buffered": ["buffers"], "banded-low-rank": ["bandwidth", "rank"], "dense": []}[strategy]
        options = Options(
            strategy=strategy,
            **{name: draw(few) for name in shape},
            dtype=draw(st.sampled_from(["", "float32", "float64"])),
            tolerance=draw(st.sampled_from([1e-4, 1e-3, 0.5]) | st.floats(1e-12, 0.99)),
            method=draw(st.sampled_from(["auto", "structured", "dense", "fixed-point"])),
        )
    except WorkloadError:
        assume(False)
    return w, options


@given(a=requests(), b=requests())
@settings(
    deadline=None,
    derandomize=True,
    max_examples=400,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_different_requests_have_different_refs(a, b):
    """A shared ref would hand one person's artifact to the other, or refuse the second."""
    refs = [w.label() + options.label() for w, options in (a, b)]
    same = a[0].same_as(b[0]) and a[1] == b[1]
    assert (refs[0] == refs[1]) == same


@given(request_=requests())
@settings(
    deadline=None,
    derandomize=True,
    max_examples=300,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_default_refs_are_refs(request_):
    """Whatever the options, the name that they spell is one that the store takes."""
    w, options = request_
    check_ref(w.label() + options.label())


def test_numbers_of_numpy_spell_as_numbers():
    """beta from an np.linspace is a number like any other."""
    label = workload.momentum(4, beta=np.float64(0.95)).label() + Options(tolerance=np.float64(0.01)).label()
    assert label == "momentum-n4-beta0.95-tolerance0.01"


simple = st.sampled_from(["0.5", "0.25", "0.9", "0.125"])


@st.composite
def commands(draw):
    """Arguments of `mmfact compile` from small pools, so that collisions would be likely."""
    kind = draw(st.sampled_from(["prefix-sum", "sgd", "momentum"]))
    arguments = ["--workload", kind, "--n", str(draw(st.integers(1, 4)))]

    def maybe(option, values):
        if draw(st.booleans()):
            arguments.extend([option, draw(values)])

    if kind != "prefix-sum":
        maybe(
            "--lr-schedule",
            st.sampled_from(
                ["constant", "cooldown", "cooldown:final=0.5", "decay:final=0.5", "step:every=2,factor=0.5"]
            ),
        )
        maybe("--ema", simple)
        if draw(st.booleans()):
            arguments.extend(["--weight-decay", draw(simple)])
            maybe("--weight-decay-kind", st.sampled_from(["coupled", "decoupled"]))
    if kind == "momentum":
        maybe("--beta", simple)
    strategy = draw(st.sampled_from(["buffered", "banded-low-rank", "dense"]))
    if strategy != "buffered" or draw(st.booleans()):
        arguments.extend(["--strategy", strategy])
    n = int(arguments[3])
    if strategy == "buffered":
        maybe("--buffers", st.integers(1, max(1, n // 2)).map(str))
    elif strategy == "banded-low-rank" and n > 1:
        maybe("--bandwidth", st.integers(1, n - 1).map(str))
        maybe("--rank", st.just("1"))
    maybe("--dtype", st.sampled_from(["float32", "float64"]))
    maybe("--tolerance", st.sampled_from(["0.5", "0.001", "1e-05"]))
    maybe("--method", st.sampled_from(["auto", "structured", "dense", "fixed-point"]))
    return arguments


@given(arguments=commands())
@settings(deadline=None, derandomize=True, max_examples=80)
def test_requests_of_one_store_never_collide(mmfact, shared_store, arguments):
    """All into one store: 'names something else' would mean that two requests share a ref."""
    ran = mmfact("compile", *arguments, "--json", "--store", shared_store)
    assert ran.code in (0, 1), ran.err
    content = ran.json
    assert content["workload"]["kind"] == arguments[1]
    assert content["workload"]["n"] == int(arguments[3])
    again = mmfact("compile", *arguments, "--json", "--store", shared_store).json
    assert again["already_there"] is True
    assert again["digest"] == content["digest"]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    return tmp_path_factory.mktemp("shared") / "store"
