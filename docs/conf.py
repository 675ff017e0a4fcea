"""How Sphinx builds these pages: `make docs`. Pages are Markdown (MyST), and run as tests (`tests/test_docs.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this directory's modules, and the library of this tree

import command_help  # noqa: E402
import docstrings  # noqa: E402
import outside  # noqa: E402
import signatures  # noqa: E402

import tieredemb  # noqa: E402

project = "tieredemb"
author = "the tieredemb authors"
copyright = f"2026, {author}"
release = version = tieredemb.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"tieredemb {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3  # `page.md#heading`, as on GitHub

autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"  # of properties; those of functions and classes: see signatures.py
autodoc_typehints_format = "short"
autodoc_type_aliases = {"TableTensor": "torch.Tensor"}
python_maximum_signature_line_length = 88
nitpick_ignore_regex = [  # types of others, whose pages a build has no network to read
    (
        "py:class",
        r"torch\..*|os\.PathLike|timedelta|contextlib\..*|Any|Callable|Iterable|Iterator|Mapping|Sequence|[BR]",
    ),
]


def setup(app):
    app.connect("source-read", outside.read)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-process-signature", signatures.process)
    app.add_directive("command-help", command_help.CommandHelp)
