"""The pictures of the documentation: drawn ones are current, recorded ones complete, all shown."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"""(?:href|src)=["'](?!#)|url\((?!#)|@import|@font-face|<script""")
ABSOLUTE = re.compile(r"""(?:^|[\s"'(=])/[a-z]+/\w""")
SIZE = 100_000

CASTS = {
    "failure": (
        "phalanx run --nproc-per-node 3 train.py",
        "kill -9",
        "[rank 0] PeerLost: all_reduce",
        "was killed by SIGKILL",
        "phalanx explain",
        "Ranks at the time of the failure:",
        "Suggested fixes:",
    ),
    "watch": ("phalanx watch", "Rank 2 delays the others: 3 ranks wait for it", "waits for 2"),
}


def load_tool(name: str) -> ModuleType:
    """Import a script of `tools`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read_texts(path: Path) -> list[str]:
    """Return the texts of an SVG file."""
    tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return ["".join(element.itertext()) for element in tree.iter() if element.tag.endswith("text")]


def read_drawing(path: Path) -> tuple[list[str], list[str], list[float]]:
    """Return the texts, the colors, and the coordinates of an SVG file.

    Releases of matplotlib write styles in different ways, and place texts a little differently.
    """
    tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    texts, colors, numbers = [], [], []
    for element in tree.iter():
        if element.tag.endswith("}text"):
            texts.append("".join("".join(element.itertext()).split()))
        elif element.tag.endswith("}path"):
            colors += re.findall(r"fill: (#\w+|none)", element.get("style", ""))
            numbers += map(float, re.findall(r"-?\d+(?:\.\d+)?", element.get("d", "")))
    return texts, colors, numbers


def test_drawn_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    command = [sys.executable, "tools/draw_pictures.py", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    drawn = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg"))
    assert drawn
    for name in drawn:
        expected, found = read_drawing(tmp_path / name), read_drawing(DOCS / name)
        assert found[:2] == expected[:2], f"{name} is not that of the code: make docs"
        assert found[2] == pytest.approx(expected[2], abs=0.5), f"{name}: make docs"


@pytest.mark.parametrize("name", CASTS)
def test_recordings_are_complete_and_stand_alone(name: str) -> None:
    path = DOCS / "pictures" / f"{name}.svg"
    source, texts = path.read_text(encoding="utf-8"), read_texts(path)
    assert len(source) < SIZE
    assert not EXTERNAL.search(source)
    assert not [text for text in texts if ABSOLUTE.search(text)]
    for key in CASTS[name]:
        assert any(key in text for text in texts), key
    assert "prefers-reduced-motion" in source


def test_a_recording_at_rest_shows_its_last_frame() -> None:
    casts = load_tool("record_casts")
    frames = [casts.Frame([line], 1.0) for line in ("first", "second", "last")]
    tree = ElementTree.fromstring(casts.draw_replacing(frames, "title", columns=20))
    groups = [element for element in tree if element.get("id", "").startswith("f")]
    assert [group.get("visibility") for group in groups] == ["hidden", "hidden", None]
    assert "".join(groups[-1].itertext()).strip() == "last"


def test_recorded_text_keeps_its_columns_and_colors() -> None:
    casts = load_tool("record_casts")
    svg = casts.render_frame(["a  \x1b[1;31mb <c>\x1b[0m"], columns=20)
    first, second = ElementTree.fromstring(f"<svg>{svg}</svg>")
    assert (first.text, second.text) == ("a", "b <c>")
    places = [float(element.get("x", "nan")) for element in (first, second)]
    assert places[1] - places[0] == 3 * casts.CELL
    assert second.get("font-weight") == "bold"
    assert second.get("fill") == casts.THEME.ansi_colors[1].hex


def test_pictures_of_pages_exist_and_have_a_description() -> None:
    used = set()
    for page in PAGES:
        for text, target in PICTURE.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.relative_to(ROOT)}: {target}"
            assert len(text) > 10, f"{page.relative_to(ROOT)}: {target} has no description"
            used.add(path)
    pictures = {path for path in DOCS.rglob("pictures/*") if path.suffix in (".svg", ".png")}
    assert pictures <= used, f"no page shows {pictures - used}"
