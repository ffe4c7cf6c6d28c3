"""Links of all pages lead to files, and anchors to headings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", ROOT / "tools" / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_all_pages(check_links: ModuleType) -> None:
    pages = check_links.list_pages(ROOT)
    names = {page.relative_to(ROOT).as_posix() for page in pages}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "docs/ko/README.md"} <= names
    assert check_links.find_broken_links(pages, ROOT) == []


@pytest.mark.parametrize(
    ("target", "defect"),
    [
        ("other.md#two-words-of-code", ""),
        ("other.md#two-words-of-code-1", ""),
        ("#제목", ""),
        ("other.md#in-a-block", "no such heading"),
        ("other.md#absent", "no such heading"),
        ("absent.md", "no such file"),
        ("../../absent.md", "outside of the repository"),
        ("program.py#L1", "an anchor of what is no page"),
        ("https://example.com/a?b#c", ""),
        ("https://", "not a URL of http or https"),
        ("https://[broken", "Invalid IPv6 URL"),
        ("htp://example.com", "not a URL of http or https"),
        ("mailto:nobody", "not an address"),
        ("", "no target"),
    ],
)
def test_a_link(check_links: ModuleType, target: str, defect: str, tmp_path: Path) -> None:
    page, root = tmp_path / "page.md", tmp_path.resolve()
    (tmp_path / "program.py").touch()
    (tmp_path / "other.md").write_text(
        "# Two words of `code`\n\n```sh\n# In a block\n```\n\n## Two words, of code\n"
    )
    page.write_text(f"# 제목\n\n`[no](link)`\n\n```text\n[no](link)\n```\n\n[a link]({target})\n")
    expected = [f"page.md:9: {target}: {defect}"] if defect else []
    assert check_links.find_broken_links([page.resolve()], root) == expected
