"""Configuration of the documentation site: `make docs`."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Phalanx"
author = project_copyright = "The Phalanx authors"
version = release = metadata.version("phalanx")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "captions",
    "generated",
    "names",
    "preview",
    "translations",
]
html_theme = "furo"
html_title = f"Phalanx {version}"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
# The address of the published site: pictures in previews of links need it.
html_baseurl = os.environ.get("PHALANX_SITE_URL", "")
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"top_of_page_buttons": []}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Programs, records of measurements and other files outside of the site are on this page.
source_url = os.environ.get(
    "PHALANX_SOURCE_URL", "https://github.com/phalanx-dist/phalanx/blob/main"
)

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
