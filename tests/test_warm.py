"""The warm Python (tests/harness/warm.py) runs a program as a new Python does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import warm

WAIT_S = 60.0
NO_CACHE = "PYTHONDONTWRITEBYTECODE"


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm.python(), *words], capture_output=True, text=True, timeout=WAIT_S, **options)  # type: ignore[call-overload, no-any-return]


def test_packages_are_there_and_putget_is_not() -> None:
    code = "import sys; print('torch' in sys.modules, [n for n in sys.modules if n.startswith(('putget', 'tests'))])"
    assert run("-c", code).stdout == "True []\n"


def test_a_program_has_its_callers_folder_environment_and_files(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "program.py").write_text(
        "import os, sys\nimport beside\n"
        "print(sys.argv, os.getcwd(), os.environ['WORD'], beside.WORD, __name__, sys.stdin.read())\n"
        "os.write(int(sys.argv[1]), b'through a pipe')\n"
    )
    end, begin = os.pipe()
    done = run(
        *(str(tmp_path / "program.py"), str(begin)),
        cwd=tmp_path,
        env={**os.environ, "WORD": "a word"},
        input="a line",
        pass_fds=[begin],
    )
    os.close(begin)
    program = str(tmp_path / "program.py")
    assert (done.stderr, done.stdout) == (
        "",
        f"{[program, str(begin)]} {tmp_path} a word beside __main__ a line\n",
    )
    assert os.read(end, 100) == b"through a pipe"
    assert os.read(end, 100) == b"", "a process holds the pipe"
    os.close(end)


def test_modules_and_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text("import sys; print(__spec__.name, sys.argv[1:])")
    done = run("-m", "found", "a", "b", cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.stderr, done.stdout) == ("", "found ['a', 'b']\n")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'the end', file=sys.stderr)", 0, "the end"),
    ],
)
def test_how_a_program_ends(code: str, status: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == status
    assert said in done.stderr


def test_a_signal_reaches_the_program() -> None:
    code = (
        "import signal, time\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')"
    )
    # Programs in the background of a shell ignore this signal, and so would this one.
    command = ["env", "--default-signal=INT", warm.python(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.read() == "interrupted\n"
    assert program.returncode == 0


def test_a_program_ends_with_its_caller() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        number = int(caller.stdout.readline())
        caller.kill()
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.parametrize("told", [b"", (1000).to_bytes(8, "little") + b"a part"], ids=["nothing", "a part"])
def test_a_caller_that_ends_before_it_has_said_what_it_wants_ends_nobody_else(told: bytes) -> None:
    """A test kills a program that is just starting, while other programs run."""
    code = "print('begun', flush=True); print(input())"
    command = [warm.python(), "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "begun\n"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(Path(warm.python()).with_name("socket")))
            caller.sendall(told)
        assert run("-c", "print('another')").stdout == "another\n"
        program.stdin.write("the end\n")
        program.stdin.close()
        assert program.stdout.read() == "the end\n"
    assert program.returncode == 0


def test_options_of_the_interpreter_start_one() -> None:
    assert run("-S", "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize("flags", [["-u"], ["-B"], ["-u", "-B"]])
def test_flags_of_launchers_do_not(flags: list[str]) -> None:
    code = "import sys; print('torch' in sys.modules, sys.dont_write_bytecode, sys.stdout.write_through)"
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", NO_CACHE)}
    assert run(*flags, "-c", code, env=plain).stdout == f"True {'-B' in flags} {'-u' in flags}\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_a_program_are_warm(method: str) -> None:
    code = (
        "import multiprocessing, sys\n"
        "print(multiprocessing.get_context({!r}).Pool(1).apply(len, ['abc']), sys.executable)"
    )
    done = run("-c", code.format(method))
    assert (done.stderr, done.stdout) == ("", f"3 {warm.python()}\n")
