"""Configuration of the site, which `make docs` builds with Sphinx.

The pages are the Markdown files of this folder. This module adds pages for files elsewhere in the
repository, one page of reference for each public module, and `llms.txt`, a list of all pages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook

import jaxmp

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "jaxmp"
author = "the jaxmp authors"
copyright = f"2026, {author}"
version = release = jaxmp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "notebooks/*.ipynb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

html_theme = "sphinx_book_theme"
html_title = f"jaxmp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "navbar_persistent": [],  # a second field for searches
    # Pages of wide tables or outputs have no list of their sections beside the text.
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        **{page: [] for page in ("index", "findings", "chips", "failures")},
    },
}
# Blocks without a language are outputs of commands.
highlight_language = "text"
# A change of the theme must not fetch fonts or scripts from another server.
html_baseurl = ""

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True

# The placeholder of the address of the repository, and anchors that GitHub makes with scripts.
linkcheck_ignore = [r"https://git\.example/"]
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]
linkcheck_timeout = 20

# Docstrings write code between single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Page of the site -> file outside of this folder.
OUTSIDE = {
    "readme": "README.md",
    "recipe-keys": "policies/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
# Groups of the names of `jaxmp`, in the order in which a training needs them.
GROUPS = {
    "Recipes and policies": "load_recipe list_recipes Recipe Policy PolicyMap Rule get_policy",
    "Layers and code in FP32": "register_layer full_precision",
    "Training state": "TrainState get_master_params get_skip_stats check state_shardings",
    "Gradients and loss scales": "value_and_grad grad DynamicLossScale StaticLossScale NoLossScale "
    "get_loss_scale",
    "Functions and attention": "autocast dot_product_attention attention_fn",
    "Audit": "audit explain default_target doctor",
    "Debugging": "locate_nonfinite with_stats",
    "Memory and plans": "estimate_memory plan",
    "Validation and parity": "validate TrainingRun Budget parity assert_parity",
}
# Public module -> the subject of its page of reference.
MODULES = {
    "jaxmp": "Recipes, training states, audit and validation",
    "jaxmp.nnx": "Flax NNX",
    "jaxmp.optim": "Masters and skipped steps",
    "jaxmp.fp8": "FP8",
    "jaxmp.losses": "Losses",
    "jaxmp.functional": "Activations",
    "jaxmp.checkpoint": "Checkpoints",
    "jaxmp.typing": "Types and results",
    "jaxmp.errors": "Errors and warnings",
}


def copy_page(path: str) -> str:
    """Returns a Markdown file of the repository with links that are relative to this folder."""
    folder = (ROOT / path).parent
    pages = {(ROOT / file).resolve(): f"{page}.md" for page, file in OUTSIDE.items()}

    def relative(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        file = (folder / target).resolve()
        if "://" in target or not file.is_file():
            return match[0]
        page = pages.get(file) or os.path.relpath(file, DOCS)
        return f"]({page}{anchor})"

    return re.sub(r"\]\(([^)#]+)(#[^)]*)?\)", relative, (ROOT / path).read_text("utf-8"))


def link_copies(app: Sphinx, page: str, source: list[str]) -> None:
    """Replaces links to files of which the site has a copy."""
    for copied, path in OUTSIDE.items():
        source[0] = source[0].replace(f"](../{path}", f"]({copied}.md")


def public_names() -> dict[str, list[str]]:
    """Returns module -> the names that its page of reference describes.

    An object that several modules export is described by the last of them in `MODULES`.

    Raises:
      ValueError: if a public module has no page, or a public name has no docstring.
    """
    modules = {name: importlib.import_module(name) for name in MODULES}
    missing = {f"jaxmp.{each}" for each in jaxmp.__all__ if inspect.ismodule(getattr(jaxmp, each))}
    if missing - set(modules):
        raise ValueError(f"MODULES in docs/conf.py lacks {sorted(missing - set(modules))}.")
    places = {
        (each, id(getattr(module, each))): name
        for name, module in modules.items()
        for each in module.__all__
    }
    names: dict[str, list[str]] = {name: [] for name in modules}
    for (each, _), name in sorted(places.items(), key=lambda item: item[0][0].lower()):
        value = getattr(modules[name], each)
        if not inspect.ismodule(value):
            if callable(value) and not inspect.getdoc(value):
                raise ValueError(f"{name}.{each} has no docstring.")
            names[name].append(each)
    return names


def grouped(names: list[str]) -> dict[str, list[str]]:
    """Returns title -> names of `jaxmp`, in the order of `GROUPS`.

    Raises:
      ValueError: if a name is in no group, or a group has a name that is not public.
    """
    groups = {title: text.split() for title, text in GROUPS.items()}
    listed = [each for group in groups.values() for each in group]
    if sorted(listed) != sorted(names):
        raise ValueError(f"GROUPS in docs/conf.py differs in {sorted({*listed} ^ {*names})}.")
    return groups


def reference_page(name: str, title: str, names: list[str]) -> str:
    """Returns the page of reference of a module."""
    module = importlib.import_module(name)
    lines = [f"# {title}: `{name}`", "", (module.__doc__ or "").strip(), ""]
    for group, members in (grouped(names) if name == "jaxmp" else {"": names}).items():
        lines += [f"## {group}", ""] if group else []
        for each in members:
            lines += ["```{eval-rst}", *directive(name, each, getattr(module, each)), "```", ""]
    return "\n".join(lines)


def directive(module: str, name: str, value: object) -> list[str]:
    """Returns the directive that describes a public name."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return [f".. autoexception:: {module}.{name}"]
    if isinstance(value, type):
        return [f".. autoclass:: {module}.{name}", "   :members:"]
    kind = "autofunction" if callable(value) else "autodata"
    return [f".. {kind}:: {module}.{name}"]


def reference_index() -> str:
    """Returns the first page of the reference: the names by group, and the modules."""
    lines = ["# Reference", "", "| | |", "|---|---|"]
    for group, text in GROUPS.items():
        links = ", ".join(f"[`{each}`](#jaxmp.{each})" for each in text.split())
        lines.append(f"| {group} | {links} |")
    lines += ["", "```{toctree}", ":maxdepth: 1", "", *MODULES, "```"]
    return "\n".join(lines) + "\n"


def drop_docstring_of_unions(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Removes the docstring of Python's class of unions from aliases of types."""
    if typing.get_origin(value) is not None:
        lines.clear()


def write_pages(app: Sphinx) -> None:
    """Writes copied pages, pages of reference and Jupyter notebooks into this folder."""
    for page, path in OUTSIDE.items():
        write(DOCS / f"{page}.md", copy_page(path))
    (DOCS / "reference").mkdir(exist_ok=True)
    names = public_names()
    write(DOCS / "reference" / "index.md", reference_index())
    for name, title in MODULES.items():
        write(DOCS / "reference" / f"{name}.md", reference_page(name, title, names[name]))
    for path in (DOCS / "notebooks").glob("*.md"):
        write(path.with_suffix(".ipynb"), notebook(path.read_text("utf-8")))


def notebook(text: str) -> str:
    """Returns a page as a Jupyter notebook, without its outputs."""
    cells = read_myst_markdown_notebook(re.sub(r"\{download\}`[^`]+`\n\n", "", text))
    for number, cell in enumerate(cells.cells):
        cell["id"] = f"cell-{number}"  # random by default
    return nbformat.writes(nbformat.from_dict(cells), version=4)


def write(path: Path, text: str) -> None:
    """Writes a file unless it has the same text, so that Sphinx does not read it again."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Writes `llms.txt`: the title and first paragraph of each page, with a link to its source."""
    if error or app.builder.name != "html":
        return
    lines = [f"# {project}", "", f"> {first_paragraph(app, 'index')}", ""]
    for page in sorted(app.env.found_docs - {"index"}):
        title = app.env.titles[page].astext()
        lines.append(f"- [{title}](_sources/{page}.md): {first_paragraph(app, page)}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def print_links(app: Sphinx, error: Exception | None) -> None:
    """Prints a table of the links that `make links` could not open, or that lead elsewhere."""
    if error or app.builder.name != "linkcheck":
        return
    lines = Path(app.outdir, "output.json").read_text("utf-8").splitlines()
    links = [link for link in map(json.loads, lines) if link["status"] != "local"]
    rows = [
        (link["status"], f"{link['filename']}:{link['lineno']}", link["uri"], link["info"])
        for link in links
        if link["status"] not in ("working", "ignored", "unchecked")
    ]
    for row in sorted(set(rows)):
        print("  ".join(row)[:200].rstrip())
    print(f"{len({link['uri'] for link in links})} links, {len(rows)} of them listed above")


def first_paragraph(app: Sphinx, page: str) -> str:
    """Returns the first paragraph of a page, in one line."""
    paragraph = next(app.env.get_doctree(page).findall(nodes.paragraph), None)
    return "" if paragraph is None else " ".join(paragraph.astext().split())


def setup(app: Sphinx) -> None:
    """Connects the functions of this module to the build."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_copies)
    app.connect("autodoc-process-docstring", drop_docstring_of_unions)
    app.connect("build-finished", write_llms)
    app.connect("build-finished", print_links)
