"""tools/check_site.py: defects of a built site are found; `make docs` runs it on the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_site import find_defects

PROGRAM = '''"""Say 1 < 2."""

import sys


def say(*words: str) -> None:
    print(*words)


say(*sys.argv)
'''
SOURCE = "# Page\n\n```console\n$ python say.py\n```\n"
# As Sphinx writes them, with the highlighting of Pygments.
FIRST = '<span class="sd">&quot;&quot;&quot;Say 1 &lt; 2.&quot;&quot;&quot;</span>\n\nimport sys\n'
SECOND = "def say(*words: str) -&gt; None:\n    print(*words)\n"
THIRD = "say(*sys.argv)\n"


def listing(text: str, address: str = "https://example.org/examples/tutorial/say.py") -> str:
    return (
        '<div class="literal-block-wrapper docutils container" id="id1">\n'
        f'<div class="code-block-caption"><span class="caption-text"><a href="{address}">'
        '<code><span class="pre">say.py</span></code></a></span>'
        '<a class="headerlink" href="#id1">¶</a></div>\n'
        f'<div class="highlight-python notranslate"><div class="highlight"><pre><span></span>{text}'
        "</pre></div>\n</div>\n</div>\n"
    )


def session(text: str) -> str:
    return f'<div class="highlight-console"><div class="highlight"><pre>{text}</pre></div></div>'


SESSION = session('<span class="gp">$ </span>python<span> </span>say.py\n')
LISTINGS = listing(FIRST) + listing(SECOND) + listing(THIRD)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one page of the tutorial, and its site in `site`."""
    for path, text in (
        ("examples/tutorial/say.py", PROGRAM),
        ("docs/tutorial/say.md", SOURCE),
        ("site/tutorial/say.html", make_page()),
        ("site/ko/tutorial/say.html", make_page()),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def make_page(body: str = LISTINGS + SESSION, title: str = "Page", more: str = "") -> str:
    return (
        f"<!doctype html><head><title>{title}</title></head><body><svg><title>Icon</title></svg>"
        f'<h1 id="page">Page</h1><pre>no listing</pre>{body}{more}</body>'
    )


def test_a_site_without_defects(root: Path) -> None:
    links = (
        '<a href="#page"><img src="a.svg" alt="A"></a><a href="say.html#id1">1</a><a href="#">2</a>'
    )
    (root / "site/tutorial/say.html").write_text(make_page(more=links))
    assert find_defects(root / "site", root) == []


@pytest.mark.parametrize(
    ("page", "defect"),
    [
        (make_page(title=""), "no title"),
        (make_page(more='<img src="a.svg" alt=" ">'), "the picture a.svg has no alternative text"),
        (make_page(more='<img src="a.svg">'), "the picture a.svg has no alternative text"),
        (make_page(more='<a href="b.html">b</a>'), "the link b.html leads nowhere"),
        (
            make_page(more='<a href="#absent">b</a>'),
            "the link #absent leads to no place of that page",
        ),
        (
            make_page(listing(FIRST) + listing(THIRD) + SESSION),
            "its listings are not examples/tutorial/say.py, typed one after another",
        ),
        (
            make_page(LISTINGS + listing(THIRD) + SESSION),
            "its listings are not examples/tutorial/say.py, typed one after another",
        ),
        (
            make_page(listing(FIRST) + listing(SECOND.replace("    ", " ")) + listing(THIRD)),
            "its listings are not examples/tutorial/say.py, typed one after another",
        ),
        (
            make_page(LISTINGS + listing("", "https://example.org/absent.py") + SESSION),
            "the caption 'https://example.org/absent.py' names no program in examples/tutorial",
        ),
        (
            make_page(LISTINGS + session("$ python other.py\n")),
            "its console sessions are not those of docs/tutorial/say.md",
        ),
    ],
)
@pytest.mark.parametrize("folder", ["tutorial", "ko/tutorial"])
def test_a_defect_of_a_page(folder: str, page: str, defect: str, root: Path) -> None:
    (root / "site" / folder / "say.html").write_text(page)
    assert f"{folder}/say.html: {defect}" in find_defects(root / "site", root)


def test_a_program_without_a_page(root: Path) -> None:
    (root / "site/ko/tutorial/say.html").unlink()
    expected = ["ko/tutorial: no page has the listing of examples/tutorial/say.py"]
    assert find_defects(root / "site", root) == expected


def test_a_site_that_was_not_built(root: Path) -> None:
    assert find_defects(root / "absent", root)[0].endswith("build the site first, with `make docs`")
