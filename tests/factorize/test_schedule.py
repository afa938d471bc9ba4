"""Learning-rate schedules: the numbers that the paper and the design define, and refusals that name the culprit."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.errors import WorkloadError

HORIZONS = (1, 2, 3, 4, 7, 8, 100, 257)


@pytest.mark.parametrize("n", HORIZONS)
def test_cooldown_is_the_papers(n):
    """The last n//4 steps fall from 1 to .05, both ends included; else every golden with a cooldown is off."""
    expected = [1.0] * (n - n // 4) + list(np.linspace(1, 0.05, n // 4))
    np.testing.assert_allclose(schedule.parse("cooldown", n).rates, expected, rtol=1e-15)


def test_cooldown_written_out():
    """The same by hand for n = 16: 12 ones, then 1, .6833.., .3666.., .05."""
    expected = [1] * 12 + [1, 1 - 0.95 / 3, 1 - 2 * 0.95 / 3, 0.05]
    np.testing.assert_allclose(schedule.parse("cooldown", 16).rates, expected, rtol=1e-14)


@pytest.mark.parametrize("n", HORIZONS)
def test_decay_is_the_papers(n):
    """.15 for the last quarter."""
    expected = [1.0] * (n - n // 4) + [0.15] * (n // 4)
    np.testing.assert_array_equal(schedule.parse("decay", n).rates, expected)


@pytest.mark.parametrize("n", HORIZONS)
def test_constant(n):
    """No schedule at all is a rate of 1 at each of the n steps."""
    np.testing.assert_array_equal(schedule.parse("constant", n).rates, np.ones(n))


def test_step_decay():
    """Times factor after each `every` steps, counted from step 0; by default a tenth every thousand."""
    np.testing.assert_allclose(
        schedule.parse("step:factor=0.5,every=3", 8).rates, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25], rtol=1e-15
    )
    rates = schedule.parse("step", 2001).rates
    np.testing.assert_allclose(rates[[0, 999, 1000, 1999, 2000]], [1, 1, 0.1, 0.1, 0.01], rtol=1e-15)


@pytest.mark.parametrize("n", HORIZONS)
def test_cosine(n):
    """Half a cosine, positive at the last step even though it heads for 0."""
    expected = [(1 + math.cos(math.pi * i / n)) / 2 for i in range(n)]
    np.testing.assert_allclose(schedule.parse("cosine", n).rates, expected, rtol=1e-9)
    floor = [0.2 + 0.8 * x for x in expected]
    np.testing.assert_allclose(schedule.parse("cosine:final=0.2", n).rates, floor, rtol=1e-13)


@pytest.mark.parametrize("n", HORIZONS)
def test_polynomial(n):
    """(1 - i/n)^power, scaled between 1 and final."""
    np.testing.assert_allclose(schedule.parse("polynomial", n).rates, [1 - i / n for i in range(n)], rtol=1e-15)
    expected = [0.1 + 0.9 * (1 - i / n) ** 2 for i in range(n)]
    np.testing.assert_allclose(schedule.parse("polynomial:power=2,final=0.1", n).rates, expected, rtol=1e-14)


def test_warmup_shape():
    """From `start` in equal steps to 1, which is reached right after the warm-up."""
    np.testing.assert_allclose(
        schedule.parse("warmup:fraction=0.5,start=0.2", 8).rates, [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1], rtol=1e-15
    )
    rates = schedule.parse("warmup", 100).rates
    np.testing.assert_allclose(rates[:11], np.linspace(0.01, 1, 11), rtol=1e-14)
    np.testing.assert_array_equal(rates[10:], 1)


@pytest.mark.parametrize("name", sorted(schedule.SHAPES))
def test_peak_multiplies_every_rate(name):
    """`peak` is the unit of the learning rate and changes nothing else."""
    base = schedule.parse(name, 40).rates
    np.testing.assert_allclose(schedule.parse(f"{name}:peak=0.125", 40).rates, 0.125 * base, rtol=1e-15)


@pytest.mark.parametrize("name", sorted(set(schedule.SHAPES) - {"warmup"}))
def test_warmup_key_comes_before_the_schedule(name):
    """warmup=k: steps 0..k-1 are 1/(k+1) .. k/(k+1), then the schedule over the other steps, so the peak is reached."""
    rates = schedule.parse(f"{name}:warmup=5", 40).rates
    np.testing.assert_allclose(rates[:5], np.arange(1, 6) / 6, rtol=1e-14)
    np.testing.assert_array_equal(rates[5:], schedule.parse(name, 35).rates)
    assert rates.max() == rates[5] == 1


@pytest.mark.parametrize("warmup", [4, 99])
def test_warmup_as_long_as_the_horizon_is_refused(warmup):
    """It would never reach the rates that the user asked for."""
    with pytest.raises(WorkloadError, match="warmup"):
        schedule.parse(f"constant:warmup={warmup}", 4)


def test_warmup_of_a_warmup_is_refused():
    """Two warm-ups in one schedule have no one meaning."""
    with pytest.raises(WorkloadError, match="warmup"):
        schedule.parse("warmup:warmup=3", 10)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("constant", "constant"),
        ("constant:", "constant"),
        ("constant:peak=1", "constant"),
        ("cooldown:final=0.05,fraction=.25", "cooldown"),
        ("cooldown:final=1e-1", "cooldown:final=0.1"),
        ("cooldown:peak=0.10,final=0.1,fraction=0.50", "cooldown:fraction=0.5,final=0.1,peak=0.1"),
        ("cooldown:fraction=.5,peak=1e-1,final=.1", "cooldown:fraction=0.5,final=0.1,peak=0.1"),
        ("step:every=10.0", "step:every=10"),
        ("decay:warmup=3.0", "decay:warmup=3"),
    ],
)
def test_canonical_names(text, canonical):
    """One name for one schedule, whatever order and spelling the user chose, or one workload gets two refs."""
    assert schedule.parse(text, 20).name == canonical


_KEYS = {
    "peak": st.floats(1e-6, 1e6),
    "warmup": st.integers(0, 3),
    "fraction": st.floats(0, 1),
    "final": st.floats(1e-9, 1),
    "start": st.floats(1e-9, 1),
    "factor": st.floats(0.5, 2),
    "every": st.integers(1, 1000),
    "power": st.floats(0.1, 4),
}


@st.composite
def spellings(draw):
    """A valid schedule text: any subset of the keys that the shape takes, in any order."""
    name = draw(st.sampled_from(sorted(schedule.SHAPES)))
    keys = [*schedule.SHAPES[name].defaults, "peak", *([] if name == "warmup" else ["warmup"])]
    chosen = draw(st.permutations(keys))[: draw(st.integers(0, len(keys)))]
    return name + (":" + ",".join(f"{key}={draw(_KEYS[key])!r}" for key in chosen) if chosen else "")


@given(text=spellings(), n=st.integers(4, 45))
@settings(deadline=None, max_examples=200)
def test_canonical_names_round_trip(text, n):
    """The canonical name gives back the very same rates and itself: an artifact's spec can be compiled again."""
    first = schedule.parse(text, n)
    again = schedule.parse(first.name, n)
    assert again.name == first.name
    np.testing.assert_array_equal(again.rates, first.rates)
    assert first.rates.shape == (n,)
    assert np.isfinite(first.rates).all()
    assert (first.rates > 0).all()


@given(
    text=st.one_of(
        st.text(max_size=30),
        st.builds(
            lambda name, rest: f"{name}:{rest}",
            st.sampled_from(sorted(schedule.SHAPES)),
            st.text(alphabet="fractionlspkewmuyv=,:.-+e0123456789 _infa", max_size=30),
        ),
        st.builds(
            lambda name, key, value: f"{name}:{key}={value}",
            st.sampled_from(sorted(schedule.SHAPES)),
            st.sampled_from(sorted(_KEYS)),
            st.one_of(st.floats().map(repr), st.integers().map(str), st.text(max_size=5)),
        ),
    ),
    n=st.integers(1, 40),
)
@settings(deadline=None, max_examples=400)
def test_arbitrary_text_gives_good_rates_or_a_workload_error(text, n):
    """Nothing that a user can type ends in a traceback, or in rates that are zero, infinite or too few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # factor=1e300 overflows on the way to its refusal
        try:
            found = schedule.parse(text, n)
        except WorkloadError:
            return
    assert found.rates.shape == (n,)
    assert np.isfinite(found.rates).all()
    assert (found.rates > 0).all()


@pytest.mark.parametrize("text", ["a" * 5000, "no-such-schedule", "", "\0", "Cooldown", "cool down", "."])
def test_words_that_are_neither_schedule_nor_file(text):
    """Also one too long to be a file's name."""
    with pytest.raises(WorkloadError):
        schedule.parse(text, 4)


def test_an_unknown_name_offers_both_ways_out():
    """The message lists the schedules and says that a file would do."""
    with pytest.raises(WorkloadError, match=r"'coldown'.*cooldown.*file"):
        schedule.parse("coldown", 4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cooldown:final=-0.1", "final"),
        ("cooldown:final=1.5", "final"),
        ("cooldown:final=nan", "final"),
        ("cooldown:final=", "final"),
        ("cooldown:final=a", "final"),
        ("cooldown:final", "final"),
        ("cooldown:fraction=-.1", "fraction"),
        ("cooldown:fraction=2", "fraction"),
        ("decay:fraction=inf", "fraction"),
        ("warmup:start=0", "start"),
        ("warmup:start=2", "start"),
        ("step:factor=0", "factor"),
        ("step:factor=-1", "factor"),
        ("step:every=0", "every"),
        ("step:every=2.5", "every"),
        ("step:every=inf", "every"),
        ("polynomial:power=0", "power"),
        ("constant:peak=0", "peak"),
        ("constant:peak=-1", "peak"),
        ("constant:peak=inf", "peak"),
        ("constant:peak=nan", "peak"),
        ("constant:warmup=-1", "warmup"),
        ("constant:warmup=1.5", "warmup"),
        ("constant:momentum=3", "momentum"),
        ("constant:final=0.1", "final"),
        ("constant:peak=1,peak=1", "peak"),
    ],
)
def test_bad_values_name_their_key(text, named):
    """A value that breaks its rule, a key that the schedule does not take, a key given twice."""
    with pytest.raises(WorkloadError, match=named):
        schedule.parse(text, 8)


@pytest.mark.parametrize(
    ("text", "n", "step"),
    [
        ("cooldown:final=0", 8, 7),
        ("decay:final=0", 8, 6),
        ("step:every=1", 100, 61),
        ("step:every=1", 55, 54),  # 1e-54 is a rate, but not beside 1
        ("constant:peak=1e61", 3, 0),
        ("constant:peak=1e-61", 3, 0),
    ],
)
def test_rates_that_vanish_name_the_step(text, n, step):
    """A rate of zero would make A singular: the first such step is named."""
    with pytest.raises(WorkloadError, match=rf"step {step}\b"):
        schedule.parse(text, n)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf, -math.inf, 1e-300, 1e300])
def test_given_rates_name_the_bad_step(bad):
    """The first bad rate of a list is named by its step and value."""
    with pytest.raises(WorkloadError, match=r"step 2\b"):
        schedule.from_rates([1, 1, bad, 1, bad], 5)


@pytest.mark.parametrize("rates", [[1, 2], [[1, 2, 3]], [], 1.0, [1, 2, 3, 4]])
def test_given_rates_of_another_shape(rates):
    """Too few, too many, a row instead of a list, one number for all."""
    with pytest.raises(WorkloadError, match="n = 3"):
        schedule.from_rates(rates, 3)


@pytest.mark.parametrize("rates", [["a", "b"], [[1], [1, 2]], [1 + 1j, 2], np.array([1 + 1j, 2]), [{}, 1]])
def test_given_rates_that_are_not_real_numbers(rates):
    """Words, ragged lists and complex numbers are refused as workload errors; no imaginary part is dropped."""
    with pytest.raises(WorkloadError):
        schedule.from_rates(rates, 2)


def test_rates_are_copied_and_read_only():
    """The caller's list may change afterwards; the schedule may not."""
    given_rates = np.array([0.1, 0.2])
    found = schedule.from_rates(given_rates, 2)
    given_rates[:] = 7
    np.testing.assert_array_equal(found.rates, [0.1, 0.2])
    with pytest.raises(ValueError, match="read-only"):
        found.rates[0] = 1


def test_names_of_given_rates():
    """All ones are the constant schedule; otherwise the name follows the values, and only them."""
    assert schedule.from_rates(np.ones(3), 3).name == "constant"
    name = schedule.from_rates([0.1, 0.2, 0.3], 3).name
    assert name.startswith("file-")
    assert schedule.from_rates(np.array([0.1, 0.2, 0.3]), 3).name == name
    assert schedule.from_rates([0.1, 0.2, np.nextafter(0.3, 1)], 3).name != name
    assert schedule.from_rates([0.2, 0.1, 0.3], 3).name != name


def test_file_with_comments_and_blank_lines(tmp_path):
    """# starts a comment anywhere in a line, blank lines do not count, numbers come in any notation."""
    path = tmp_path / "rates.txt"
    path.write_text("# a schedule\n\n1.0\n  0.5   # halved\n1e-2\r\n\t.25\n", encoding="utf-8")
    np.testing.assert_array_equal(schedule.parse(str(path), 4).rates, [1, 0.5, 0.01, 0.25])


def test_file_and_list_of_the_same_rates_share_a_name(tmp_path):
    """Where the file lies does not matter, what it says does."""
    rates = np.random.default_rng(0).uniform(0.1, 1, 5)
    path = tmp_path / "rates.txt"
    path.write_text("\n".join(map(repr, rates.tolist())), encoding="utf-8")
    found = schedule.parse(str(path), 5)
    np.testing.assert_array_equal(found.rates, rates)
    assert found.name == schedule.from_rates(rates, 5).name


@pytest.mark.parametrize("lines", [3, 5])
def test_file_with_the_wrong_number_of_lines(tmp_path, lines):
    """Both numbers are in the message."""
    path = tmp_path / "rates.txt"
    path.write_text("0.5\n" * lines, encoding="utf-8")
    with pytest.raises(WorkloadError, match=rf"\b{lines} rates.*n = 4"):
        schedule.parse(str(path), 4)


@pytest.mark.parametrize("word", ["half", "0.5 0.5", "0,5", "0.5;", "1/2"])
def test_file_line_that_is_not_a_number_is_named(tmp_path, word):
    """The line's number in the file, comments and blanks counted, and what stands there."""
    path = tmp_path / "rates.txt"
    path.write_text(f"# head\n\n1.0\n{word}\n1.0\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"line 4\b") as caught:
        schedule.parse(str(path), 3)
    assert word in str(caught.value)


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "1e400"])
def test_file_with_a_bad_rate_names_the_step(tmp_path, word):
    """Zero, negative, not finite, overflowing."""
    path = tmp_path / "rates.txt"
    path.write_text(f"1\n1\n{word}\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"step 2\b"):
        schedule.parse(str(path), 3)


def test_files_that_cannot_be_read(tmp_path):
    """A directory, bytes that are not UTF-8, a file that is not there: the path is in the message."""
    binary = tmp_path / "rates.npy"
    binary.write_bytes(b"\x93NUMPY\xff\xfe\x80")
    for path in (tmp_path, binary):
        with pytest.raises(WorkloadError, match="cannot be read") as caught:
            schedule.parse(str(path), 3)
        assert str(path) in str(caught.value)
    with pytest.raises(WorkloadError, match="cannot be read"):
        schedule.from_file(tmp_path / "missing.txt", 3)


def test_a_known_name_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    """A stray file called `cosine` in the working directory must not replace the schedule."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cosine").write_text("5\n5\n", encoding="utf-8")
    np.testing.assert_allclose(schedule.parse("cosine", 2).rates, [1, 0.5], rtol=1e-15)
