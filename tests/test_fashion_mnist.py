"""The Fashion-MNIST example, on small made-up images, and shortly on the real ones."""

import gzip
import importlib.util
import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
for needed in ("dp_accounting", "matplotlib"):
    pytest.importorskip(needed)

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent  # noqa: E402
from dp_accounting.pld import PLDAccountant  # noqa: E402

from mmfact import ArtifactStore  # noqa: E402
from mmfact.factorize.privacy import gaussian_delta  # noqa: E402

SCRIPT = Path(__file__).parent.parent / "examples" / "fashion_mnist.py"
TRAIN, TEST, BATCH = 125, 40, 15  # so 8 steps, and 7 while tuning; 20 images are scored then


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("fashion_mnist", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fashion_mnist"] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    module.BATCH = BATCH
    yield module
    del sys.modules["fashion_mnist"]


def idx(array):
    """The IDX file of an array of bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write(folder, part, count, seed):
    """Noise with a bright square whose place is the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    pixels = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        row, column = 14 * (label // 5), 5 * (label % 5)
        image[row : row + 12, column : column + 6] += 190
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels))
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return pixels, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("images")
    write(where, "train", TRAIN, 1)
    write(where, "t10k", TEST, 2)
    return where


@pytest.fixture
def setting(example, folder, tmp_path):
    return example.Setting(folder, tmp_path / "store", insecure_noise_seed=7)


@pytest.fixture
def trained(example, monkeypatch):
    """Models as they were when their accuracy was asked for."""
    models, accuracy = [], example.accuracy

    def remember(model, images):
        models.append([parameter.detach().clone() for parameter in model.parameters()])
        return accuracy(model, images)

    monkeypatch.setattr(example, "accuracy", remember)
    return models


def gradient_by_backward(model, image, label):
    """One example at a time, by torch's own backward pass."""
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(image[None]), label[None]).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def clipped_by_loop(model, images, labels):
    """(sum of gradients clipped to 1, their norms before), one example at a time."""
    sums, norms = [torch.zeros_like(parameter) for parameter in model.parameters()], []
    for image, label in zip(images, labels, strict=True):
        gradient = gradient_by_backward(model, image, label)
        norms.append(float(torch.sqrt(sum((part**2).sum() for part in gradient))))
        for total, part in zip(sums, gradient, strict=True):
            total += part * min(1.0, 1.0 / norms[-1])
    return sums, norms


def agree(found, truth, **tolerance):
    for part, one in zip(found, truth, strict=True):
        torch.testing.assert_close(part, one, **tolerance)


def few_and_many_positions():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 5, stride=2, padding=1), torch.nn.Flatten(), torch.nn.Linear(2 * 13 * 13, 10)
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_a_clipped_gradient_is_that_of_a_single_backward_pass(example, own, scale):
    """One example at a time, at images so dark and so bright that none, some or all gradients are clipped."""
    torch.manual_seed(0)
    model = (example.network(3) if own else few_and_many_positions()).double()
    images, labels = scale * torch.randn(4, 1, 28, 28, dtype=torch.float64), torch.tensor([0, 3, 3, 9])
    for i in range(4):
        found = example.clipped_sums(model, images[i : i + 1], labels[i : i + 1])
        assert list(found) == [name for name, _ in model.named_parameters()]
        truth, _ = clipped_by_loop(model, images[i : i + 1], labels[i : i + 1])
        agree([part.double() for part in found.values()], truth, rtol=2e-5, atol=1e-9)


def test_no_clipped_gradient_is_longer_than_the_clip_norm(example):
    """In float32, at 200 gradients from about as long as the clip norm to many times."""
    torch.manual_seed(0)
    model, worst = example.network(1), 0.0
    for scale in torch.logspace(-1, 3, 200):
        found = example.clipped_sums(model, scale * torch.randn(1, 1, 28, 28), torch.tensor([3]))
        worst = max(worst, float(sum((part.double() ** 2).sum() for part in found.values())) ** 0.5)
    assert 1 - 2e-5 < worst <= 1


def test_sums_leave_out_what_is_not_finite_and_an_empty_batch_sums_to_zero(example):
    torch.manual_seed(0)
    model, images, labels = example.network(2), torch.randn(6, 1, 28, 28), torch.arange(6)
    images[1, 0, 3, 3], images[4, 0, 0, 0] = torch.nan, torch.inf
    good = [0, 2, 3, 5]
    truth, _ = clipped_by_loop(model, images[good], labels[good])
    agree(example.clipped_sums(model, images, labels).values(), truth, rtol=1e-4, atol=1e-6)
    for none in (images[:0], images[[1, 4]]):
        found = example.clipped_sums(model, none, labels[: len(none)])
        agree(found.values(), [torch.zeros_like(parameter) for parameter in model.parameters()])


def test_training_sums_divides_by_a_constant_and_follows_momentum_and_schedule(example, setting, trained):
    """Without noise, sampled by Poisson, against single backward passes and an optimizer written out here."""
    run = example.Run("amplified", "cooldown", None, 0.5, 4, tuning=False)
    result = example.train(run, example.NO_NOISE, setting)
    images, _ = example.data(setting.data, tuning=False)
    model, rates = example.network(4), [0.5] * 7 + [0.025]  # the last quarter, two steps, goes from 1 to 0.05
    buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
    seen = []
    for rate, batch in zip(rates, example.batches("amplified", 120, 4), strict=True):
        sums, norms = clipped_by_loop(model, *images.batch(batch))
        seen += norms
        with torch.no_grad():
            for parameter, buffer, total in zip(model.parameters(), buffers, sums, strict=True):
                buffer.mul_(0.9).add_(total / BATCH)
                parameter -= rate * buffer
    assert max(seen) > 1  # some were clipped
    assert result["steps"] == 8
    agree(trained[0], [parameter.detach() for parameter in model.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["amplified", "independent", "tree", "prefix", "momentum", "cooldown"])
def test_each_method_trains_with_the_stated_noise(example, setting, monkeypatch, method):
    """What reaches GradientNoise: the stated sigma, the method's strategy for these very steps, sum to mean once."""
    made, noise = [], example.GradientNoise
    monkeypatch.setattr(example, "GradientNoise", lambda *a, **k: made.append((a, k)) or noise(*a, **k))
    sigma = example.noise_multiplier(method, 2.0, 105)
    result = example.train(example.Run(method, "constant", 2.0, 0.1, 0, tuning=True), sigma, setting)
    (_, artifact), options = made[0]
    assert sigma == result["noise multiplier"] == options["noise_multiplier"]
    assert (options["clip_norm"], options["batch_size"], artifact.n, result["steps"]) == (1.0, BATCH, 7, 7)
    workload, C = artifact.workload, artifact.C
    if method == "prefix":
        assert workload.kind == "prefix-sum"
    else:
        assert (workload.kind, workload.beta) == ("momentum", 0.9)
    assert workload.schedule.startswith("cooldown") == (method == "cooldown")
    if method in ("independent", "amplified"):
        assert np.array_equal(C, np.eye(7))
    elif method == "tree":  # C'C counts the nodes above both of two leaves, of 4 that are above each
        i, gram = np.arange(7), C.T @ C
        assert 4 * gram / gram[0, 0] == pytest.approx(sum((i[:, None] >> k == i >> k) * 1.0 for k in range(4)))
    else:
        assert artifact.certificate.excess < 1e-4
    if method == "amplified":
        event = SelfComposedDpEvent(PoissonSampledDpEvent(BATCH / 105, GaussianDpEvent(sigma)), 7)
        assert PLDAccountant().compose(event).get_epsilon(1e-6) == pytest.approx(2.0, abs=1e-3)
    else:
        assert gaussian_delta(sigma, 2.0) == pytest.approx(1e-6, rel=1e-5)


def test_one_pass_uses_each_image_once_and_poisson_sampling_each_with_the_stated_probability(example):
    steps = list(example.batches("momentum", 105, 1))
    assert sorted(np.concatenate(steps)) == list(range(105))
    assert [len(step) for step in steps] == [BATCH] * 7
    sampled = list(example.batches("amplified", 6000, 1))
    assert len(sampled) == 400
    # 2,400,000 draws with probability 1/400: 6,000 in all, standard deviation 77.3; beyond 4.9 of it: 1e-6
    assert abs(sum(map(len, sampled)) - 6000) < 4.9 * 77.3
    assert len({len(step) for step in sampled}) > 1
    assert all(len(np.unique(step)) == len(step) for step in sampled)
    again = list(example.batches("amplified", 6000, 1))
    assert all(np.array_equal(a, b) for a, b in zip(sampled, again, strict=True))


def test_noise_is_fresh_at_each_run_and_repeats_only_under_an_insecure_seed(example, setting, trained, monkeypatch):
    keys, noise = [], example.GradientNoise
    monkeypatch.setattr(example, "GradientNoise", lambda *a, **k: keys.append(k["key"].id) or noise(*a, **k))
    run = example.Run("momentum", "constant", 1.0, 0.1, 0, tuning=True)
    fresh = example.Setting(setting.data, setting.store)
    for where in (setting, setting, fresh, fresh):
        example.train(run, 4.2, where)
    first, second, third, fourth = (torch.cat([part.flatten() for part in model]) for model in trained)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(third, fourth)
    assert len(set(keys)) == 3


def test_tuning_and_report_share_no_image_that_is_scored(example, folder):
    train, validation = example.data(folder, tuning=True)
    assert (len(train), len(validation)) == (105, 20)
    everything, test = example.data(folder, tuning=False)
    assert (len(everything), len(test)) == (120, TEST)  # whole batches
    known = {image.tobytes() for image in train.pixels}
    assert not any(image.tobytes() in known for image in validation.pixels)
    pixels, labels = train.batch(np.array([5]))
    assert torch.equal(pixels[0, 0], torch.from_numpy(train.pixels[5].astype(np.float32)) / 127.5 - 1)
    assert labels.tolist() == [train.labels[5]]


@pytest.mark.parametrize("peak", range(8))
def test_tuning_finds_the_best_rate_of_the_grid_and_stops_there(example, peak):
    rates, cell = [2.0**i for i in range(8)], example.Cell("tree", "constant", 1.0)
    tried = []

    class Known:
        def accuracies(self, runs):
            return [1 - abs(np.log2(run.rate) - peak) / 10 for run in runs]

    found = example.tune([cell], rates[::-1], [1000, 1001], Known(), tried.append)
    assert found == {cell: 2.0**peak}
    assert {run.rate for run in tried[-1]} == {2.0**i for i in range(min(peak - 1, 3), max(4, peak) + 2)} & set(rates)
    assert all(run.tuning and run.seed >= 1000 for run in itertools.chain(*tried))


def label(folder, labels):
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "t10k-labels-idx1-ubyte.gz").unlink(), "dataset-fashion-mnist"),
        (lambda d: (d / "train-images-idx3-ubyte").write_bytes(b""), "not a whole IDX file"),
        (lambda d: (d / "train-labels-idx1-ubyte.gz").write_bytes(b"no gzip"), "cannot be read"),
        (lambda d: write(d, "train", 14, 0), "less than a batch"),
        (lambda d: label(d, np.zeros(9, np.uint8)), "as many"),
        (lambda d: label(d, np.full(TEST, 10, np.uint8)), "0 to 9"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_used_are_named(example, tmp_path, spoil, message):
    write(tmp_path, "train", TRAIN, 1)
    write(tmp_path, "t10k", TEST, 2)
    spoil(tmp_path)
    with pytest.raises(example.ExampleError, match=message):
        example.data(tmp_path, tuning=False)


@given(st.binary(max_size=40), st.booleans())
def test_a_file_of_any_bytes_is_read_or_refused(example, tmp_path_factory, content, packed):
    path = tmp_path_factory.mktemp("idx") / ("labels.gz" if packed else "labels")
    path.write_bytes(content)
    try:
        found = example.read_idx(path.with_name("labels"), ())
    except example.ExampleError:
        return
    assert idx(found) == (gzip.decompress(content) if packed else content)


@given(st.lists(st.integers(0, 255), max_size=20), st.data())
def test_a_damaged_file_is_refused(example, tmp_path_factory, values, draw):
    whole = idx(np.array(values, np.uint8))
    path = tmp_path_factory.mktemp("idx") / "labels"
    path.write_bytes(whole)
    assert example.read_idx(path, ()).tolist() == values
    cut, place, bits = (draw.draw(st.integers(*ends)) for ends in ((0, len(whole) - 1), (0, 7), (1, 255)))
    altered = bytes([whole[place] ^ bits])  # a byte of the header
    for damaged in (whole[:cut], whole + altered, whole[:place] + altered + whole[place + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(example.ExampleError, match="not a whole IDX file"):
            example.read_idx(path, ())


@pytest.fixture
def command(example, folder, tmp_path, monkeypatch):
    """The command line in this process, runs in a thread."""
    monkeypatch.setattr(example, "ProcessPoolExecutor", lambda jobs, *args, **options: ThreadPoolExecutor(1))
    monkeypatch.chdir(tmp_path)

    def run(*options):
        small = ["--data", str(folder), "--epsilons", "2", "--rates", "0.4", "--seeds", "2", "--tuning-seeds", "1"]
        monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", *small, "--out", "out.json", *options])
        example.main()

    return run


def test_a_comparison_is_kept_drawn_printed_and_resumed(example, command, monkeypatch, capsys):
    trained, train = [], example.train
    monkeypatch.setattr(example, "train", lambda run, *rest: trained.append(run) or train(run, *rest))
    methods = ("--methods", "none", "cooldown", "independent")
    command(*methods, "--plot", "plot.svg")
    table = capsys.readouterr().out
    stored = json.loads(Path("out.json").read_text())
    assert len(trained) == len(stored["runs"]) == 5 * 3  # two methods x 2 schedules, and cooldown: tuned once, 2 seeds
    assert Path("plot.svg").read_text().count("mmfact, momentum + cooldown optimum") == 1
    assert not list(Path().glob("*.new"))
    reported = [
        run["accuracy"]
        for run in stored["runs"]
        if (run["method"], run["schedule"], run["tuning"]) == ("independent", "cooldown", False)
    ]
    assert f"{np.mean(reported):.1%} ± {abs(reported[0] - reported[1]) / 2**0.5:.1%} (0.4)" in table
    private: dict[tuple[str, str], list[float]] = {}
    for run in stored["runs"]:
        if run["method"] != "none" and not run["tuning"]:
            private.setdefault((run["method"], run["schedule"]), []).append(run["accuracy"])
    means = [float(np.mean(accuracies)) for accuracies in private.values()]
    assert table.count("**") == 2 * means.count(max(means))  # in bold: the best private one, or ones, at this epsilon

    stored["runs"] = stored["runs"][:-2]  # as if stopped before the last two
    Path("out.json").write_text(json.dumps(stored))
    trained.clear()
    command(*methods)
    assert len(trained) == 2
    trained.clear()
    command(*methods)
    assert not trained
    assert [line.count("|") for line in capsys.readouterr().out.splitlines()].count(4) >= 7


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--data", "nowhere"], 2, "no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in nowhere"),
        (["--out", "damaged.json"], 2, "holds no results of this script"),
        (["--out", "other.json"], 2, "choose another --out"),
        (["--out", "missing/out.json", "--methods", "none"], 3, "No such file or directory"),
        (["--epsilons", "-1"], 2, "must be positive and finite"),
        (["--epsilons", "much"], 2, "invalid"),
        (["--rates", "inf"], 2, "must be positive and finite"),
        (["--seeds", "0"], 2, "at least 1"),
        (["--plot", "plot.bmp"], 2, "must end in .svg"),
        (["--methods", "magic"], 2, "invalid choice"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(command, capsys, options, code, message):
    Path("damaged.json").write_text('{"conditions": {}, "runs": [{}]}')
    Path("other.json").write_text('{"conditions": {"batch": 1}, "runs": []}')
    with pytest.raises(SystemExit) as stopped:
        command(*options)
    assert stopped.value.code == code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in said
    assert said.startswith("fashion_mnist.py: ")


@pytest.mark.slow
def test_as_a_command_with_its_own_processes(tmp_path):
    write(tmp_path, "train", 600, 1)
    write(tmp_path, "t10k", TEST, 2)
    command = [
        sys.executable, str(SCRIPT), "--data", str(tmp_path), "--epsilons", "8", "--rates", "0.4", "--seeds", "1",
        "--tuning-seeds", "1", "--methods", "prefix", "--jobs", "1", "--out", "out.json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| a rate with cooldown | prefix |" in done.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 4


@pytest.mark.slow
def test_real_images_are_learned_in_one_pass(example, tmp_path, monkeypatch):
    """Half a minute at most; chance is 10 %. Loose bounds: some five points below what docs/fashion_mnist.md shows."""
    if not (Path(example.DEBIAN) / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    monkeypatch.setattr(example, "BATCH", 250)
    setting = example.Setting(Path(example.DEBIAN), tmp_path, insecure_noise_seed=1)
    sigma = example.noise_multiplier("momentum", 8.0, 60_000)
    private = example.train(example.Run("momentum", "constant", 8.0, 0.4, 0, tuning=False), sigma, setting)
    assert (private["steps"], private["accuracy"]) == (240, pytest.approx(0.83, abs=0.05))
    assert ArtifactStore(tmp_path).load("fashion-mnist-momentum-n240").certificate.excess < 1e-4
