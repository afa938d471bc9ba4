"""`mmfact privacy`: figures, what they assume, --json, several epochs, the regret bound, and every bad input."""

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.cli.render_privacy import up
from mmfact.factorize.accounting import EXACT, PLD, RDP, RDP_FINE, ZCDP
from mmfact.factorize.privacy import gaussian_epsilon, gaussian_noise_multiplier

REGRET = ("--lipschitz", 1, "--distance", 2, "--learning-rate", 0.01, "--dimension", 100)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, mmfact):
    """A store with a prefix sum and a momentum workload."""
    store = tmp_path_factory.mktemp("shelf") / "store"
    for kind in ("prefix-sum", "momentum"):
        ran = mmfact("compile", "--workload", kind, "--n", 40, "--strategy", "dense", "--name", kind, "--store", store)
        assert ran.code == 0
    return store


@pytest.fixture
def privacy(mmfact, shelf):
    return lambda ref, *options: mmfact("privacy", ref, "--store", shelf, *options)


def test_from_epsilon(privacy):
    ran = privacy("momentum", "--epsilon", 2, "--delta", 1e-6)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert re.search(r"^noise multiplier +2\.23048 ", ran.out, re.M)
    assert re.search(rf"^epsilon at delta 1e-06 +2 +{re.escape(EXACT)}", ran.out, re.M)
    for accountant in (PLD, RDP_FINE, RDP, ZCDP):
        assert accountant in ran.out
    assert "GaussianDpEvent(noise_multiplier=2.2304" in ran.out
    assert "verdict: " in ran.out


def test_from_a_noise_multiplier(privacy):
    """The design's table, rounded up."""
    out = privacy("momentum", "--noise-multiplier", 0.341, "--delta", 1e-6).out
    for value, accountant in ((17.6477, EXACT), (18.688, RDP_FINE), (18.8528, RDP), (19.715, ZCDP)):
        assert re.search(rf"^epsilon at delta 1e-06 +{value} +{re.escape(accountant)}", out, re.M), accountant


def test_every_figure_says_what_it_assumes(privacy):
    """Each line of the table ends with a participation, that of the rival with its own; in full they stand below."""
    cases = (
        (1, "one step an example", "at most one step; nothing"),
        (3, "3 steps an example, 14 apart", "at most 3 steps, each 14 after the one before; nothing"),
    )
    for epochs, ours, full in cases:
        out = privacy("prefix-sum", "--epsilon", 1, "--delta", 1e-6, "--epochs", epochs, *REGRET).out
        table, below = out.split("for dp-accounting")
        rows = [line for line in table.splitlines() if re.match(r"(noise|epsilon|mu|rho|sens|RMSE|mean|ampl)", line)]
        assert len(rows) >= 12
        for row in rows:
            assert row.rstrip().endswith(f"Poisson, q = {epochs}/40" if row.startswith("amplified") else ours), row
        assert full in below
        assert re.search(rf"assumed of amplified DP-SGD: Poisson .* with probability {epochs} / 40", below)


def test_the_error_is_that_of_the_artifact_times_sigma(privacy, mmfact, shelf):
    """The RMSE that `compile` printed is the one of an iterate at sigma 1 and clip norm 1."""
    printed = mmfact("inspect", "momentum", "--store", shelf, "--json").json["certificate"]["rmse"]
    out = privacy("momentum", "--noise-multiplier", 2, "--delta", 1e-6).out
    shown, factor = re.search(
        r"^RMSE at clip norm 1 +(\S+)  of an iterate: sigma x the artifact's (\S+)", out, re.M
    ).groups()
    assert float(factor) == pytest.approx(printed, rel=1e-4)
    assert float(shown) == pytest.approx(2 * printed, rel=1e-5)


def test_json(privacy):
    ran = privacy("momentum", "--noise-multiplier", 1, "--delta", 1e-5, "--json")
    assert (ran.code, ran.err) == (0, "")
    content = ran.json
    assert content["ref"] == "momentum"
    assert len(content["digest"]) == 64
    assert content["epsilon"] == content["epsilons"][EXACT] == gaussian_epsilon(1.0, 1e-5)
    assert content["rival"]["sampling_probability"] == 1 / 40
    assert set(content["rival"]["noise_multipliers"]) == {PLD, RDP}
    assert content["regret_bound"] is None
    assert "at most one step" in content["participation"]
    assert len(content["assumptions"]) == 5


def test_several_epochs(privacy):
    """More noise for the same epsilon, by the ratio of sensitivities; and that the runtime is not for it."""
    one, three = (privacy("momentum", "--epsilon", 1, "--delta", 1e-6, "--epochs", k, "--json").json for k in (1, 3))
    assert one["noise_multiplier"] == gaussian_noise_multiplier(1, 1e-6)
    assert three["noise_multiplier"] / one["noise_multiplier"] == pytest.approx(three["sensitivity_ratio"], rel=1e-12)
    assert 3**0.5 <= three["sensitivity_ratio"] <= 3
    out = privacy("momentum", "--epsilon", 1, "--delta", 1e-6, "--epochs", 3).out
    assert "note: the runtime cannot issue noise for 3 passes" in out
    assert "note:" not in privacy("momentum", "--epsilon", 1, "--delta", 1e-6).out


def test_regret_bound(privacy):
    """Its sqrt(d): a hundred times the parameters cost ten times the noise's part."""
    bounds = [
        privacy("prefix-sum", "--epsilon", 1, "--delta", 1e-6, *REGRET[:-1], d, "--json").json["regret_bound"]
        for d in (100, 10000)
    ]
    assert bounds[1]["noise"] == pytest.approx(10 * bounds[0]["noise"], rel=1e-12)
    assert bounds[0]["distance"] == 2**2 / (2 * 0.01 * 40)
    out = privacy("prefix-sum", "--epsilon", 1, "--delta", 1e-6, *REGRET).out
    assert re.search(rf"^mean regret +{re.escape(up(bounds[0]['total']))} ", out, re.M)


SIGMA, DELTA = ("--noise-multiplier", 1), ("--delta", 1e-6)
BAD = [
    ((*SIGMA,), "--delta"),
    ((*DELTA,), "--epsilon"),
    ((*SIGMA, "--epsilon", 1, *DELTA), "not both"),
    (("--epsilon", 0, *DELTA), "epsilon"),
    (("--epsilon", -1, *DELTA), "epsilon"),
    (("--epsilon", "nan", *DELTA), "epsilon"),
    (("--epsilon", "inf", *DELTA), "epsilon"),
    (("--epsilon", "two", *DELTA), "epsilon"),
    (("--noise-multiplier", 0, *DELTA), "noise multiplier"),
    (("--noise-multiplier", 1e-300, *DELTA), "noise multiplier"),
    (("--noise-multiplier", "nan", *DELTA), "noise multiplier"),
    (("--noise-multiplier", "-inf", *DELTA), "noise multiplier"),
    ((*SIGMA, "--delta", 0), "delta"),
    ((*SIGMA, "--delta", 1), "delta"),
    ((*SIGMA, "--delta", "nan"), "delta"),
    ((*SIGMA, "--delta", 1e-40), "delta"),
    ((*SIGMA, *DELTA, "--epochs", 0), "epochs"),
    ((*SIGMA, *DELTA, "--epochs", -2), "epochs"),
    ((*SIGMA, *DELTA, "--epochs", 41), "epochs"),
    ((*SIGMA, *DELTA, "--epochs", 1.5), "--epochs"),
    (("--noise-multiplier", 0.0015, *DELTA, "--epochs", 40), "noise multiplier 0.0015 over 40 passes counts as"),
    ((*SIGMA, *DELTA, *REGRET[:6]), "--dimension"),
    ((*SIGMA, *DELTA, *REGRET[2:]), "--lipschitz"),
    ((*SIGMA, *DELTA, *REGRET[:-1], 0), "dimension"),
    ((*SIGMA, *DELTA, *REGRET[:-1], "9" * 400), "dimension"),
    ((*SIGMA, *DELTA, *REGRET, "--distance", "nan"), "distance"),
    ((*SIGMA, *DELTA, *REGRET, "--learning-rate", 0), "learning rate"),
]


@pytest.mark.parametrize(("options", "match"), BAD, ids=lambda value: " ".join(map(str, value))[-50:])
def test_bad_input(privacy, options, match):
    """Exit code 2, nothing on stdout, one message that names what was wrong; the same as an object with --json."""
    ran = privacy("prefix-sum", *options)
    assert (ran.code, ran.out) == (2, "")
    assert match in ran.err
    assert "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()[-1]) < 400
    assert match in privacy("prefix-sum", *options, "--json").json["error"]


def test_regret_of_another_workload(privacy):
    """An artifact that does not fit what was asked for."""
    ran = privacy("momentum", *SIGMA, *DELTA, *REGRET)
    assert (ran.code, ran.out) == (2, "")
    assert "prefix-sum" in ran.err
    assert "momentum" in ran.err


def test_unknown_and_damaged_artifacts(privacy, mmfact, damaged):
    assert privacy("nobody", *SIGMA, *DELTA).code == 2
    ran = mmfact("privacy", "ref", *SIGMA, *DELTA, "--store", damaged)
    assert (ran.code, ran.out) == (2, "")


def test_help(mmfact):
    ran = mmfact("privacy", "--help")
    assert ran.code == 0
    assert "Example: mmfact privacy" in ran.out
    assert re.search(r"^  privacy +\S", mmfact("--help").out, re.M)


@given(st.floats(1e-12, 1e12))
def test_shown_figures_are_rounded_up(value):
    """Six digits, never below, and by less than a unit of the sixth."""
    shown = Decimal(up(value))
    assert Decimal(repr(value)) <= shown <= Decimal(repr(value)) * Decimal("1.00001")


def test_round_numbers_stay_round():
    """0.1 is not shown as 0.100001, though the double lies above it."""
    assert [up(x) for x in (1.0, 0.1, 2.5, 1e-6, 17.647600001)] == ["1", "0.1", "2.5", "1e-06", "17.6477"]
