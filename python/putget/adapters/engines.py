"""Meeting an engine: which versions a plug-in knows, and putting a name of putget's where one of the engine's was."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from putget import AllToAll, BackendUnavailable, Communicator, __version__


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version; what comes after it (rc1, .post1, +cu130) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


_unproven: dict[str, str] = {}


def unproven_version(engine: str) -> str | None:
    """The version of an engine that is newer than the known ones and needs a self-check (``proof.prove``)."""
    return _unproven.get(engine)


def require_version(
    engine: str, distributions: Sequence[str], first: str, before: str, *, proven_before: str | None = None
) -> str:
    """The version of an engine that is installed.

    Args:
        engine: Its name, for messages.
        distributions: Names under which it is packaged.
        first: The first version that is supported.
        before: The first version that is not.
        proven_before: The first version that needs a self-check; None: none does.

    Raises:
        BackendUnavailable: It is not installed, or in a version that the plug-in does not know; the message names what
            is supported.
    """
    supported = f"putget's plug-in knows {engine} from {first} to before {before}"
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not _numbers(first) <= _numbers(version) < _numbers(before):
            raise BackendUnavailable(f"{engine} is installed in version {version}; {supported}")
        if proven_before is not None and _numbers(version) >= _numbers(proven_before):
            _unproven[engine] = version
        else:
            _unproven.pop(engine, None)
        return version
    raise BackendUnavailable(f"{engine} is not installed ({' or '.join(distributions)}); {supported}")


_announced: set[tuple[str, str]] = set()
_LAUNCH = "putget %s launches a first round of %d tokens: dispatch %s%s, combine %s%s"


def announce(engine: str, comm: Communicator, *, num_experts: int, device: torch.device) -> None:
    """Says once in a process, in the engine's own log, that putget carries its layers.

    Args:
        engine: The name of the engine's package, under which it logs.
        comm: The expert-parallel group.
        num_experts: Physical experts of all ranks together.
        device: Where the rows live.
    """
    domains = f" in {len(comm.domains)} domains" if len(comm.domains) > 1 else ""
    _say_once(
        engine,
        "putget %s carries dispatch and combine of the mixture-of-experts layers: %d experts on %d ranks%s, on %s",
        num_experts,
        comm.size,
        domains,
        device,
    )


def announce_launch(engine: str, a2a: AllToAll, num_tokens: int) -> None:
    """Says once in a process, in the engine's own log, how putget launches the first round.

    Args:
        engine: The name of the engine's package, under which it logs.
        a2a: What runs the round.
        num_tokens: Tokens that this rank dispatches in it.
    """
    if (engine, _LAUNCH) not in _announced:
        dispatch, combine = a2a.launches(num_tokens)
        blocks = [f" in {launch.blocks} blocks" if launch.blocks else "" for launch in (dispatch, combine)]
        _say_once(engine, _LAUNCH, num_tokens, dispatch.path, blocks[0], combine.path, blocks[1])


def announce_overlap(engine: str) -> None:
    """Says once in a process, in the engine's own log, that rounds of two batches overlap.

    Args:
        engine: The name of the engine's package, under which it logs.
    """
    _say_once(engine, "putget %s overlaps the rounds of two batches of a forward")


def announce_planner(engine: str, *, num_experts: int, num_slots: int, num_ranks: int) -> None:
    """Says once in a process, in the engine's own log, that putget plans where experts lie.

    Args:
        engine: The name of the engine's package, under which it logs.
        num_experts: Experts of a layer.
        num_slots: Slots of all ranks together.
        num_ranks: Ranks of the expert-parallel group.
    """
    _say_once(
        engine,
        "putget %s plans where experts lie: %d experts in %d slots on %d ranks",
        num_experts,
        num_slots,
        num_ranks,
    )


def announce_mover(engine: str, num_ranks: int) -> None:
    """Says once in a process, in the engine's own log, that experts move through putget.

    Args:
        engine: The name of the engine's package, under which it logs.
        num_ranks: Ranks of the expert-parallel group.
    """
    _say_once(engine, "putget %s moves experts between %d ranks", num_ranks)


def _say_once(engine: str, message: str, *values: Any) -> None:
    if (engine, message) not in _announced:
        _announced.add((engine, message))
        logging.getLogger(f"{engine}.putget").info(message, __version__, *values)


def require_names(engine: str, module: Any, names: Sequence[str]) -> None:
    """Raises BackendUnavailable unless the module has all the names that a plug-in needs."""
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise BackendUnavailable(f"{engine}: {module.__name__} has no {', '.join(missing)}")


def require_supported(**options: tuple[Any, Any]) -> None:
    """Raises ValueError for an option that is not what is supported: name=(given, supported)."""
    for name, (given, supported) in options.items():
        if given is supported:
            continue
        if isinstance(given, torch.Tensor) or given != supported:
            shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
            raise ValueError(f"{name} is {shown}, supported is {supported!r}")


Replace = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then what waits for the module: a spec may also be looked up and not be used."""

    def __init__(self, loader: Any, waiting: dict[str, list[Replace]]) -> None:
        self._loader = loader
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for step in self._waiting.pop(module.__name__, ()):
            step(module)


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for modules to be imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Replace]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.waiting)
                return spec  # type: ignore[no-any-return]
        return None


_watch = _Watch()


def when_imported(module_name: str, step: Replace) -> None:
    """Calls step(module): now if the module is there, else right after it has been imported."""
    module = sys.modules.get(module_name)
    if module is not None:
        step(module)
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.waiting.setdefault(module_name, []).append(step)


def _calls(thing: Any) -> dict[str, Any]:
    """The callables of a function or class: itself, or its constructor and public methods."""
    if not isinstance(thing, type):
        return {thing.__name__: thing}
    methods = {name: value for name, value in vars(thing).items() if callable(value) and not name.startswith("_")}
    return {"__init__": thing.__init__, **methods}  # type: ignore[misc]


def require_arguments(engine: str, original: Any, replacement: Any) -> None:
    """Raises BackendUnavailable unless the replacement takes every argument that the original takes.

    Methods that the replacement does not have do not count: an engine that calls one hears about it from Python.
    """
    ours = _calls(replacement)
    for name, call in _calls(original).items():
        if name not in ours:
            continue
        known = inspect.signature(ours[name]).parameters
        unknown = [argument for argument in inspect.signature(call).parameters if argument not in known]
        if unknown:
            raise BackendUnavailable(
                f"{engine}: {original.__name__}.{name} of this version takes {', '.join(unknown)}, which putget does "
                f"not know; known are {', '.join(argument for argument in known if argument != 'self')}"
            )


def replace_name(module_name: str, name: str, make: Callable[[Any], Any], *, engine: str) -> None:
    """Puts a replacement under a module's name, and wherever that name was imported from there before.

    The module need not be imported yet; then it happens, and may fail, when it is.

    Args:
        module_name: Where the name is.
        name: A function or a class.
        make: Gives the replacement for an original.
        engine: The engine's name, for messages.

    Raises:
        BackendUnavailable: The module has no such name, or one with arguments that the replacement does not take.
    """

    def replace(module: ModuleType) -> None:
        require_names(engine, module, [name])
        original = getattr(module, name)
        if getattr(original, "__module__", "").startswith("putget."):
            return
        replacement = make(original)
        require_arguments(engine, original, replacement)
        for other in list(sys.modules.values()):
            for key, value in list(getattr(other, "__dict__", {}).items()):
                if value is original:
                    setattr(other, key, replacement)

    when_imported(module_name, replace)
