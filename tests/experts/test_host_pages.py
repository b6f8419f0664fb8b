"""Mappings of host memory live as long as their views; see tests/experts/test_host_store.py, too."""

from __future__ import annotations

import subprocess
import sys


def test_a_view_is_readable_until_the_interpreter_ends() -> None:
    """A handler that was registered early runs late, and threads of an engine may read even then."""
    code = (
        "import atexit\n"
        "views = []\n"
        "atexit.register(lambda: print(int(views[0].sum())))\n"
        "from putget.experts.host_pages import Pages, make_descriptor\n"
        "pages = Pages(make_descriptor('test', 1 << 21), 1 << 21, 1 << 21, fill=True, numa_node=None)\n"
        "views.append(pages.bytes()[:4096].fill_(1))\n"
        "del pages\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4096\n", "")
