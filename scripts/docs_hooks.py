"""Facts about this repository that MkDocs does not know: links to files outside of docs/, tables on a phone, pictures.

A link to a file outside (``../examples/layer.py``) works where the page is read in the checkout. In the site the file
lies under ``repository/``, and the link leads there. A link to a file that is missing is a warning, which fails a
strict build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LOG = logging.getLogger("mkdocs.hooks.repository")
_LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]+)(?:#[^)]*)?\)")


def _outside(markdown: str, page: Path, docs: Path) -> Iterator[tuple[str, Path]]:
    """Every link of a page that leaves docs/: as it is written, and the file that it names."""
    for found in _LINK.finditer(markdown):
        file = Path(os.path.normpath(page.parent / found["target"]))
        if not file.is_relative_to(docs):
            yield found["target"], file


def _uri(file: Path, root: Path) -> str:
    """Where the site has the file. A page of Markdown is shown as text: it is none of the site's."""
    suffix = ".txt" if file.suffix == ".md" else ""
    return f"repository/{file.relative_to(root).as_posix()}{suffix}"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files that pages link to."""
    docs = Path(config.docs_dir)
    for page in list(files.documentation_pages()):
        source = Path(page.abs_src_path or "")
        for target, file in _outside(page.content_string, source, docs):
            if not file.is_file():
                _LOG.warning("%s links to %s, and there is no such file", page.src_uri, target)
            elif files.get_file_from_path(_uri(file, docs.parent)) is None:
                files.append(File.generated(config, _uri(file, docs.parent), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Leads the links there."""
    docs = Path(config.docs_dir)
    here = posixpath.dirname(page.file.src_uri)
    for target, file in set(_outside(markdown, Path(page.file.abs_src_path), docs)):
        if file.is_file():
            markdown = markdown.replace(f"]({target}", f"]({posixpath.relpath(_uri(file, docs.parent), here or '.')}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Gives each cell the name of its column, for phones (docs/site.css), and each picture a link to itself."""
    html = _TABLE.sub(_label, html)
    return _PICTURE.sub(r'<a class="large" href="\2">\1</a>', html)


_TABLE = re.compile(r"<table>\n.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_PICTURE = re.compile(r'(?<!">)(<img [^>]*?src="([^"]+)"[^>]*>)')


def _label(table: re.Match[str]) -> str:
    head, _, body = table[0].partition("</thead>")
    names = [re.sub(r"<[^>]+>", "", name).strip() for name in re.findall(r"<th(?: [^>]*)?>(.*?)</th>", head, re.DOTALL)]

    def row(found: re.Match[str]) -> str:
        left = iter(names)

        def cell(part: re.Match[str]) -> str:
            name = next(left, "").replace('"', "&quot;")
            label = f' data-label="{name}"' if name else ""
            return f"<td{label}{part[1]}><span>{part[2]}</span></td>"

        return _CELL.sub(cell, found[0])

    return f"{head}</thead>{_ROW.sub(row, body)}"


_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
