"""`python -m putget`: the same program as the `putget` command."""

from putget_bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
