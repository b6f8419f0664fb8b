"""Files of the engines' own packages, as the registry has them: pinned, fetched once, and only those that tests need.

uv finds the wheel in whatever registry it is configured for; the files are read out of it with range requests, because
the wheels are large and the files are small. A digest over all files of a pin must be what upstream.toml says.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.project.checkout import ROOT, tomllib

PINS = Path(__file__).with_name("upstream.toml")
CACHE = ROOT / ".tools" / "upstream"


class Unreachable(Exception):
    """The registry cannot be asked, or does not give parts of a file."""


def require_entry_point(group: str) -> None:
    """Skips the test where putget is on the path and not installed; an older install fails."""
    try:
        importlib.metadata.distribution("putget")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("putget is not installed, so engines cannot find its plug-ins")
    assert importlib.metadata.entry_points(group=group, name="putget"), "the install is older than this: make build"


def pins() -> dict[str, dict[str, object]]:
    with PINS.open("rb") as file:
        return tomllib.load(file)


def upstream(name: str) -> Path:
    """The folder with the files of a pin; skips the test, with the reason, where they cannot be had."""
    pin = pins()[name]
    digest = str(pin["digest"])
    place = CACHE / f"{name}-{digest[:16]}"
    if not place.exists():
        needed = tuple(int(part) for part in str(pin["python"]).split("."))
        if sys.version_info < needed:
            pytest.skip(f"{pin['requirement']} needs Python {pin['python']}")
        try:
            fetched = fetch(str(pin["requirement"]), [str(pattern) for pattern in pin["files"]])  # type: ignore[attr-defined]
        except Unreachable as error:
            pytest.skip(f"{pin['requirement']}: {error}")
        found = digest_of(fetched)
        if found != digest:
            shutil.rmtree(fetched)
            raise AssertionError(f"{name}: the files of {pin['requirement']} have digest {found}, pinned is {digest}")
        try:
            fetched.rename(place)
        except OSError:  # somebody else was faster
            shutil.rmtree(fetched)
    return place


def digest_of(place: Path) -> str:
    """One SHA-256 over the names and contents of all files."""
    total = hashlib.sha256()
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(place).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def fetch(requirement: str, patterns: list[str]) -> Path:
    """A new folder in the cache with the files of a wheel whose names match one of the patterns.

    Raises:
        Unreachable: There is no uv, no network, or the registry gives no parts of files.
    """
    try:
        import remotezip
        import requests
        import urllib3
    except ModuleNotFoundError as error:
        raise Unreachable(f"{error.name} is not installed") from error
    url = wheel_url(requirement)
    session = requests.Session()
    # A file is a request, and a connection may be reset.
    session.mount("https://", requests.adapters.HTTPAdapter(max_retries=urllib3.Retry(5, backoff_factor=0.5)))
    CACHE.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        verify = ssl.get_default_verify_paths().cafile or True
        with session, remotezip.RemoteZip(url, session=session, verify=verify, timeout=30) as wheel:
            for name in wheel.namelist():
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    wheel.extract(name, place)
    except (requests.RequestException, remotezip.RemoteIOError) as error:
        shutil.rmtree(place)
        raise Unreachable(f"the wheel cannot be read: {type(error).__name__}") from error
    except BaseException:
        shutil.rmtree(place)
        raise
    return place


def wheel_url(requirement: str) -> str:
    """Where the configured registry has a wheel of this version; which platform's does not matter for Python files.

    Raises:
        Unreachable: There is no uv, or it finds none.
    """
    uv = shutil.which("uv") or str(ROOT / ".tools" / "uv")
    if not Path(uv).exists():
        raise Unreachable("uv is not there; `make build` gets it")
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--only-binary", ":all:", "--format", "pylock.toml"]
    command += ["--python", sys.executable, "--python-platform", "x86_64-manylinux_2_40", "-"]
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        result = subprocess.run(
            command, input=requirement, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unreachable("the registry does not answer") from error
    if result.returncode != 0:
        raise Unreachable(f"uv: {result.stderr.strip().splitlines()[-1] if result.stderr.strip() else 'failed'}")
    (package,) = tomllib.loads(result.stdout)["packages"]
    return str(package["wheels"][0]["url"])


if __name__ == "__main__":
    # `python -m tests.adapters.upstream NAME` prints the digest of a pin's files, for a new version or a longer list.
    pin = pins()[sys.argv[1]]
    fetched = fetch(str(pin["requirement"]), [str(pattern) for pattern in pin["files"]])  # type: ignore[attr-defined]
    print(digest_of(fetched))
    shutil.rmtree(fetched)
