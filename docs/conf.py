"""How Sphinx builds these pages: `make docs`. Pages are Markdown (MyST), and run as tests (`tests/test_docs.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this directory's modules, and the library of this tree

import command_help  # noqa: E402
import docstrings  # noqa: E402

import tieredemb  # noqa: E402

project = "tieredemb"
author = "The tieredemb authors"
release = version = tieredemb.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"tieredemb {release}"
html_copy_source = False

myst_heading_anchors = 3  # `page.md#heading`, as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give dtypes, shapes and units, which types would only repeat
python_maximum_signature_line_length = 88


def setup(app):
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-process-signature", docstrings.without_hidden_arguments)
    app.add_directive("command-help", command_help.CommandHelp)
