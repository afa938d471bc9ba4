"""Ctrl-C while a strategy is built, streams that are closed, progress on a terminal: real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from mmfact.cli import main as cli_main
from mmfact.cli.main import main


@pytest.mark.parametrize(
    ("options", "until"),
    [
        (("--n", "20000"), rb"strategy, \d"),
        (("--n", "4000", "--dtype", "float64", "--tolerance", "1e-11"), rb"\d+ buffers"),
        (("--n", "1024", "--strategy", "banded-low-rank"), rb"bandwidth \d+, rank"),
    ],
    ids=["factor", "buffers", "banded-low-rank"],
)
def test_interrupt_while_the_strategy_is_built(script, store, files, options, until, terminal):
    """Exit 130 within seconds, one message, nothing in the store."""
    begun = time.monotonic()
    command = (script, "compile", "--workload", "prefix-sum", *options, "--store", store)
    code, out, text = terminal(command, until)
    assert "Traceback" not in text, text[-400:]
    assert (code, out) == (130, "")
    assert "mmfact: interrupted; no partial file was left" in text
    assert files(store) == []
    assert time.monotonic() - begun < 90


def test_interrupt_of_a_comparison(script, store, terminal):
    command = (script, "compare", "--workload", "prefix-sum", "--n", 4000)
    code, out, text = terminal(command, rb"optimal-toeplitz")
    assert "Traceback" not in text, text[-400:]
    assert (code, out) == (130, "")
    assert "mmfact: interrupted" in text


# Compiled code does not look at signals, so an interrupt is pending when a kernel has done its work. The first call of
# a kernel in a process then runs a little Python of numba's to make the arrays that it returns: there the interrupt is
# raised, and numba goes on without looking (SystemError: "returned a result with an exception set").
DURING = """
import os, signal, sys, threading
import numba
from mmfact.cli.main import main
import mmfact.factorize.{module} as module
real = module.{name}
def interrupted(*arguments):
    real.compile(tuple(numba.typeof(argument) for argument in arguments))  # loaded, not yet called
    threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGINT)).start()
    return real(*arguments)
module.{name} = interrupted
main(["compile", "--workload", "prefix-sum", "--n", "4000", "--store", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("construct.buffered", "_balance"),
        ("construct.buffered", "_diagonalise"),
    ],
)
def test_interrupt_inside_compiled_code(store, files, module, name):
    """A real signal during kernels of the strategy; the others return in the same way."""
    ran = subprocess.run(
        [sys.executable, "-c", DURING.format(module=module, name=name), str(store)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in ran.stderr, ran.stderr[-400:]
    assert ran.returncode == 130
    assert ran.stderr.strip() == "mmfact: interrupted; no partial file was left"
    assert files(store) == []


# --- streams that are closed -----------------------------------------------------------------------

COMMANDS = {
    "list": ("list",),
    "inspect": ("inspect", "buffered"),
    "verify": ("verify", "buffered"),
    "compare": ("compare", "buffered"),
    "compile": ("compile", "--workload", "sgd", "--n", "3", "--store", "new"),
    "dry run": ("compile", "--workload", "sgd", "--n", "3", "--dry-run"),
}


@pytest.mark.parametrize("json_", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
@pytest.mark.parametrize("name", COMMANDS)
def test_closed_streams(vault, monkeypatch, name, streams, json_):
    """`mmfact ... >&-`: nobody listens, which is no failure and no traceback. Python has None for such a stream."""
    monkeypatch.setenv("MMFACT_STORE", str(vault))
    for stream in streams:
        monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as end:
        main([*COMMANDS[name], *json_])
    assert end.value.code == 0


@pytest.mark.parametrize("stream", ["1>&-", "2>&-"])
def test_closed_streams_of_a_process(script, stream, store):
    ran = subprocess.run(
        ["bash", "-c", f"{script} compile --workload sgd --n 3 --store {store} {stream}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr, ran.stderr[-400:]
    assert ran.returncode == 0
    assert (store / "refs" / "sgd-n3.json").is_file()


@pytest.mark.parametrize("command", ["compare", "dry run"])
def test_stdout_on_a_full_disk(script, vault, command):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [str(script), *COMMANDS[command]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "MMFACT_STORE": str(vault)},
        )
    assert ran.returncode == 3
    assert "No space left" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_reader_that_goes_away(script, vault):
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    ran = subprocess.run(
        [str(script), *COMMANDS["compare"], "--json"],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "MMFACT_STORE": str(vault)},
    )
    reader.stdin.close()
    assert (ran.returncode, ran.stderr) == (0, "")


# --- progress --------------------------------------------------------------------------------------


def test_progress_moves_and_names_the_stages(script, store, terminal):
    """A long compile on a terminal: what is compiled and how long it takes, the stages, and figures that change."""
    command = (script, "compile", "--workload", "prefix-sum", "--n", 12_000, "--json", "--store", store)
    code, out, text = terminal(command)
    assert (code, json.loads(out)["tolerance_reached"]) == (0, True)
    assert "prefix-sum, n = 12000 (about " in text
    assert "optimum, iteration " in text
    done = [int(share) for share in re.findall(r"strategy, (\d+)% done", text)]
    assert len(set(done)) >= 4
    assert done == sorted(done)
    assert max(done) >= 50
    assert re.search(r"\d+ buffers", text)


def test_progress_of_the_paper_strategy(script, store, terminal):
    command = (script, "compile", "--workload", "prefix-sum", "--n", 256, "--strategy", "banded-low-rank")
    code, _, text = terminal((*command, "--store", store))
    assert code == 0
    assert len(set(re.findall(r"bandwidth \d+, rank \d+", text))) >= 2


@pytest.mark.parametrize("code", [0, 130])
def test_what_an_interrupt_left_half_made_is_not_complained_about(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library's object whose construction Ctrl-C cut short raises in __del__: a traceback beside our one message."""

    class HalfMade:
        def __del__(self) -> None:
            raise AttributeError("_ptr")

    def command(arguments: list[str]) -> None:
        HalfMade()
        sys.exit(code)

    monkeypatch.setattr(cli_main, "_run", command)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with pytest.raises(SystemExit):
        cli_main.main(["list"])
    assert ("_ptr" in capsys.readouterr().err) == (code == 0)
