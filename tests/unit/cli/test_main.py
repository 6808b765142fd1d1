"""Exit codes, one-line errors, a quick start, and help for every command."""

import errno
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import torchbft.cli.main as program
from torchbft import __version__, attacks
from torchbft.cli.main import COMMANDS, build, main
from torchbft.cli.options import RULES, STAGES
from torchbft.cli.output import ExitCode, emit, exit_code, say, say_error
from torchbft.primitives.errors import (
    ConfigError,
    CorruptLogError,
    DecodeError,
    HaltError,
    PreconditionError,
    StorageError,
    TorchbftError,
)
from torchbft.pytorch import tasks
from torchbft.tensors import aggregation
from torchbft.tensors.compression import CODEC_NAMES

PRESENT = [name for name in COMMANDS if importlib.util.find_spec(f"torchbft.cli.{name}")]
Torchbft = Callable[..., Any]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """The program with one command that raises what it is given."""

    def install(error: BaseException) -> None:
        app = typer.Typer()

        @app.callback()
        def top() -> None:
            pass

        @app.command("fail")
        def fail() -> None:
            raise error

        monkeypatch.setattr(program, "build", lambda: app)

    return install


HELP = [["--help"], *([name, "--help"] for name in PRESENT)]
LIGHT = [
    ["init", "--name", "a"],
    ["request"],
    ["admit"],
    ["status"],
    ["sim", "--seeds", "1", "--peers", "1", "--byzantine", "0", "--jobs", "1"],
    ["sim", "--seeds", "1-1", "--peers", "4", "--byzantine", "1"],
]
"""Commands that need no tensors, each on what those before it left in the folder."""


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        (HELP, {"torch", "numpy", "safetensors", "sklearn", "rich.console"}),
        (LIGHT, {"torch", "safetensors", "sklearn"}),
    ],
    ids=["help", "light"],
)
def test_what_needs_nothing_heavy_loads_nothing_heavy(
    commands: list[list[str]], heavy: set[str], tmp_path: Path
) -> None:
    """One process for all commands: whatever any of them loads stays there."""
    code = (
        "import sys; from torchbft.cli.main import main\n"
        f"for words in {commands}:\n"
        f"    code = main(words); loaded = {heavy} & set(sys.modules)\n"
        "    if code or loaded: sys.exit(f'{words}: exit code {code}, loads {loaded}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PRESENT)
def test_every_command_has_help_with_an_example_and_json(torchbft: Torchbft, name: str) -> None:
    shown = torchbft(name, "--help")
    assert shown.code == 0
    assert "Example: torchbft " + name in " ".join(shown.out.split())
    assert "--json" in shown.out
    function = getattr(importlib.import_module(f"torchbft.cli.{name}"), name)
    first = (inspect.getdoc(function) or "").splitlines()[0]
    assert first.endswith(".")
    assert len(first) <= 90, "one line of the list of commands"


@pytest.mark.parametrize("name", ["demo", "up", "init"])
def test_help_lists_the_values_that_an_option_takes(torchbft: Torchbft, name: str) -> None:
    text = "".join(torchbft(name, "--help").out.split())
    alone = [rule for rule in aggregation.known() if not aggregation.describe(rule).inputs]
    assert sorted(alone) == sorted((*RULES, *STAGES))
    values: dict[str, Sequence[str]] = {"--rule": alone, "--codec": CODEC_NAMES}
    values |= {"--attack": ("none", *attacks.names()), "--data": tasks.names()}
    values |= {"--task": tasks.names()}
    for option, known in values.items():
        about = text.partition(f"{option}<str>")[2].split("--")[0]
        assert not about or [value for value in known if value not in about] == [], option
    assert "--rule<str>" in text


def test_no_arguments_show_help(torchbft: Torchbft) -> None:
    assert torchbft().out == torchbft("--help").out


def test_version(torchbft: Torchbft) -> None:
    assert torchbft("--version").out == f"torchbft {__version__}\n"


@pytest.mark.parametrize("arguments", [("bogus",), ("status", "--bogus"), ("init",)])
def test_wrong_usage_is_one_error_and_a_hint(torchbft: Torchbft, arguments: list[str]) -> None:
    ran = torchbft(*arguments)
    assert ran.code == ExitCode.USAGE
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert "hint: " in ran.err
    assert len(ran.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (PreconditionError("x"), 2),
        (DecodeError("x"), 2),
        (HaltError("x"), 3),
        (StorageError("x"), 4),
        (CorruptLogError("x", where="blocks.log", offset=7), 4),
        (TorchbftError("x"), 2),
    ],
)
def test_each_error_has_its_exit_code(
    torchbft: Torchbft, failing: Callable[..., None], error: TorchbftError, code: int
) -> None:
    failing(error)
    ran = torchbft("fail")
    assert ran.code == code == exit_code(error)
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_error_names_what_where_and_what_to_do(torchbft: Torchbft, failing: Any) -> None:
    failing(ConfigError("two members\nshare a key", where="run.toml", hint="let one\nmake another"))
    assert torchbft("fail").err == (
        "error: run.toml: two members share a key\nhint: let one make another\n"
    )


def test_unexpected_error_says_where_to_report(torchbft: Torchbft, failing: Any) -> None:
    failing(ZeroDivisionError("division by zero"))
    ran = torchbft("fail")
    assert ran.code == ExitCode.INTERNAL == 70
    assert "error: unexpected ZeroDivisionError: division by zero" in ran.err
    assert "report it at https://" in ran.err
    assert "Traceback" not in ran.err


def test_debug_variable_shows_the_traceback(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHBFT_DEBUG", "1")
    failing(ZeroDivisionError("division by zero"))
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_no_defect(torchbft: Torchbft, failing: Any, number: int) -> None:
    failing(OSError(number, "No space left on device", "/run/peers"))
    ran = torchbft("fail")
    assert ran.code == ExitCode.STORAGE
    assert ran.err.startswith("error: /run/peers: No space left on device\nhint: ")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR])
def test_a_wrong_path_is_no_defect(torchbft: Torchbft, failing: Any, number: int) -> None:
    failing(OSError(number, os.strerror(number), "/no/such"))
    ran = torchbft("fail")
    assert ran.code == ExitCode.USAGE
    assert ran.err.startswith(f"error: /no/such: {os.strerror(number)}\nhint: ")


def test_another_oserror_is_a_defect(torchbft: Torchbft, failing: Any) -> None:
    failing(OSError(errno.EBADF, "Bad file descriptor"))
    assert torchbft("fail").code == ExitCode.INTERNAL


def test_control_c_is_130(torchbft: Torchbft, failing: Any) -> None:
    failing(KeyboardInterrupt())
    assert torchbft("fail").code == ExitCode.INTERRUPTED == 130


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_commands_own_exit_code_is_kept(torchbft: Torchbft, failing: Any, code: int) -> None:
    failing(typer.Exit(code))
    assert torchbft("fail").code == code


def test_codes_are_documented_in_the_help(torchbft: Torchbft) -> None:
    text = " ".join(torchbft("--help").out.split())
    for code in ExitCode:
        assert f"{int(code)} " in text.split("Exit codes:")[1]


def test_commands_are_listed_in_the_order_of_a_first_day() -> None:
    assert [command.name for command in build().registered_commands] == PRESENT


def test_emit_writes_json_or_text_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"b": 1, "path": program}, as_json=True, text="words")
    assert json.loads(capsys.readouterr().out)["b"] == 1
    emit({"b": 1}, as_json=False, text="words")
    assert capsys.readouterr().out == "words\n"
    emit({"b": 1}, as_json=False)
    assert capsys.readouterr().out == ""


def test_words_go_to_stderr_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say("peer \x1b[2Jsays")
    say_error(ConfigError("bad \x1b]0;x\x07"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert "\x07" not in captured.err
    assert "says" in captured.err


def test_a_closed_pipe_is_no_error() -> None:
    code = "import sys; from torchbft.cli.main import main; sys.exit(main(['--help']))"
    command = f'{sys.executable} -c "{code}" | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
