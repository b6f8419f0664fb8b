"""Tables and pictures as the site's hook makes them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.project.checkout import ROOT

pytest.importorskip("mkdocs", reason="needs mkdocs")


def content(html: str) -> str:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec
    assert spec.loader
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return str(hooks.on_page_content(html, page=None))


def test_each_cell_has_the_name_of_its_column() -> None:
    html = (
        "<table>\n<thead>\n<tr>\n<th></th>\n<th style='text-align: right;'>us</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n"
        "<td><code>a</code> b</td>\n<td style='text-align: right;'>8.2</td>\n</tr>\n</tbody>\n</table>"
    )
    made = content(html)
    assert "<td><span><code>a</code> b</span></td>" in made
    assert "<td data-label=\"us\" style='text-align: right;'><span>8.2</span></td>" in made
    assert made.count("<th") == html.count("<th")


def test_a_picture_leads_to_itself() -> None:
    assert content('<p><img alt="a" src="b.png" /></p>') == (
        '<p><a class="large" href="b.png"><img alt="a" src="b.png" /></a></p>'
    )


def test_a_picture_in_a_link_stays() -> None:
    assert content('<a href="c"><img src="b.png"></a>') == '<a href="c"><img src="b.png"></a>'
