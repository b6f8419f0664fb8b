"""The transfer engine's sources: where unsafe code may stand, that nothing can panic, how long a file may be, that no
modules use each other in a circle, and that the engine's folders use only those below them.

The compiler enforces most of it; what is checked here is that nobody switches the compiler's checks off. Every rule is
also run on a tree that breaks it, so a rule that no longer bites fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.project.checkout import ROOT

MAX_LINES = 600  # documentation included
TRANSFER = ROOT / "transfer"
TOOLS = {"bench", "fuzz", "loom"}
# The crates that a user gets.
CRATES = sorted(path.parent for path in TRANSFER.glob("*/Cargo.toml") if path.parent.name not in TOOLS)
# The modules of a crate that may hold unsafe code: the system, registered memory, and foreign function interfaces. In
# any other crate there is none.
UNSAFE = {
    "engine": re.compile(
        r"^memory/region\.rs$|^providers/((libfabric|nvlink)/|verbs/(device|pair)\.rs$)|(^|/)(ffi|sys|domain)\.rs$|^sys/os\.rs$"
    ),
    "capi": re.compile(""),
    "python": re.compile(r"^(domain|sys)\.rs$"),
}
# The engine's folders, from what all others use to the calls. Each uses itself and those before it.
LAYERS = (
    "error",
    "sys",
    "wire",
    "memory",
    "counters",
    "peers",
    "providers",
    "worker",
    "engine",
    "submit",
    "api",
)
NOWHERE = re.compile(r"(?!)")
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


def may_be_unsafe(root: Path, name: str) -> bool:
    return UNSAFE.get(root.name, NOWHERE).search(name) is not None


def unsafe_elsewhere(root: Path) -> Iterator[str]:
    for name, text in sources(root):
        if not may_be_unsafe(root, name) and re.search(r"^[^/\n\"]*\bunsafe\b(?!_)", text, re.MULTILINE):
            yield f"{name}: unsafe code"


def switched_off(root: Path) -> Iterator[str]:
    for name, text in sources(root):
        for found in ALLOWS.finditer(text):
            lints = set(GUARDED.findall(found["lints"]))
            if found["when"] == "test" or (lints == {"unsafe_code"} and may_be_unsafe(root, name)):
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
    for path in (path for folder in ("src", "tests") for path in (root / folder).rglob("*.rs")):
        if len(path.read_text().splitlines()) > MAX_LINES:
            yield f"{path.name}: too long"


def used_names(path: str) -> list[str]:
    """The names of one `use`: a::{b, c::{d, e}} is a::b, a::c::d and a::c::e."""
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


def uses(root: Path) -> dict[str, set[str]]:
    """The modules that each module uses, by their paths; a module and its own parts are left out."""
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
            above = len(re.match(r"(?:super::)*", used)[0]) // len("super::")  # type: ignore[index]
            parts = {"crate": rest, "self": here + rest, "super": here[:-above] + used.split("::")[above:]}.get(
                first, [*here, first, *rest]
            )
            found = module_of(parts)
            if found and not f"{found}::".startswith(f"{name}::") and not f"{name}::".startswith(f"{found}::"):
                graph[name].add(found)
    return graph


def import_circles(root: Path) -> Iterator[str]:
    """A module and its parts may know each other, no others."""
    try:
        TopologicalSorter(uses(root)).prepare()
    except CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


def layers_upward(root: Path) -> Iterator[str]:
    """Uses of a layer above the own one."""
    height = {layer: at for at, layer in enumerate(LAYERS)}
    for name, found in uses(root).items():
        own = name.split("::")[0]
        for used in sorted(found):
            if height.get(used.split("::")[0], -1) > height.get(own, len(LAYERS)):
                yield f"{name} uses {used}"


def methods_upward(root: Path) -> Iterator[str]:
    """Calls, in methods of a type, of methods of the same type that a layer above defines: no `use` shows them."""
    height = {layer: at for at, layer in enumerate(LAYERS)}
    blocks: list[tuple[str, str, str]] = []  # a layer, a type, and the text of its methods
    modules = module_code(root)
    # Private types of several modules may have one name.
    types = Counter(re.findall(r"\b(?:struct|enum) (\w+)", "".join(modules.values())))
    for name, code in modules.items():
        for found in re.finditer(r"^impl(?:<[^{>]*>)? (\w+)(?:<[^{]*>)? \{\n(.*?)^\}", code, re.MULTILINE | re.DOTALL):
            if types[found[1]] == 1:
                blocks.append((name.split("::")[0], found[1], found[2]))
    homes = {(kind, method): layer for layer, kind, text in blocks for method in re.findall(r"\bfn (\w+)", text)}
    for layer, kind, text in blocks:
        for method in sorted(set(re.findall(r"\bself\.(\w+)(?:::<[^>]*>)?\(", text))):
            home = homes.get((kind, method), layer)
            if height.get(home, -1) > height.get(layer, len(LAYERS)):
                yield f"{kind} in {layer} calls {method} of {home}"


RULES: dict[Callable[[Path], Iterator[str]], list[tuple[str, str]]] = {
    unsafe_elsewhere: [("worker.rs", "    let x = unsafe { f() };"), ("api.rs", "pub unsafe fn f() {}")],
    switched_off: [
        ("api.rs", "#![allow(unsafe_code)]"),
        ("memory/region.rs", "#[allow(clippy::unwrap_used, dead_code)]"),
        ("api.rs", "#[cfg_attr(not(test), allow(clippy::panic))]"),
    ],
    panicking: [("api.rs", "assert!(false);"), ("api.rs", "_ => unreachable!(),")],
    too_long: [("api.rs", "\n" * MAX_LINES)],
    import_circles: [
        ("memory/region.rs", "use crate::api::{self, Options};"),
        ("memory/region.rs", "fn f() { crate::api::f() }"),
        ("memory/region.rs", "use super::super::api::{\n    Options,\n};"),
    ],
}


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.name)
@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule: Callable[[Path], Iterator[str]], crate: Path) -> None:
    assert list(sources(crate))
    assert list(rule(crate)) == []


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_no_file_of_a_tool_is_too_long(tool: str) -> None:
    assert list(too_long(TRANSFER / tool)) == []


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [(rule, name, line) for rule, cases in RULES.items() for name, line in cases],
)
def test_rule_bites(tmp_path: Path, rule: Callable[[Path], Iterator[str]], name: str, line: str) -> None:
    crate = tmp_path / "engine"
    (crate / "src" / "memory").mkdir(parents=True)
    (crate / "src" / "memory" / "region.rs").write_text("#![allow(unsafe_code)]\n// SAFETY: it is.\nunsafe { f() };\n")
    (crate / "src" / "api.rs").write_text(
        "#![cfg_attr(test, allow(clippy::panic))]\nuse crate::memory::region;\n// assert!(x) is not code\n"
    )
    assert list(rule(crate)) == []
    with (crate / "src" / name).open("a") as file:
        file.write(f"{line}\n")
    assert len(list(rule(crate))) == 1


def test_the_engine_has_its_layers_and_no_other_folder() -> None:
    found = {path.name for path in (TRANSFER / "engine" / "src").iterdir()}
    assert found == {*LAYERS, "lib.rs"}


@pytest.mark.parametrize("rule", [layers_upward, methods_upward])
def test_layers_use_only_those_below(rule: Callable[[Path], Iterator[str]]) -> None:
    assert list(rule(TRANSFER / "engine")) == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (layers_upward, "use crate::submit::batch::Batch;"),
        (layers_upward, "use crate::Batch;"),
        (layers_upward, "fn f() { super::super::submit::batch::f() }"),
        (methods_upward, "impl Engine {\n    fn f(&self) { self.write() }\n}"),
    ],
)
def test_a_use_of_a_layer_above_is_found(tmp_path: Path, rule: Callable[[Path], Iterator[str]], line: str) -> None:
    files = {
        "lib.rs": "pub use submit::batch::Batch;\n",
        "engine/running.rs": "pub struct Engine {}\nimpl Engine {\n    fn close(&self) {}\n}\n",
        "submit/batch.rs": "use crate::engine::running::Engine;\n"
        "impl Engine {\n    fn write(&self) { self.close() }\n}\n",
    }
    for name, text in files.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    assert list(rule(tmp_path)) == []
    with (tmp_path / "src" / "engine/running.rs").open("a") as file:
        file.write(f"{line}\n")
    assert len(list(rule(tmp_path))) == 1


# Where a kind of transfer may be named: what callers ask for, and what workers do for it.
KINDS = {
    "Request": {"api/calls.rs", "submit/request.rs"},
    "Task": {"submit/request.rs", "submit/prepared.rs", "worker/command.rs", "worker/mod.rs"},
}
SUBMIT = re.compile(
    r"pub fn (submit_\w+)(?:<[^>]*>)?\((?:[^{]|\{[^\n])*?-> Result<TransferId, Error> \{\n(.*?)\n    \}", re.DOTALL
)


def kinds_elsewhere(root: Path) -> Iterator[str]:
    """Transfers that are submitted past the requests, and files beside those above that tell kinds apart."""
    texts = {name: re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0] for name, text in sources(root)}
    for name, text in texts.items():
        for call, body in SUBMIT.findall(text):
            # One line, which builds a request or calls a sibling that does.
            built = re.fullmatch(r" *self\.submit\(&Request::\w+ \{[^}]*\}, options, done\)", body)
            if name != "api/calls.rs" or not (built or re.fullmatch(r" *self\.submit_\w+\(.*, options, done\)", body)):
                yield f"{name}: {call} builds no request"
    for kind, homes in KINDS.items():
        variants = re.search(rf"enum {kind}\b[^{{]*\{{\n(.*?)^\}}", "\n".join(texts.values()), re.MULTILINE | re.DOTALL)
        names = re.findall(r"^    (\w+)", variants[1], re.MULTILINE) if variants else []
        for name, text in texts.items():
            found = re.findall(rf"\b{kind}::({'|'.join(names)})\b", text) if names else []
            if found and name not in homes:
                yield f"{name} names {kind}::{found[0]}"
        for variant in names if kind == "Request" else []:
            count = len(re.findall(rf"\bRequest::{variant}\b", texts.get("api/calls.rs", "")))
            if count != 1:
                yield f"api/calls.rs builds Request::{variant} {count} times"


def test_each_kind_of_transfer_is_one_request() -> None:
    engine = TRANSFER / "engine"
    calls = SUBMIT.findall((engine / "src" / "api" / "calls.rs").read_text())
    assert len(calls) >= 10
    assert list(kinds_elsewhere(engine)) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "api/calls.rs",
            "    pub fn submit_b(&self, done: Done) -> Result<TransferId, Error> {\n        self.push(done)\n    }",
        ),
        (
            "submit/expect.rs",
            "    pub fn submit_b(&self) -> Result<TransferId, Error> {\n        self.submit_a(1, options, done)\n    }",
        ),
        ("api/calls.rs", "fn f() { Request::One { len: 0 }; }"),
        ("worker/writes.rs", "fn f(task: Task) { if let Task::Write(_) = task {} }"),
    ],
)
def test_a_transfer_past_the_requests_is_found(tmp_path: Path, name: str, line: str) -> None:
    files = {
        "submit/request.rs": "enum Request<'a> {\n    One {\n        len: &'a u64,\n    },\n}\n",
        "worker/command.rs": "enum Task {\n    Write(u64),\n}\n",
        "submit/expect.rs": "",
        "worker/writes.rs": "",
        "api/calls.rs": "    pub fn submit_a(&self, len: u64, done: Done) -> Result<TransferId, Error> {\n"
        "        self.submit(&Request::One { len }, options, done)\n    }\n",
    }
    for path, text in files.items():
        (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / path).write_text(text)
    assert list(kinds_elsewhere(tmp_path)) == []
    with (tmp_path / "src" / name).open("a") as file:
        file.write(f"{line}\n")
    assert len(list(kinds_elsewhere(tmp_path))) == 1


def test_a_crate_without_a_rule_of_its_own_has_no_unsafe_code(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "ffi.rs").write_text("    let x = unsafe { f() };\n")
    assert len(list(unsafe_elsewhere(tmp_path))) == 1


def test_the_engine_knows_no_language_that_binds_it() -> None:
    manifest = (TRANSFER / "engine" / "Cargo.toml").read_text()
    assert "pyo3" not in manifest
    assert "capi" not in manifest
    for name, text in sources(TRANSFER / "engine"):
        assert not re.search(r"\bpyo3\b|feature = \"(?:python|capi)\"|no_mangle", text), name


def test_the_compiler_denies_what_it_should() -> None:
    for crate in CRATES:
        # The C interface is unsafe throughout.
        assert ("#![deny(unsafe_code)]" in (crate / "src" / "lib.rs").read_text()) == (crate.name != "capi"), crate.name
        assert "[lints]\nworkspace = true\n" in (crate / "Cargo.toml").read_text(), crate.name
    manifest = (TRANSFER / "Cargo.toml").read_text()
    for lint in ("unwrap_used", "expect_used", "panic", "indexing_slicing", "undocumented_unsafe_blocks"):
        assert f'{lint} = "deny"' in manifest
