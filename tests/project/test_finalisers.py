"""Code that runs when an object is collected takes no lock: its own thread, or a waiting one, may hold the lock.

The garbage collector runs wherever Python allocates, also under a lock. The first check reads the sources: it follows
finalisers by the names that they call. The second one collects objects of each kind while every lock is held.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import RLock, Thread

import pytest

from tests.project.checkout import BENCH, PACKAGE, ROOT, SERVE, python_files

Function = ast.FunctionDef | ast.AsyncFunctionDef
Known = dict[str, list[tuple[Path, Function]]]
PACKAGES = (PACKAGE, BENCH, SERVE, ROOT / "transfer" / "python" / "putget_transfer")
LOCK = re.compile(r"(?i)(lock|mutex|condition|semaphore)$")
# weakref.finalize(object, FUNCTION), weakref.ref(object, FUNCTION), gc.callbacks.append(FUNCTION)
# Methods of what the packages use rather than define; only "close" is both.
OF_OTHERS = {
    name for kind in (list, dict, str, bytes, deque, Thread, type(RLock()), ThreadPoolExecutor) for name in dir(kind)
} - {"close"}
CALLED_AT = {"finalize": 1, "ref": 1, "WeakMethod": 1, "proxy": 1, "append": 0}


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def functions(paths: list[Path]) -> Known:
    found = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                found[node.name].append((path, node))
    return found


def finalisers(paths: list[Path]) -> set[str]:
    """The names of what the garbage collector calls."""
    names = {"__del__"}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            kind = name_of(node.func)
            if kind == "append" and "gc.callbacks" not in ast.unparse(node.func):
                continue
            if len(node.args) > CALLED_AT.get(kind, 1 << 30):
                names.add(name_of(node.args[CALLED_AT[kind]]))
    return names - {""}


def takes_a_lock(node: ast.AST) -> bool:
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(LOCK.search(ast.unparse(item.context_expr)) for item in node.items)
    if not isinstance(node, ast.Call) or name_of(node.func) != "acquire":
        return False
    waits = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "blocking"]
    return waits != ["False"] and [ast.unparse(argument) for argument in node.args[:1]] != ["False"]


def package_of(file: Path) -> Path | None:
    return next((package for package in PACKAGES if file.is_relative_to(package)), None)


def called(node: ast.AST, file: Path, known: Known) -> list[tuple[Path, Function]]:
    """The functions that a call may mean: of the same file where it names one of them or its own object.

    Otherwise those of the package, and of others where the package has none: objects of putget hold none of
    putget_transfer's Python objects, nor these any of putget's.
    """
    if not isinstance(node, ast.Call):
        return []
    name = name_of(node.func)
    own = not isinstance(node.func, ast.Attribute) or ast.unparse(node.func.value) == "self"
    found = known.get(name, [])
    here = [one for one in found if one[0] == file]
    if own and here:
        return here
    near = [one for one in found if package_of(one[0]) == package_of(file)]
    return [] if name in OF_OTHERS else near or found


def locks_in_finalisers(paths: list[Path]) -> dict[str, str]:
    """Places that take a lock, and how a finaliser comes there."""
    known = functions(paths)
    ways = {id(function): (name, file, function) for name in finalisers(paths) for file, function in known[name]}
    left = list(ways.values())
    found = {}
    while left:
        way, file, function = left.pop()
        for node in ast.walk(function):
            if takes_a_lock(node):
                found[f"{file.name}:{node.lineno}"] = way
            for where, next_one in called(node, file, known):
                if id(next_one) not in ways:
                    ways[id(next_one)] = (f"{way} > {next_one.name}", where, next_one)
                    left.append(ways[id(next_one)])
    return found


def test_no_finaliser_takes_a_lock() -> None:
    paths = [path for package in PACKAGES for path in python_files(package)]
    assert {"_forget", "_give_up", "__del__"} <= finalisers(paths)
    assert locks_in_finalisers(paths) == {}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __del__(self):\n  self.end()\n def end(self):\n  with self._lock: pass\n",
        "def f(n):\n with _lock: pass\nweakref.finalize(o, f, 1)\n",
        "def f(n):\n held()\ndef held():\n _mutex.acquire()\nweakref.ref(o, f)\n",
        "def f(*_):\n _lock.acquire(timeout=3)\ngc.callbacks.append(f)\n",
        "def held():\n with _lock: yield\nclass A:\n def __del__(self):\n  with held(): pass\n",
    ],
)
def test_a_finaliser_with_a_lock_is_found(tmp_path: Path, source: str) -> None:
    path = tmp_path / "intruder.py"
    path.write_text(source)
    assert len(locks_in_finalisers([path])) == 1


COLLECT = """
import faulthandler, gc, sys, threading, warnings
import torch
import putget
from types import SimpleNamespace
from putget.adapters import deep_ep, flashinfer
from putget.adapters.flashinfer import functions
from putget.balancer import ExpertBlobs, HostStore, Landing

warnings.simplefilter("ignore")
row = putget.Payload((16,), torch.bfloat16)
cpu = {"device": "cpu"}
ids, x = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 16, dtype=torch.bfloat16)


def made():
    (comm,) = putget.Communicator.local(1)
    yield putget.AllToAll(comm, num_experts=2, top_k=1, max_tokens_per_rank=4, payloads=[row], output=row, **cpu)
    layer = flashinfer.MoeAlltoAll(SimpleNamespace(moe_ep_size=1, moe_ep_rank=0), 4, 1, 2, hidden_size=16, comm=comm,
                                   **cpu)
    layer.combine(layer.dispatch(ids, [x, ids], 4)[0], 4)
    yield layer
    buffer = deep_ep.Buffer(comm, **cpu)
    buffer.low_latency_dispatch(x.repeat(1, 8), ids.long(), 4, 2, use_fp8=False)
    yield buffer
    store = HostStore(comm, [64], 2, num_threads=1)
    store.start_save(0, 0, ExpertBlobs({"w": torch.ones(2, 16)}), 0)
    yield store
    yield Landing(comm, [ExpertBlobs({"w": torch.ones(2, 16)})], mover="thread", **cpu)
    size = functions.moe_a2a_get_workspace_size_per_rank(1, 4, 64, 32)
    workspace = torch.zeros(1, size, dtype=torch.uint8)
    metainfo = functions.moe_a2a_initialize(workspace, 0, 1, 4)
    functions.moe_a2a_dispatch(ids, [x], workspace, metainfo, 4, 0, 1, 1, 2)
    yield metainfo
    yield list(putget.Communicator.local(2, network=putget.Network("sim", domain_size=1)))
    yield comm


gc.disable()
cycle = list(made())
cycle.append(cycle)
kinds = (type(threading.Lock()), type(threading.RLock()))
modules = [module for name, module in sys.modules.items() if name.startswith("putget")]
locks = [value for module in modules for value in vars(module).values() if isinstance(value, kinds)]
locks += [value for found in gc.get_objects() if str(type(found).__module__).startswith("putget")
          for value in getattr(found, "__dict__", {}).values() if isinstance(value, kinds)]
assert len(locks) >= 3, locks
faulthandler.dump_traceback_later(60, exit=True)
for lock in locks:
    lock.acquire()
del cycle
print("collected", gc.collect() > 0, flush=True)
for lock in locks:
    lock.release()
"""


def test_objects_of_each_kind_are_collected_while_every_lock_is_held() -> None:
    found = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "collected True\n", found.stderr
    assert "Traceback" not in found.stderr, found.stderr
