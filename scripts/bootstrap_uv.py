"""Put uv (the Python package installer) into a folder of the checkout, with nothing but the standard library.

Debian and Ubuntu split pip and venv off their Python, so neither can be counted on. This program asks the package
index for uv's wheel, checks its SHA-256 sum and unpacks the one executable. It honours uv's own UV_DEFAULT_INDEX.

Usage: bootstrap_uv.py DIRECTORY
"""

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile

APT_HINT = "Install it by other means, for example: apt-get install pipx && pipx install uv && pipx ensurepath"


def fetch(url: str, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "putget-bootstrap"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


def links(page: bytes, base: str) -> "list[tuple[str, str, str]]":
    """Return (file name, address, SHA-256) of every file of an index page, JSON (PEP 691) or HTML (PEP 503)."""
    if page.lstrip().startswith(b"{"):
        return [
            (file["filename"], urllib.parse.urljoin(base, file["url"]), file["hashes"].get("sha256", ""))
            for file in json.loads(page)["files"]
            if not file.get("yanked")
        ]
    found = []
    for href in re.findall(r'href="([^"]+)"', page.decode()):
        address, _, fragment = urllib.parse.urljoin(base, href).partition("#")
        found.append((urllib.parse.unquote(address.rsplit("/", 1)[-1]), address, fragment.replace("sha256=", "")))
    return found


def newest_wheel(files: "list[tuple[str, str, str]]") -> "tuple[str, str, str]":
    libc = "musllinux" if "musl" in subprocess.getoutput("ldd --version") else "manylinux"
    pattern = re.compile(rf"uv-(\d+)\.(\d+)\.(\d+)-py3-none-.*{libc}.*_{platform.machine()}\.whl$")
    wheels = [(tuple(map(int, match.groups())), file) for file in files if (match := pattern.match(file[0]))]
    if not wheels:
        raise LookupError(f"the index has no uv wheel for {libc} {platform.machine()}")
    return max(wheels)[1]


def main(directory: str) -> None:
    page_url = os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple").rstrip("/") + "/uv/"
    page = fetch(page_url, "application/vnd.pypi.simple.v1+json, text/html;q=0.5")
    name, address, digest = newest_wheel(links(page, page_url))
    wheel = fetch(address)
    if hashlib.sha256(wheel).hexdigest() != digest:
        raise ValueError(f"{name}: the SHA-256 sum is not the index's")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        member = next(path for path in archive.namelist() if path.endswith(".data/scripts/uv"))
        content = archive.read(member)
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, "uv")
    with open(target + ".part", "wb") as file:
        file.write(content)
    os.chmod(target + ".part", 0o755)
    os.replace(target + ".part", target)
    print(f"{name} -> {target}")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (OSError, LookupError, ValueError, StopIteration) as error:
        sys.exit(f"Could not fetch uv: {error}\n{APT_HINT}")
