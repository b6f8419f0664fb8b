"""The `putget` command. Everything heavy is imported when a subcommand runs."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from putget_bench.parser import build_parser

_INSTALL = "in a checkout of putget: pip install '.[bench]'"
_OK, _FAILED, _USAGE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; the process's own if None.

    Returns:
        0; 1 if a result was wrong, a rank failed or nobody reads the output; 2 if the arguments are wrong; 130 after
            Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None and not unknown:
        parser.print_help()
        return _OK
    if unknown or args.command is None:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = _run(args, ["putget", *arguments])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return _FAILED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("rich", "matplotlib", "yaml"):
            raise
        return _complain(args, f"needs the Python package {error.name}: {_INSTALL}", _FAILED)
    return code


def _reader_has_gone() -> bool:
    """True if nobody reads the output any more, as behind `| head`. What is left of it then goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # an error is reported unasked: of a pipe, that its other end is closed
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """The subcommand. Raises ModuleNotFoundError where a package of the extra `bench` is missing, here or later."""
    command = import_module(f"putget_bench.{args.module}")
    from putget import PutgetError
    from putget_bench.launch import RankFailedError

    try:
        return int(command.run(args, words))
    except ValueError as error:
        return _complain(args, f"error: {error}", _USAGE)
    except (PutgetError, RankFailedError) as error:
        return _complain(args, f"failed: {error}", _FAILED)
    except KeyboardInterrupt:
        return _complain(args, "interrupted", _INTERRUPTED)


def _complain(args: argparse.Namespace, text: str, exit_code: int) -> int:
    sys.stdout.flush()
    print(f"putget {args.command}: {text}", file=sys.stderr)
    return exit_code
