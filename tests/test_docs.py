"""What the documentation shows works: its Python runs, its shell commands exist, its links lead somewhere, docstring
examples hold."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from source_imports import modules_of
from torch import nn

import tieredemb
from tieredemb.__main__ import main
from tieredemb.errors import in_documentation

REPOSITORY = Path(__file__).parents[1]
DOCS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/dlrm/README.md", *DOCS)
README_BYTES = 12 << 10  # what a newcomer reads in five minutes
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def blocks(page: str, language: str) -> Iterator[tuple[int, str]]:
    """(first line, content) of the page's code blocks in `language`."""
    text = (REPOSITORY / page).read_text()
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text[: match.start()].count("\n") + 2, match[2]


def commands(page: str) -> list[str]:
    """The page's shell commands: lines of `sh` blocks, and what looks like one in unnamed blocks and in quotes."""
    lines = [line for _, block in blocks(page, "sh") for line in block.splitlines()]
    unnamed = [line for _, block in blocks(page, "") for line in block.splitlines()]
    lines += [line for line in unnamed if line.startswith(("make ", "python -m ", "pip "))]
    prose = FENCE.sub("", (REPOSITORY / page).read_text())
    lines += re.findall(r"`((?:[A-Z_]+=\S+ )?(?:make|pip|python -m) [^`]+)`", prose)
    return list(dict.fromkeys(line for line in lines if line.strip()))


def options_of(module: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Help text of a command line, `words` being its sub-command."""
    run = main if module == "tieredemb" else importlib.import_module(f"{module}.__main__").main
    with contextlib.ExitStack() as stack:
        if module != "tieredemb":  # its main reads sys.argv
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("sys.argv", [module, *words, "--help"])
        left = stack.enter_context(pytest.raises(SystemExit))
        run([*words, "--help"]) if module == "tieredemb" else run()
    assert not left.value.code, f"{module} knows no {words}"
    return capsys.readouterr().out


def anchors(page: Path) -> set[str]:
    """What `page.md#anchor` may name: its headings, as GitHub and MyST spell them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page, "python"))])
def test_page_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page build on each other, so they run in one namespace, in order."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    try:
        for line, block in blocks(page, "python"):
            exec(
                compile("\n" * (line - 1) + block, REPOSITORY / page, "exec"), namespace
            )  # errors name the page's line
    finally:
        if torch.distributed.is_initialized():  # a page that has failed leaves no world to other tests
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any("hit_rate" in code for _, code in blocks(page, "python"))]
)
def test_page_prints_no_hit_rate_of_zero(page, tmp_path, monkeypatch, capsys):
    """The first hit rate that a reader sees is one of a cache at work, not of a first batch."""
    monkeypatch.chdir(tmp_path)
    code = [code for _, code in blocks(page, "python")]
    last = max(number for number, block in enumerate(code) if "hit_rate" in block)
    exec("\n".join(code[: last + 1]), {"__name__": "__page__"})
    printed = re.findall(r"^(0\.\d+|1\.0)(?: (0\.\d+|1\.0))?", capsys.readouterr().out, re.MULTILINE)
    assert printed
    assert all(float(rate) > 0.2 for line in printed for rate in line if rate)


def test_pages_show_python():
    assert len(list(blocks("README.md", "python"))) >= 5
    assert all(list(blocks(page, "python")) for page in DOCS if "/guides/" in page)


def test_readme_is_short():
    assert len((REPOSITORY / "README.md").read_bytes()) <= README_BYTES


def test_readme_shows_what_its_first_example_prints(capsys):
    _, example = next(blocks("README.md", "python"))
    _, printed = next(blocks("README.md", "text"))
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("command", [c for page in PAGES for c in commands(page)])
def test_pages_commands_exist(command, capsys):
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"PIP_\w+=", word)]
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        assert named, "a bare make only prints help"
        assert set(named) <= TARGETS
        arguments = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        if named == ["train"]:
            words = ["python", "-m", "examples.dlrm", "train", *shlex.split(" ".join(arguments))]
    if words[:2] == ["python", "-m"] and words[2] in ("tieredemb", "examples.dlrm"):
        given = [word.partition("=")[0] for word in words[4:] if word.startswith("--")]
        text = options_of(words[2], words[3:4], capsys)
        assert set(given) <= set(re.findall(r"--[a-z-]+", text))
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), f"no module {words[2]}"
    elif words[0] == "pip":
        assert words[1] == "install"
    elif words[0] == "torchrun":
        scripts = [word for word in words if word.endswith(".py")]
        assert scripts
        assert all(any(list(blocks(page, f"python {script}")) for page in PAGES) for script in scripts)
    elif words[0] != "make":
        assert words[0] in ("bash", "pytest"), f"unknown command {command!r}: teach this test to check it"


def test_pages_extras_exist():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = "".join((REPOSITORY / page).read_text() for page in PAGES)
    named = {extra for group in re.findall(r"(?:tieredemb|\.)\[([\w,]+)\]", texts) for extra in group.split(",")}
    assert named
    assert named <= set(extras)


@pytest.mark.parametrize("page", PAGES)
def test_pages_local_links_exist(page):
    path = REPOSITORY / page
    for link, anchor in LINK.findall(FENCE.sub("", path.read_text())):
        target = path.parent / link if link else path
        if "://" not in link:
            assert target.exists(), f"no {link}"
            assert not anchor or anchor in anchors(target), f"no heading {anchor} in {link or page}"


# --- what messages say of pages ---------------------------------------------------------------------------------------

NOT_INSTALLED = re.compile(r"\b(docs|guides|benchmarks|examples|tests|tools)/|\w\.(md|rst)\b|\b(README|CONTRIBUTING)\b")


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, content) of the strings of a module, without its docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("name", modules_of(REPOSITORY / "tieredemb"))
def test_messages_cite_no_file_that_an_installed_library_lacks(name):
    tree = ast.parse(modules_of(REPOSITORY / "tieredemb")[name].read_text())
    assert not [(line, text) for line, text in texts_of(tree) if NOT_INSTALLED.search(text)], "see in_documentation"


def test_messages_cite_pages_that_there_are():
    sections = {}
    for page in DOCS:
        title, *others = HEADING.findall(FENCE.sub("", (REPOSITORY / page).read_text())) or [""]
        sections[title] = others
    trees = [ast.parse(path.read_text()) for path in modules_of(REPOSITORY / "tieredemb").values()]
    cited = [
        [ast.literal_eval(argument) for argument in node.args]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == in_documentation.__name__
    ]
    assert cited
    assert all(section in sections[title] for title, section in cited)


# --- docstrings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, path in modules_of(REPOSITORY / "tieredemb").items() if EXAMPLE.search(path.read_text())]
)
def test_docstring_examples_hold(name, tmp_path, monkeypatch):
    """Those of what the reference has none of, too: methods, and what is internal."""
    monkeypatch.chdir(tmp_path)
    names = {public: getattr(tieredemb, public) for public in tieredemb.__all__}
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names | {"torch": torch, "nn": nn, "tieredemb": tieredemb})
    assert result.failed == 0
    if not result.attempted:
        pytest.skip("its examples are all marked +SKIP")


def documented() -> dict[str, object]:
    """What the API reference documents by its name: public classes and functions, and what modules return."""
    names = re.findall(
        r"^\.\. auto(?:class|function):: ([\w.]+)$", (REPOSITORY / "docs/api.md").read_text(), re.MULTILINE
    )
    return {name: pkgutil.resolve_name(name) for name in names}


def test_reference_has_all_public_names():
    names = {name.removeprefix("tieredemb.") for name in documented()}
    assert set(tieredemb.__all__) - names == {"TieredEmbError"}, "it is with the errors"


@pytest.mark.parametrize("name", [*documented(), "tieredemb.TieredEmbError"])
def test_public_names_have_an_example(name, tmp_path, monkeypatch):
    """It runs after the lines that the reference begins with, and has nothing internal."""
    monkeypatch.chdir(tmp_path)
    value = pkgutil.resolve_name(name)
    names = {"torch": torch, "nn": nn, "tieredemb": tieredemb}
    if value.__name__ not in tieredemb.__all__:  # what modules return, and operators
        names[value.__name__] = value
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=names)
    assert example.examples
    internal = r"\btieredemb\.(?!ops\b|errors\b)[a-z_]+\.|(?:from|import) tieredemb\.(?!ops\b|errors\b)"
    assert not re.search(internal, "".join(each.source for each in example.examples))
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.fixture
def site(monkeypatch):
    """The modules of the built documentation, by name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return importlib.import_module


@pytest.fixture
def as_rst(site):
    """How the built documentation reads docstrings."""
    return site("docstrings").as_rst


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Of `x`, as `prefetch(loader)`.", "Of ``x``, as :py:obj:`prefetch(loader) <tieredemb.prefetch>`."),
        ("As `torch.nn.EmbeddingBag.\nfrom_pretrained` does.", "As ``torch.nn.EmbeddingBag.from_pretrained`` does."),
        ("(*input.shape, D), not `*args`", r"(\*input.shape, D), not ``*args``"),
        ("It.\n\n`a`: int64\n(N,) · `b`, `c`: more. No.", "It.\n\n- ``a``: int64 (N,)\n- ``b``, ``c``: more\n\nNo."),
        ("`a`: one thing. Nothing else.", "``a``: one thing. Nothing else."),
        ("- `a`: x\n- `b`: y", "- ``a``: x\n- ``b``: y"),
        (">>> f(`x`)\n2 * 3", ">>> f(`x`)\n2 * 3"),
    ],
)  # fmt: skip
def test_docstrings_become_restructured_text(as_rst, written, shown):
    assert as_rst(written) == shown + "\n"


# --- the site ---------------------------------------------------------------------------------------------------------


def test_signatures_have_the_types_of_their_source(site):
    arguments, returned = site("signatures").written(tieredemb.prefetch)
    assert arguments.startswith("(loader: Iterable[B], model: torch.nn.Module, depth: int = 1, *, ids_of: Callable")
    assert returned == "Iterable[B]"
    arguments, returned = site("signatures").written(tieredemb.TieredEmbeddingBag)
    assert "capacity: Capacity = 0.01" in arguments
    assert "_weight" not in arguments
    assert returned is None


def test_reference_names_every_optimizer_that_an_argument_takes():
    written = re.search(r"py:type:: Optimizer\n   :canonical: (.*)", (REPOSITORY / "docs" / "api.md").read_text())[1]
    ours = {name for name in tieredemb.__all__ if hasattr(getattr(tieredemb, name), "step_terms")}
    assert ours == set(re.findall(r"(?<![\w.\[])[A-Z]\w+", written)) - {"None"}


def test_signatures_have_a_type_for_each_argument(site):
    for name, value in documented().items():
        arguments = [
            each for each in inspect.signature(value).parameters if f"{each}:" in site("signatures").written(value)[0]
        ]
        assert set(inspect.signature(value).parameters) - set(arguments) <= site("signatures").HIDDEN, name


def test_site_has_the_pages_that_lie_outside(site):
    outside = site("outside")
    on_site = {path.relative_to(REPOSITORY).as_posix() for path in outside.pages()}
    assert on_site == {page for page in PAGES if not page.startswith("docs/")}
    front = outside.as_page(REPOSITORY / "docs" / "index.md", (REPOSITORY / "docs" / "index.md").read_text())
    assert front.startswith((REPOSITORY / "README.md").read_text()[:100])


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[a](guides/tiers.md#files)", "[a](guides/tiers.md#files)"),
        ("example.md", "```{include} ../examples/dlrm/README.md\n```", "(guides/sharding.md)"),
        ("guides/tiers.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("guides/tiers.md", "[a](https://example.com/README.md)", "[a](https://example.com/README.md)"),
    ],
)
def test_links_lead_to_pages_of_the_site(site, page, written, shown):
    assert shown in site("outside").as_page(REPOSITORY / "docs" / page, written)
