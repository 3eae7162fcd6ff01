"""The command starts itself again with another allocator: once, and with nothing else changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.core
import typer.main

from mlxgen.__main__ import DECODING_COMMANDS
from mlxgen.backend import allocator
from mlxgen.cli.app import app
from tests.fixtures.command import ROOT, command_line, environment, mlxgen_process
from tests.fixtures.runs import ModelStore

installed = pytest.mark.skipif(
    allocator._folder() is None or not allocator._runs_on_cpu(),
    reason="only a Linux CPU with TBB's allocator has another to start with",
)
REPORT = """
import json, os, signal, subprocess, sys
sys.path.insert(0, os.getcwd())
from mlxgen.backend import allocator
before = dict(os.environ)
allocator.restart_with_allocator()
child = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
print(json.dumps({
    "pid": os.getpid(),
    "words": sys.argv[1:],
    "stdin": sys.stdin.read(),
    "is_loaded": allocator._is_loaded(),
    "environment": dict(os.environ),
    "child": json.loads(subprocess.run(child, capture_output=True, text=True).stdout),
    "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "is_second": before != dict(os.environ),
}))
"""
"""A program that may start again, and then says what it finds."""


def reported(variables: Mapping[str, str], *words: str, stdin: str = "") -> Any:
    """What REPORT says, and the environment and process that it was started with."""
    ours = {*variables, allocator.VARIABLE, "LD_PRELOAD", "LD_LIBRARY_PATH"}
    given = {name: value for name, value in os.environ.items() if name not in ours}
    given |= variables
    with subprocess.Popen(
        [sys.executable, "-c", REPORT, *words],
        cwd=ROOT,
        env=given,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(stdin, timeout=60)
    assert process.returncode == 0, errors
    # Nothing of the dynamic linker's, which names libraries that it cannot find.
    assert errors == ""
    return {**json.loads(output), "started_pid": process.pid, "given": given}


@installed
@pytest.mark.parametrize("folders", [None, "/nowhere", "/a folder:/another"])
def test_a_restart_changes_the_allocator_and_nothing_else(folders: str | None) -> None:
    words = ["two words", "", "--", "ü\n", "-c"]
    variables = {} if folders is None else {"LD_LIBRARY_PATH": folders}
    found = reported(variables, *words, stdin="typed\n")
    assert found["is_second"] and found["is_loaded"]
    # The same process to a shell that waits for it or sends it a signal.
    assert found["pid"] == found["started_pid"]
    assert found["words"] == words and found["stdin"] == "typed\n"
    assert found["blocked_signals"] == []
    assert found["environment"] == found["child"] == found["given"]


@installed
@pytest.mark.parametrize(
    "variables",
    [
        {allocator.VARIABLE: "off"},
        {allocator.VARIABLE: " OFF "},
        {"LD_PRELOAD": "libc.so.6"},
    ],
)
def test_a_process_stays_as_it_is_where_its_user_says_so(variables: dict[str, str]) -> None:
    found = reported(variables)
    assert not found["is_second"] and not found["is_loaded"]
    assert found["environment"] == found["child"] == found["given"]


@installed
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_second_interpreter_starts_is_one_line(
    sent: signal.Signals, tmp_path: Path
) -> None:
    """It comes from the second one's first import, before there is a handler for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"if {allocator._FOLDERS_BEFORE!r} in os.environ:\n"
        f"    os.kill(os.getpid(), {int(sent)})\n"
    )
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = mlxgen_process("generate", "-m", "/no such model", "-p", "a", variables=variables)
    assert run.code == 130 and run.stderr == "mlxgen: interrupted\n"


@installed
def test_a_part_of_another_program_does_not_start_that_again() -> None:
    """A program may call `main` with words of its own, or with those that it was given."""
    program = (
        "import sys\nprint('once')\n{change}\nfrom mlxgen.__main__ import main\nsys.exit(main())\n"
    )
    asked = ["generate", "-m", "/no such model"]
    for change, given in ((f"sys.argv = ['mlxgen', *{asked}]", []), ("", asked)):
        done = subprocess.run(
            [sys.executable, "-c", program.format(change=change), *given],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert done.returncode == 2 and "/no such model" in done.stderr
        assert done.stdout == "once\n"


@installed
def test_a_restart_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("too long a list")

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    before = dict(os.environ)
    monkeypatch.setattr("os.execve", refuse)
    monkeypatch.setattr("sys.argv", ["mlxgen", *sys.orig_argv[1:]])
    allocator.restart_with_allocator()
    assert dict(os.environ) == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("name", ["plain", "with a blank", "a:b", "a;b"])
def test_only_a_folder_that_a_list_can_hold_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder.parent))
    monkeypatch.setattr("site.getuserbase", lambda: str(tmp_path / "nobody"))
    assert allocator._folder() is None
    for library in allocator._LIBRARIES:
        (folder / library).touch()
    assert allocator._folder() == (None if {":", ";"} & set(name) else folder)


@pytest.mark.parametrize("wheel", ["mlx_cpu-1.dist-info", "mlx_cuda_13-1.dist-info", "mlx_metal-1"])
def test_the_backend_is_known_by_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: str
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / wheel).mkdir()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "mlx")])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert allocator._runs_on_cpu() == wheel.startswith("mlx_cpu")


def test_every_command_that_decodes_is_one_that_restarts() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup) and set(command.commands) == DECODING_COMMANDS


@installed
def test_the_text_is_the_same_under_both_allocators(models: ModelStore) -> None:
    target, draft = models.llama_directory(1), models.llama_directory(2)
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "a", "-n", 60, "--verbose"]
    words += ["--temp", 0.8, "--top-p", 0.9, "--seed", 4, "--accept-rule", "stochastic"]
    runs = [
        mlxgen_process(*words, variables={allocator.VARIABLE: setting}) for setting in ("", "off")
    ]
    for run, said in zip(runs, ("TBB's", "the C library's (MLXGEN_ALLOCATOR=off)"), strict=True):
        assert run.code == 0, run.stderr
        assert run.lines("Memory allocator: ", stream="stderr") == [f"Memory allocator: {said}"]
    # All but the line that says how long it took.
    texts = [run.stdout.split("[Generated")[0] for run in runs]
    assert texts[0] == texts[1] != ""


def test_help_does_not_wait_for_a_restart() -> None:
    words = command_line("generate", "--help", flags=["-X", "importtime"])
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.returncode == 0
    assert " mlxgen.cli.app" in done.stderr and "mlxgen.backend.allocator" not in done.stderr
