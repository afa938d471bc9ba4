"""What does a step of correlated noise cost, beside independent noise, a rival, and what the machine can do at all?

For vectors of 1e6 and 4e6 parameters in float32, on one thread and on all that this process may use, the time of a
step of every strategy in both spaces, into a reused array (`next(out)`) and into a new one (`next()`), beside

 - torch's normals: torch.randn, torch.empty(d).normal_() and normal_() again on one tensor. They run on one thread
   whatever torch.set_num_threads says, so with more threads there is also a row of ours for them: one generator and one
   part of the tensor for each of as many Python threads,
 - numpy's SFC64 and PCG64, standard_normal(out=...), each thread with its own generator and part of the array,
 - jax.random.normal, jitted,
 - jax_privacy's streaming BLT with 4 buffers, jitted, its white noise drawn as its privatizer draws it.

The dense strategy's step grows with the step number, since it sums over all white rows so far; its whole horizon of 64
steps is timed, and what is printed is its first, middle and last steps and the growth. Then small vectors, where what
counts is the cost of a call; the first step of a fresh process; memory; saved states; and the journal.

All entries of a table take turns in every round, in an order drawn anew each round, since others may use the machine
meanwhile. Times are medians of the rounds; a ratio is the median of the rounds' ratios, and where a limit is set the
ratio of the medians is shown too. How many of its cores this process got is printed (processor seconds over wall
seconds of a computation that waits for nothing): where it was much less than all of them, a ratio against a rival that
runs on one thread is no measure. Processor time, of all threads together, depends less on others. One thread means a
process that is allowed one core.

The rivals are treated well. Compilation is off their clock. The BLT's step makes noise only, which is faster than its
privatizer's adding to a gradient; its state is donated, so that it is updated in place; its generator is jax's default,
which is the fastest on a CPU. Its coefficients, which do not matter here, are those of the library's closed form.

The machine's limits, in the same rounds: memory bandwidth by a triad in place, a = b + s a, whose traffic is all in
sight (no line is fetched only to be overwritten), keystream alone, normals alone from words in cache, and the
strategy's arithmetic alone on a block in cache. The roofline of a step is the first three, one after the other: bytes
that must move, divided by the bandwidth, plus keystream plus normals. Bytes that must move: what is kept between steps,
read once and written once where it changes, and the row, fetched and written. What fits a cache can be faster than
that.

    pip install 'mmfact[rivals]' torch
    python benchmarks/stream.py             # about three minutes
    python benchmarks/stream.py --quick     # a smoke test
    python benchmarks/stream.py --large     # 1e8 parameters, 6 buffers: needs 16 GiB with the rivals
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import get_num_threads, njit, prange, set_num_threads

from mmfact.factorize import machine
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.workload import prefix_sum
from mmfact.noise import source
from mmfact.noise.key import NoiseKey
from mmfact.noise.normal import normals
from mmfact.noise.stepping import stepping
from mmfact.noise.stream import NoiseStream
from mmfact.noise.workers import Workers
from mmfact.store.format import from_factorization
from mmfact.store.store import ArtifactStore

SIZES, SMALL, LARGE, QUICK = (1_000_000, 4_000_000), (1_000, 10_000, 100_000), 100_000_000, 100_000
N, BANDED, DENSE_N = 2048, {"bandwidth": 16, "rank": 4}, 64
JUDGED, BUFFERS, RIVAL_BUFFERS = 4_000_000, 6, 4
STEP_LIMIT, STEP_GOAL, RIVAL_TARGET = 1.5, 1.0, 8.0
RANDN, RIVAL = "torch.randn(d)", "jax_privacy BLT, 4 buffers"
NO_TORCH = "torch is not installed, its rows and the ratios against it are left out: pip install torch"
NO_JAX = "jax_privacy is not installed, its rows and jax's are left out: pip install 'mmfact[rivals]'"

IN_CACHE = 8192  # elements on which a strategy's arithmetic is measured
LARGE_MEMORY, LARGE_LEAST = 14, 7  # GiB, with jax_privacy's and without
PIECE = 32768  # elements of keystream or normals made at a time
TRIAD = 1 << 26  # elements of each of its arrays: 256 MiB
PAUSE = 2e-3  # seconds before each call: the threads of the call before may still wait in a loop for more work
SPAN = 8e-3  # seconds that one turn should last; short calls are repeated

Array = np.ndarray
Call = Callable[[], Any]


# --- taking turns ----------------------------------------------------------------------------------


class Times:
    """Wall and processor seconds of a call, for each entry and round."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.wall: dict[str, list[float]] = {name: [] for name in entries}
        self.process: dict[str, list[float]] = {name: [] for name in entries}

    def __contains__(self, name: str) -> bool:
        return name in self.wall

    def median(self, name: str) -> float:
        return statistics.median(self.wall[name])

    def ratio(self, name: str, other: str) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.wall[name], self.wall[other], strict=True))

    def processor(self, name: str) -> float:
        """Median processor seconds, of all threads together."""
        return statistics.median(self.process[name])

    def cores(self, name: str) -> float:
        """Processor seconds over wall seconds, in the median round."""
        return statistics.median(a / b for a, b in zip(self.process[name], self.wall[name], strict=True))


def take_turns(entries: dict[str, Call], rounds: int, most: int = 64) -> Times:
    """Time every entry once a round, repeated (at most `most` times) if it is short."""
    repeats = {}
    for name, call in entries.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = min(most, max(1, round(SPAN / (time.perf_counter() - start))))
    times, order, shuffle = Times(entries), list(entries), np.random.default_rng(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            call, repeat = entries[name], repeats[name]
            time.sleep(PAUSE)
            clocks = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                call()
            times.wall[name].append((time.perf_counter() - clocks[0]) / repeat)
            times.process[name].append((time.process_time() - clocks[1]) / repeat)
    return times


def verdict(value: float, limit: float) -> str:
    return f"{value / limit:.2f} of the limit" if value <= limit else f"ABOVE the limit, {value / limit:.2f} of it"


# --- ours ------------------------------------------------------------------------------------------


@functools.cache
def artifact(kind: str, number: int = 0) -> Any:
    if kind == "buffered":
        return from_factorization(compile(prefix_sum(N), Options(buffers=number)))
    if kind == "banded":
        return from_factorization(compile(prefix_sum(N // 4), Options(strategy="banded-low-rank", **BANDED)))
    return from_factorization(compile(prefix_sum(DENSE_N), Options(strategy="dense")))


def stream(made: Any, d: int, space: str = "gradient", **options: Any) -> NoiseStream:
    options = {"key": NoiseKey.ephemeral(), **options}
    return NoiseStream(made, d, noise_multiplier=1.0, clip_norm=1.0, space=space, **options)


STRATEGIES = (
    (f"buffered, {BUFFERS}", ("buffered", BUFFERS), "gradient"),
    (f"buffered, {RIVAL_BUFFERS}", ("buffered", RIVAL_BUFFERS), "gradient"),
    (f"buffered, {BUFFERS}, iterates", ("buffered", BUFFERS), "iterate"),
    ("banded 16 + 4, iterates", ("banded",), "iterate"),
    ("banded 16 + 4", ("banded",), "gradient"),
)


def bytes_moved(made: Any, space: str) -> int:
    """An element and step, at the least: what lies in memory is fetched once."""
    row = 2 * 4
    if made[0] == "buffered":
        return row + 2 * 4 * made[1] + (2 * 8 if space == "iterate" else 0)
    ring, sums, last = (BANDED["bandwidth"] + 1) * 4, 2 * 8 * BANDED["rank"], 2 * 8  # one value back and this one
    return row + ring + sums + (last if space == "gradient" else 0)


def ours(d: int, out: Array, strategies: Any, kept: dict[str, float]) -> dict[str, Call]:
    """Entries of the strategies; bytes an element that each keeps go into `kept`."""
    entries: dict[str, Call] = {}
    for name, made, space in strategies:
        running = stream(artifact(*made), d, space)
        entries[f"mmfact {name}: next(out)"] = functools.partial(running.next, out)
        if made[0] == "buffered" and space == "gradient":
            entries[f"mmfact {name}: next()"] = running.next
        kept[name] = sum(array.nbytes for array in running._parts[""].stepper.held) / d
    return entries


# --- rivals ----------------------------------------------------------------------------------------


def torch_entries(d: int, threads: int) -> dict[str, Call]:
    import torch

    torch.set_num_threads(threads)
    tensor = torch.empty(d)
    entries: dict[str, Call] = {
        RANDN: lambda: torch.randn(d),
        "torch.empty(d).normal_()": lambda: torch.empty(d).normal_(),
        "torch normal_() on one tensor": tensor.normal_,
    }
    if threads > 1 and d >= QUICK:
        parts = tensor.tensor_split(threads)
        generators = [torch.Generator().manual_seed(k) for k in range(threads)]
        fill = in_parts([functools.partial(p.normal_, generator=g) for p, g in zip(parts, generators, strict=True)])
        entries[f"torch normal_(), {threads} generators"] = fill
    return entries


def numpy_entries(d: int, threads: int, out: Array) -> dict[str, Call]:
    if d < QUICK:
        threads = 1  # a second one costs more than it does
    entries = {}
    for kind in (np.random.SFC64, np.random.PCG64):
        calls = []
        for k, part in enumerate(np.array_split(out, threads)):
            draw = np.random.Generator(kind(k)).standard_normal
            calls.append(functools.partial(draw, out=part, dtype=np.float32))
        entries[f"numpy {kind.__name__}"] = in_parts(calls)
    return entries


def in_parts(calls: list[Call]) -> Call:
    """All of the calls at once, each on a thread of its own, as our own blocks are."""
    workers = Workers(len(calls))
    return calls[0] if len(calls) == 1 else lambda: workers.run(lambda k: calls[k](), len(calls))


def jax_entries(d: int, *, rival: bool = True) -> dict[str, Call]:
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    draw = jax.jit(lambda key: jax.random.normal(key, (d,), jnp.float32))
    entries: dict[str, Call] = {"jax.random.normal, jitted": lambda: draw(key).block_until_ready()}
    if rival:
        entries[RIVAL] = blt_step(d)
    if rival and d < LARGE:
        entries["  through its privatizer, to a gradient"] = blt_step(d, privatizer=True)
    return entries


def blt_step(d: int, *, privatizer: bool = False) -> Call:
    """jax_privacy's noise: the streaming inverse of a BLT over its own white noise."""
    import jax
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization.buffered_toeplitz import BufferedToeplitz
    from jax_privacy.noise_addition import matrix_factorization_privatizer

    with jax.enable_x64():
        found = BufferedToeplitz.from_rational_approx_to_sqrt_x(RIVAL_BUFFERS, max_buf_decay=0.999)
        decay, scale = np.asarray(found.buf_decay), np.asarray(found.output_scale)
    matrix = BufferedToeplitz.build(decay, scale, dtype=jnp.float32).inverse_as_streaming_matrix()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        key, buffers = state
        key, fresh = jax.random.split(key)
        noise, buffers = matrix.multiply_next(jax.random.normal(fresh, (d,), jnp.float32), buffers)
        return noise, (key, buffers)

    state: Any = jax.random.key(0), matrix.init_multiply(jax.ShapeDtypeStruct((d,), jnp.float32))
    if privatizer:
        whole = matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=state[0])
        step = functools.partial(jax.jit(whole.update, donate_argnums=1), jnp.zeros(d, jnp.float32))

    def call() -> None:
        nonlocal state
        noise, state = step(state)
        jax.block_until_ready((noise, state))

    return call


# --- the machine's limits --------------------------------------------------------------------------


@njit(parallel=True)
def triad(a: Array, b: Array, s: float) -> None:
    for i in prange(len(a)):
        a[i] = b[i] + s * a[i]


def limit_entries(d: int, threads: int, strategies: Any) -> dict[str, Call]:
    set_num_threads(min(threads, get_num_threads()))
    a, b, half = np.ones(TRIAD, np.float32), np.ones(TRIAD, np.float32), np.float32(0.5)
    workers = Workers(threads)
    parts = [len(part) for part in np.array_split(np.empty(d, np.bool_), threads)]
    words = [np.random.default_rng(k).integers(0, 1 << 32, PIECE, np.uint32) for k in range(threads)]
    outs = [np.empty(PIECE, np.float32) for _ in range(threads)]

    def keystream(k: int) -> None:
        for first in range(0, parts[k], PIECE):
            source.keystream(bytes(32), 4 * first, 4 * min(PIECE, parts[k] - first))

    def normal(k: int) -> None:
        for first in range(0, parts[k], PIECE):
            count = min(PIECE, parts[k] - first)
            normals(words[k][:count], outs[k][:count])

    def arithmetic(steppers: list[Any], k: int) -> None:
        for first in range(0, parts[k], IN_CACHE):
            count = min(IN_CACHE, parts[k] - first)
            steppers[k]._take(N // 8, 0, 0, white[k][:count], outs[k][:count])

    white = [np.random.default_rng(k).standard_normal(IN_CACHE, np.float32) for k in range(threads)]
    entries: dict[str, Call] = {
        "triad": lambda: triad(a, b, half),
        "keystream alone": lambda: workers.run(keystream, threads),
        "normals alone": lambda: workers.run(normal, threads),
    }
    for name, made, space in strategies:
        way = stepping(artifact(*made), space)
        steppers = [way.start(1.0, IN_CACHE, np.dtype(np.float32)) for _ in range(threads)]
        work = functools.partial(arithmetic, steppers)
        entries[f"{name}: arithmetic"] = functools.partial(workers.run, work, threads)
    return entries


def roofline(times: Times, d: int, strategies: Any) -> None:
    bandwidth = 3 * 4 * TRIAD / times.median("triad")
    keystream, normal = times.median("keystream alone"), times.median("normals alone")
    print(
        f"limits: triad {bandwidth / 1e9:.1f} GB/s, keystream {4 * d / keystream / 1e9:.2f} GB/s, "
        f"normals {1e9 * normal / d:.2f} ns each"
    )
    print(f"{'ms':32} {'bytes':>6} {'memory':>8} {'keystream':>9} {'normals':>8} {'roofline':>8} {'arithmetic':>10} "
          f"{'measured':>8} {'over roofline':>13}")  # fmt: skip
    for name, made, space in strategies:
        moved = bytes_moved(made, space)
        memory = moved * d / bandwidth
        total, measured = memory + keystream + normal, times.median(f"mmfact {name}: next(out)")
        cells = (memory, keystream, normal, total, times.median(f"{name}: arithmetic"), measured)
        a, b, c, e, f, g = (1e3 * cell for cell in cells)
        print(f"{name:32} {moved:6d} {a:8.2f} {b:9.2f} {c:8.2f} {e:8.2f} {f:10.2f} {g:8.2f} {measured / total:13.2f}")


# --- tables ----------------------------------------------------------------------------------------


def rivals(d: int, threads: int, out: Array, *, rival: bool = True) -> dict[str, Call]:
    entries: dict[str, Call] = {}
    try:
        entries |= torch_entries(d, threads)
    except ImportError:
        print(NO_TORCH)
    entries |= numpy_entries(d, threads, out)
    try:
        entries |= jax_entries(d, rival=rival)
    except ImportError:
        print(NO_JAX)
    return entries


def table(times: Times, names: Iterable[str], d: int, kept: dict[str, float]) -> None:
    for name in names:
        seconds = times.median(name)
        cells = f"{1e3 * seconds:9.4g} {1e9 * seconds / d:8.3g}"
        cells += f" {times.ratio(name, RANDN):9.2f}" if RANDN in times else f" {'':9}"
        cells += f" {1e3 * times.processor(name):12.4g}"
        strategy = name.removeprefix("mmfact ").partition(":")[0]
        cells += f" {kept[strategy]:14.0f}" if strategy in kept else ""
        print(f"{name:41} {cells}", flush=True)


def heading(what: str, threads: int) -> None:
    what = f"{what}, {threads} thread{'s' * (threads > 1)}"
    print(f"\n{'':41} {'':9} {'ns per':>8} {'times':>9} {'processor ms,':>12} {'bytes/param':>13}")
    print(f"{what:41} {'ms':>9} {'param':>8} {'randn':>9} {'all threads':>12} {'kept':>14}")


def steps(d: int, threads: int, rounds: int) -> None:
    strategies = STRATEGIES[: 2 if d >= LARGE else None]
    rival = d < LARGE or free_memory() > LARGE_MEMORY
    if not rival:
        print(f"{RIVAL} is left out: with it this needs {LARGE_MEMORY} GiB")
    out, kept = np.empty(d, np.float32), dict[str, float]()
    shown = ours(d, out, strategies, kept) | rivals(d, threads, np.empty(d, np.float32), rival=rival)
    times = take_turns(shown | limit_entries(d, threads, strategies), rounds, 4)
    heading(f"d = {d}", threads)
    table(times, shown, d, kept)
    got = times.cores("normals alone")
    crowded = (
        "" if got > 0.9 * threads else ": OTHERS USED THE MACHINE, ratios against one-threaded rivals are no measure"
    )
    print(f"this process got {got:.2f} of {threads} cores{crowded}")
    roofline(times, d, strategies)
    if RANDN in times:
        for how in ("next(out)", "next()"):
            name = f"mmfact buffered, {BUFFERS}: {how}"
            ratio, a, b = times.ratio(name, RANDN), times.median(name), times.median(RANDN)
            judged = f", {verdict(ratio, STEP_LIMIT)}" if d == JUDGED and threads > 1 else ""
            print(
                f"{how}: median step {1e3 * a:.2f} ms, torch.randn {1e3 * b:.2f} ms: ratio {ratio:.2f} (of medians "
                f"{a / b:.2f}; limit {STEP_LIMIT:g}, goal {STEP_GOAL:g}{judged})"
            )
    if RIVAL in times:
        for how in ("next(out)", "next()"):
            name = f"mmfact buffered, {RIVAL_BUFFERS}: {how}"
            ratio = times.ratio(RIVAL, name)
            print(
                f"{RIVAL} / ours, {how}: {ratio:.1f} (of medians {times.median(RIVAL) / times.median(name):.1f}; "
                f"{'as asked' if ratio >= RIVAL_TARGET else 'NOT as asked'}: at least {RIVAL_TARGET:g})",
                flush=True,
            )


def dense(d: int, threads: int) -> None:
    """The whole horizon, torch.randn before every step."""
    running, out = stream(artifact("dense"), d), np.empty(d, np.float32)
    entries = {"ours": functools.partial(running.next, out)}
    with contextlib.suppress(ImportError):
        entries[RANDN] = torch_entries(d, threads)[RANDN]
    seconds = np.empty((DENSE_N, len(entries)))
    for step in range(DENSE_N):
        for k, call in enumerate(entries.values()):
            start = time.perf_counter()
            call()
            seconds[step, k] = time.perf_counter() - start
    places = {"first": 1, "middle": DENSE_N // 2 - 4, "last": DENSE_N - 8}
    begin, end = (float(np.median(seconds[places[what] : places[what] + 8, 0])) for what in ("first", "last"))
    slope = (end - begin) / (places["last"] - places["first"])
    print(f"dense, n = {DENSE_N}: a step takes {1e3 * slope:.3f} ms more than the one before")
    for what, first in places.items():
        some = seconds[first : first + 8]
        line = f"  {what} steps, {first} to {first + 7}: {1e3 * np.median(some[:, 0]):.2f} ms"
        if len(entries) > 1:
            line += f", {np.median(some[:, 0] / some[:, 1]):.2f} times torch.randn"
        print(f"{line}; {4 * (first + 8)} bytes/param kept", flush=True)


def small(d: int, threads: int, rounds: int) -> None:
    """Where a step is mostly the cost of calling it."""
    out, kept = np.empty(d, np.float32), dict[str, float]()
    shown = ours(d, out, STRATEGIES[:2], kept) | rivals(d, threads, np.empty(d, np.float32))
    times = take_turns(shown, rounds, (N // 2 - 8) // rounds)  # within the horizon: two entries share a stream
    heading(f"d = {d}", threads)
    table(times, shown, d, kept)


# --- each in a process of its own ------------------------------------------------------------------


def resident(what: str) -> int:
    """VmRSS now, or the most since `forget_peak`, VmHWM, in bytes."""
    return int(re.search(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def alone_start(store: str, d: int) -> dict[str, float]:
    """Seconds that each thing takes in a process that has done nothing yet but import this script."""
    clock = [time.perf_counter()]
    made = ArtifactStore(store).load("made")
    clock.append(time.perf_counter())
    running, out = stream(made, d), np.empty(d, np.float32)
    clock.append(time.perf_counter())
    for _ in range(8):
        running.next(out)
        clock.append(time.perf_counter())
    load, make, first, second, *later = np.diff(clock)
    return {"load": load, "make": make, "first": first, "second": second, "later": statistics.median(later)}


def alone_memory(store: str, d: int) -> dict[str, float]:
    """Bytes that a running stream and its row add to a process that has streamed before."""
    made = ArtifactStore(store).load("made")
    stream(made, 1000).next()
    before = resident("VmRSS")
    forget_peak()
    running, out = stream(made, d), np.empty(d, np.float32)
    for _ in range(3):
        running.next(out)
    return {"bytes": resident("VmHWM") - before}


def alone_rival(store: str, d: int) -> dict[str, float]:
    """The most that a process holds while jax_privacy's BLT steps, compilation forgotten."""
    call = blt_step(d)
    call()
    forget_peak()
    for _ in range(3):
        call()
    return {"bytes": resident("VmHWM")}


ALONE = {"start": alone_start, "memory": alone_memory, "rival": alone_rival}


def alone(what: str, store: str, d: int) -> dict[str, float]:
    arguments = [sys.executable, __file__, "--alone", what, store, str(d)]
    return json.loads(subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout)


def tables(sizes: tuple[int, ...], rounds: int) -> None:
    """A process of its own, so that jax too keeps to the cores of now."""
    numbers = [str(number) for number in (rounds, *sizes)]
    subprocess.run([sys.executable, __file__, "--tables", *numbers], check=True)


def do_tables(sizes: list[int], rounds: int) -> None:
    threads = machine.threads()
    for d in sizes:
        if d < QUICK or (d == QUICK and len(sizes) > 1):
            small(d, threads, rounds)
            continue
        steps(d, threads, rounds)
        if d < LARGE:
            dense(d, threads)


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    """Processes started meanwhile may use so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start_up(store: str, d: int, repeats: int) -> None:
    runs = [alone("start", store, d) for _ in range(repeats)]
    found = {name: 1e3 * statistics.median(run[name] for run in runs) for name in runs[0]}
    print(
        f"\nfresh process, d = {d}, {BUFFERS} buffers, numba's cache filled, medians of {repeats}: artifact loaded in "
        f"{found['load']:.0f} ms, stream made in {found['make']:.0f} ms, first step {found['first']:.0f} ms (kernels "
        f"are loaded, memory is touched), second {found['second']:.1f} ms, later {found['later']:.1f} ms"
    )


def memory(store: str, d: int, *, rival: bool) -> None:
    limit = (BUFFERS + 2) * 4
    found = alone("memory", store, d)["bytes"] / d
    print(
        f"memory, d = {d}, {BUFFERS} buffers: {found:.1f} bytes/param with the row (limit {limit}: "
        f"{verdict(found, limit)})",
        flush=True,
    )
    if rival:
        try:
            import jax_privacy  # noqa: F401
        except ImportError:
            return
        most = alone("rival", store, 2 * d)["bytes"] - alone("rival", store, d)["bytes"]
        asked = (RIVAL_BUFFERS + 2) * 4
        print(f"memory, {RIVAL}: {most / d:.1f} bytes/param, of which ours with as many buffers may have {asked}")


# --- states and the journal ------------------------------------------------------------------------


def states(d: int, repeats: int) -> None:
    made, key = artifact("buffered", BUFFERS), NoiseKey.ephemeral()
    running, out = stream(made, d, key=key), np.empty(d, np.float32)
    for _ in range(8):
        running.next(out)
    rows = []
    for _ in range(repeats):
        clock = [time.perf_counter()]
        state = running.state_dict()
        clock.append(time.perf_counter())
        restored = NoiseStream.restore(made, state, key=key, resume="unpublished")
        clock.append(time.perf_counter())
        plain = running.state_dict(buffers=False)
        clock.append(time.perf_counter())
        replayed = NoiseStream.restore(made, plain, key=key, resume="unpublished")
        replayed.next(out)
        clock.append(time.perf_counter())
        restored.close()
        rows.append(np.diff(clock))
    save, load, small, replay = np.median(rows, axis=0)
    size = sum(map(len, state["buffers"]))
    print(
        f"state, d = {d}, {BUFFERS} buffers, step {running.step}, medians of {repeats}: saved in {save:.3f} s, "
        f"{size / d:.2f} bytes/param, restored in {load:.3f} s; without buffers saved in {1e3 * small:.2f} ms, "
        f"restored and its next row made in {replay:.3f} s ({replay / (running.step + 1):.3f} s a step)",
        flush=True,
    )


def journal(d: int, rounds: int) -> None:
    made = artifact("buffered", BUFFERS)
    with tempfile.TemporaryDirectory() as folder:
        out = np.empty(d, np.float32)
        plain, noted = stream(made, d), stream(made, d, journal=Path(folder) / "journal")
        entries = {"without": functools.partial(plain.next, out), "with": functools.partial(noted.next, out)}
        times = take_turns(entries, rounds, (N - rounds - 8) // rounds)
        written = (Path(folder) / "journal").stat().st_size / noted.step
        rows = []
        for _ in range(rounds):
            noted.state_dict(buffers=False)
            clock = [time.perf_counter()]
            noted.commit()
            clock.append(time.perf_counter())
            noted.next(out)
            clock.append(time.perf_counter())
            rows.append(np.diff(clock))
        commit, first = 1e3 * np.median(rows, axis=0)
        print(
            f"journal, d = {d}: {1e6 * times.median('without'):.1f} us a row without, {1e6 * times.median('with'):.1f} "
            f"with (ratio {times.ratio('with', 'without'):.2f}); {commit:.2f} ms for a commit and {first:.2f} ms for "
            f"the row after it, which reach the disk; {written:.0f} bytes a row"
        )
        noted.close()


# --- all of it -------------------------------------------------------------------------------------


def free_memory() -> float:
    """GiB."""
    return int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) / 2**20  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help=f"a smoke test at d = {QUICK}")
    parser.add_argument("--large", action="store_true", help=f"only d = {LARGE}")
    parser.add_argument("--tables", nargs="+", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=3, metavar=("WHAT", "STORE", "D"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tables:
        rounds, *sizes = options.tables
        do_tables(sizes, rounds)
        return
    if options.alone:
        what, store, d = options.alone
        print(json.dumps(ALONE[what](store, int(d))))
        return
    rounds = min(5, options.rounds) if options.quick or options.large else options.rounds
    print(f"float32, medians of {rounds} rounds; this process may use {machine.threads()} cores", flush=True)
    with tempfile.TemporaryDirectory() as store:
        ArtifactStore(store).save(compile(prefix_sum(N), Options(buffers=BUFFERS)), "made")
        if options.quick:
            tables((QUICK,), rounds)
            start_up(store, QUICK, 1)
            memory(store, 10 * QUICK, rival=False)
            states(QUICK, 1)
            journal(SMALL[0], rounds)
        elif options.large:
            if free_memory() < LARGE_LEAST:
                raise SystemExit(f"this needs {LARGE_LEAST} GiB of free memory, {free_memory():.1f} are there")
            tables((LARGE,), rounds)
            memory(store, LARGE, rival=False)
        else:
            if machine.threads() > 1:
                with cores(1):
                    tables(SIZES, rounds)
            tables((*SIZES, *SMALL), rounds)
            start_up(store, SIZES[0], 5)
            memory(store, JUDGED, rival=True)
            states(JUDGED, 5)
            journal(SMALL[0], rounds)


if __name__ == "__main__":
    main()
