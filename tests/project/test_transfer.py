"""The transfer engine's sources: where unsafe code may stand, that nothing can panic, how long a file may be, and that
no modules use each other in a circle.

The compiler enforces most of it; what is checked here is that nobody switches the compiler's checks off. Every rule is
also run on a tree that breaks it, so a rule that no longer bites fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.project.checkout import ROOT

MAX_LINES = 600  # documentation included
TRANSFER = ROOT / "transfer"
# The modules that may hold unsafe code: the system, registered memory, and foreign function interfaces.
UNSAFE = re.compile(
    r"^(region|capi)\.rs$|^(capi|libfabric|nvlink)/|^verbs/(device|pair)\.rs$|(^|/)(ffi|sys|domain)\.rs$"
)
# Lints that keep panics and unsafe code out.
GUARDED = re.compile(r"\b(unsafe_code|undocumented_unsafe_blocks|unwrap_used|expect_used|panic|indexing_slicing)\b")
ALLOWS = re.compile(r"#!?\[(?:cfg_attr\((?P<when>[^,]+), *)?(?:allow|expect)\((?P<lints>[^\]]*)\)")
PANICS = re.compile(r"\b(?:unreachable|assert|assert_eq|assert_ne)!")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield path inside `src` and text of every source file that ends up in the engine."""
    for path in sorted((root / "src").rglob("*.rs")):
        name = str(path.relative_to(root / "src"))
        if not re.search(r"(^|_|/)tests\.rs$", name):
            yield name, path.read_text()


def unsafe_elsewhere(root: Path) -> Iterator[str]:
    for name, text in sources(root):
        if not UNSAFE.search(name) and re.search(r"^[^/\n\"]*\bunsafe\b(?!_)", text, re.MULTILINE):
            yield f"{name}: unsafe code"


def switched_off(root: Path) -> Iterator[str]:
    for name, text in sources(root):
        for found in ALLOWS.finditer(text):
            lints = set(GUARDED.findall(found["lints"]))
            if found["when"] == "test" or (lints == {"unsafe_code"} and UNSAFE.search(name)):
                continue
            if lints:
                yield f"{name}: {', '.join(sorted(lints))}"


def panicking(root: Path) -> Iterator[str]:
    for name, text in sources(root):
        code = text.split("#[cfg(test)]\nmod tests {")[0].split("#[cfg(fuzzing)]")[0]
        lines = [line for line in code.splitlines() if not line.lstrip().startswith("//") and "const _:" not in line]
        if PANICS.search("\n".join(lines)):
            yield f"{name}: panics"


def too_long(root: Path) -> Iterator[str]:
    for path in (path for folder in ("src", "tests", "loom", "bench") for path in (root / folder).rglob("*.rs")):
        if len(path.read_text().splitlines()) > MAX_LINES:
            yield f"{path.name}: too long"


def used_names(path: str) -> list[str]:
    """What one `use` names: a::{b, c::{d, e}} is a::b, a::c::d and a::c::e."""
    found = re.fullmatch(r"([^{]*)\{(.*)\}", path, re.DOTALL)
    if found is None:
        return [path.split(" as ")[0].strip()]
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(found[2] + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(found[2][start:at].strip())
            start = at + 1
    return [name for part in parts if part for name in used_names(found[1].strip() + part)]


def names_in(code: str) -> set[str]:
    """The paths that a module's code uses, by `use` and in place."""
    use = r"\buse\s+([^;]+);"
    names = {name.replace(" ", "") for found in re.findall(use, code) for name in used_names(" ".join(found.split()))}
    return names | set(re.findall(r"\b(?:crate|super|self)(?:::\w+)+", re.sub(use, "", code)))


def module_code(root: Path) -> dict[str, str]:
    """The code of each module by its path, as a::b; without comments and tests."""
    found = {}
    for name, text in sources(root):
        code = re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]
        code = re.sub(r"#\[cfg\(test\)\]\s*(?:use|mod)[^;]*;", "", re.sub(r"//.*", "", code))
        found["::".join(Path(name).with_suffix("").parts).removesuffix("::mod")] = code
    return found


def import_circles(root: Path) -> Iterator[str]:
    """A module and its parts may know each other, no others."""
    modules = module_code(root)
    crate = modules.pop("lib", "")
    public = {name.split("::")[-1]: name for name in names_in("".join(re.findall(r"pub use [^;]+;", crate)))}

    def module_of(parts: list[str]) -> str | None:
        if parts and parts[0] in public:
            parts = public[parts[0]].split("::")
        prefixes = ("::".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in modules), None)

    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, code in modules.items():
        here = name.split("::")
        for used in names_in(code):
            first, *rest = used.split("::")
            parts = {"crate": rest, "self": here + rest, "super": here[:-1] + rest}.get(first, [*here, first, *rest])
            found = module_of(parts)
            if found and not f"{found}::".startswith(f"{name}::") and not f"{name}::".startswith(f"{found}::"):
                graph[name].add(found)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


RULES: dict[Callable[[Path], Iterator[str]], list[tuple[str, str]]] = {
    unsafe_elsewhere: [("worker.rs", "    let x = unsafe { f() };"), ("api.rs", "pub unsafe fn f() {}")],
    switched_off: [
        ("api.rs", "#![allow(unsafe_code)]"),
        ("region.rs", "#[allow(clippy::unwrap_used, dead_code)]"),
        ("api.rs", "#[cfg_attr(not(test), allow(clippy::panic))]"),
    ],
    panicking: [("api.rs", "assert!(false);"), ("api.rs", "_ => unreachable!(),")],
    too_long: [("api.rs", "\n" * MAX_LINES)],
    import_circles: [
        ("region.rs", "use crate::api::{self, Options};"),
        ("region.rs", "fn f() { crate::api::f() }"),
        ("region.rs", "use super::api::{\n    Options,\n};"),
    ],
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule: Callable[[Path], Iterator[str]]) -> None:
    assert list(sources(TRANSFER))
    assert list(rule(TRANSFER)) == []


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [(rule, name, line) for rule, cases in RULES.items() for name, line in cases],
)
def test_rule_bites(tmp_path: Path, rule: Callable[[Path], Iterator[str]], name: str, line: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "region.rs").write_text("#![allow(unsafe_code)]\n// SAFETY: it is.\nunsafe { f() };\n")
    (tmp_path / "src" / "api.rs").write_text(
        "#![cfg_attr(test, allow(clippy::panic))]\nuse crate::region;\n// assert!(x) is not code\n"
    )
    assert list(rule(tmp_path)) == []
    with (tmp_path / "src" / name).open("a") as file:
        file.write(f"{line}\n")
    assert len(list(rule(tmp_path))) == 1


def test_the_compiler_denies_what_it_should() -> None:
    assert "#![deny(unsafe_code)]" in (TRANSFER / "src" / "lib.rs").read_text()
    manifest = (TRANSFER / "Cargo.toml").read_text()
    for lint in ("unwrap_used", "expect_used", "panic", "indexing_slicing", "undocumented_unsafe_blocks"):
        assert f'{lint} = "deny"' in manifest
