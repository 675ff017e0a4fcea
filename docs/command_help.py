"""The directive `command-help`: what `python -m tieredemb COMMAND --help` prints, as it is when the page is built."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive

from tieredemb.__main__ import main

COLUMNS = "100"


class CommandHelp(Directive):
    """Its argument is the command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        plain = mock.patch.dict(os.environ, COLUMNS=COLUMNS, NO_COLOR="1")
        with plain, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([self.arguments[0], "--help"])
        text = printed.getvalue()
        return [nodes.literal_block(text, text, language="text")]
