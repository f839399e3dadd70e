"""Imports, contents of the wheel, texts of the repository, and the commands of make and CI."""

import ast
import collections
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import statistics
import subprocess
import tomllib
import typing
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import jaxmp
from conftest import VERSION_SENSITIVE
from processes import run_python, run_script
from sources import ROOT, text_of

HEAVY = {"flax", "orbax", "matplotlib", "rich", "typer"}
HEAVY |= {"jax._src.pallas", "jaxmp._tools", "jaxmp._tools.audit", "jaxmp.checkpoint"}
# They are imported when they are first used.
LAZY = ("_attention", "_autocast", "_gradients._fp32", "_gradients._value_and_grad", "losses")
HEAVY |= {f"jaxmp.{name}" for name in LAZY}


# ---------------------------------------------------------------------------
# Imports
# ---------------------------------------------------------------------------


def loaded_by(*statements: str) -> list[set[str]]:
    """Returns the heavy packages that are loaded after each statement of a new interpreter."""
    code = "\n".join(f"{statement}\nprint(*sys.modules)" for statement in statements)
    return [HEAVY & set(line.split()) for line in run_python(f"import sys\n{code}").splitlines()]


def test_import_loads_nothing_heavy():
    lazy = "jaxmp.attention_fn, jaxmp.grad, jaxmp.losses, jaxmp.autocast"
    first, second, third = loaded_by("import jaxmp", lazy, "jaxmp.TrainState, jaxmp.audit")
    assert first == set()
    assert second == {f"jaxmp.{name}" for name in LAZY}
    assert third >= {"flax", "jaxmp._tools.audit"}


@pytest.mark.parametrize(
    ("package", "name", "purpose"),
    [("flax", "TrainState", ""), ("orbax", "checkpoint", "; jaxmp requires it for checkpoints")],
)
def test_a_missing_package_names_an_extra_that_exists(package, name, purpose):
    absent = f"import sys; sys.modules[{package!r}] = None\nimport jaxmp\n"
    attempt = (
        f"try: jaxmp.{name}\nexcept jaxmp.errors.MissingDependencyError as error: print(error)"
    )
    message = run_python(absent + attempt)
    assert f"{package} is not installed{purpose}" in message
    extra = re.search(r'pip install "jaxmp\[(\w+)\]"', message)[1]
    assert any(need.startswith(package) for need in project()["optional-dependencies"][extra])


# Parts of the engine of traced programs, which alone loop over equations.
ENGINE = ("_programs/",)
# Number of places that read the parameters of an equation outside of the engine.
PARAMETER_READS = 3
# Objects with `params` that are not equations.
OWNERS = {
    *("state", "ctx", "run", "entry", "self", "candidate", "first", "inferred", "params", "_run")
}


def iterated(tree: ast.Module) -> list[ast.expr]:
    """Returns the expressions over which the loops and comprehensions of a module run."""
    loops = (ast.For, ast.comprehension)
    return [node.iter for node in ast.walk(tree) if isinstance(node, loops)]


def parameter_reads(tree: ast.Module) -> int:
    """Returns how often a module reads `params` of an object that may be an equation."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "params" and id(node) not in called:
            owner = node.value
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            count += name not in OWNERS
    return count


def outside_the_engine() -> dict[str, ast.Module]:
    package = ROOT / "jaxmp"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return {
        name: ast.parse(path.read_text("utf-8"))
        for name, path in files.items()
        if not name.startswith((*ENGINE, "_core/_compat/"))
    }


def test_the_engine_alone_loops_over_equations():
    loops = {
        name: sum(".eqns" in ast.unparse(each) for each in iterated(tree))
        for name, tree in outside_the_engine().items()
    }
    assert {name: count for name, count in loops.items() if count} == {}
    example = "for x in reversed(j.eqns): pass\nn = [e for i, e in enumerate(b.eqns)]"
    assert sum(".eqns" in ast.unparse(each) for each in iterated(ast.parse(example))) == 2


def test_the_engine_alone_lists_calls():
    names = {"closed_call", "eval_jaxpr", "remat2", "core_call", "scan", "shard_map"}
    lists = {
        name
        for name, tree in outside_the_engine().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    }
    # The table of operations has a row for each of them.
    assert lists == {"_policies/_op_table.py"}


def test_few_places_read_the_parameters_of_equations():
    reads = {name: parameter_reads(tree) for name, tree in outside_the_engine().items()}
    assert sum(reads.values()) <= PARAMETER_READS, {k: n for k, n in reads.items() if n}
    assert parameter_reads(ast.parse("e.params['x'] + state.params['w'] + run.params(x)")) == 1


THIRD_PARTY = {"jax", "jaxlib", "flax", "optax", "orbax"}
# Underscored names of the standard library, and those that jaxmp sets on classes of users.
OWN_NAME = re.compile(r"_replace|_asdict|_fields|_make|_exit|_jaxmp_\w+")


def is_private(path: str) -> bool:
    """Returns True if a part of a dotted name has one leading underscore."""
    return any(re.match(r"_(?!_)", part) for part in path.split("."))


def defined_names(trees: list[ast.Module]) -> set[str]:
    """Returns all names that modules define or set."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                names.add(node.attr)
            case ast.Import() | ast.ImportFrom():
                names.update(each.asname or each.name for each in node.names)
    return names


def private_uses(tree: ast.Module, own: set[str]) -> list[str]:
    """Returns the private names of other packages that a module imports or reads.

    `own` contains the underscored names that jaxmp defines. Any other one belongs to an object of
    JAX or Flax.
    """
    uses = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                uses += [each.name for each in node.names]
            case ast.ImportFrom(module=str(module)):
                uses += [f"{module}.{each.name}" for each in node.names]
            case ast.Attribute() if is_private(node.attr) and node.attr not in own:
                uses += [f"jax.{node.attr}"] * (OWN_NAME.fullmatch(node.attr) is None)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                uses.append(text)
    return [use for use in uses if use.split(".")[0] in THIRD_PARTY and is_private(use)]


def package_trees() -> dict[str, ast.Module]:
    files = (ROOT / "jaxmp").rglob("*.py")
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text("utf-8")) for file in files}


def test_private_names_of_jax_and_flax_are_used_in_one_module():
    trees = package_trees()
    own = {name for name in defined_names(list(trees.values())) if is_private(name)}
    own |= {part for name in trees for part in re.split(r"[/.]", name)}
    uses = {name: private_uses(tree, own) for name, tree in trees.items()}
    compat = [name for name in uses if name.startswith("jaxmp/_core/_compat/")]
    assert any([uses.pop(name) for name in compat])
    assert {name: found for name, found in uses.items() if found} == {}


# Modules, and names, of other rooms that a file imports (median, 90 %, most), and the number of
# public names that several files define. A change may only lower them.
MODULES_OF_OTHERS, NAMES_OF_OTHERS, SHARED_NAMES = (2, 6, 10), (3, 8, 15), 24
# Rooms whose `__init__` lists all that other rooms use.
WHOLE_ROOMS = ("_core", "_programs")


def room_of(module: str) -> str:
    """Returns the package or module below `jaxmp`, or below `jaxmp._tools`, that has a module."""
    first, second, *_ = [*module.split(".")[1:], "", ""]
    return f"_tools.{second}" if first == "_tools" else first


def imports_of(tree: ast.Module, modules: set[str]) -> list[tuple[str, str]]:
    """Returns (module of jaxmp, imported name) for each import of a file, except from entries."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    pairs = ((node.module or "", each.name) for node in nodes for each in node.names)
    whole = lambda module, name: f"{module}.{name}" if f"{module}.{name}" in modules else module
    imports = ((whole(*pair), pair[1]) for pair in pairs if pair[0].startswith("jaxmp"))
    return [pair for pair in imports if room_of(pair[0]) not in ("", "typing", "errors")]


def modules_of_package() -> dict[str, ast.Module]:
    trees = {name[:-3].replace("/", "."): tree for name, tree in package_trees().items()}
    return {name.removesuffix(".__init__"): tree for name, tree in trees.items()}


def imports_of_others(trees: dict[str, ast.Module]) -> dict[str, list[tuple[str, str]]]:
    """Returns for each module what it imports from other rooms."""
    return {
        name: [each for each in imports_of(tree, set(trees)) if room_of(each[0]) != room_of(name)]
        for name, tree in trees.items()
    }


def are_within(counts: Iterable[int], limits: tuple[int, int, int]) -> bool:
    """Returns True if the median, the 90 % quantile and the largest number are within limits."""
    values = sorted(counts)
    spread = statistics.median(values), values[int(0.9 * (len(values) - 1))], values[-1]
    return all(value <= limit for value, limit in zip(spread, limits, strict=True))


def test_a_file_knows_few_others_and_a_training_none_of_the_tools():
    trees = modules_of_package()
    others = imports_of_others(trees)
    rooms = [n for n in trees if room_of(n) not in ("", "__main__", "typing")]
    modules = {name: len({module for module, _ in others[name]}) for name in rooms}
    most = max(modules, key=modules.__getitem__)
    assert are_within(modules.values(), MODULES_OF_OTHERS), most
    assert are_within((len(others[name]) for name in rooms), NAMES_OF_OTHERS)
    trainings = {name: others[name] for name in rooms if "._tools" not in name}
    assert [n for n, pairs in trainings.items() if any("._tools" in m for m, _ in pairs)] == []
    defined = collections.Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    )
    shared = [name for name, count in defined.items() if count > 1]
    assert len(shared) <= SHARED_NAMES, sorted(shared)
    assert len(others["jaxmp._tools.audit._explain"]) > 5 and len(trees) > 100


def test_no_file_has_more_than_500_lines():
    lengths = {p: p.read_text("utf-8").count("\n") for p in (ROOT / "jaxmp").rglob("*.py")}
    assert len(lengths) > 100 and not [p for p, length in lengths.items() if length > 500]


@pytest.mark.parametrize("room", WHOLE_ROOMS)
def test_the_lowest_rooms_are_imported_as_a_whole(room):
    trees = modules_of_package()
    others = imports_of_others(trees)
    package = f"jaxmp.{room}"
    pairs = [(name, *pair) for name in trees for pair in others[name] if room_of(pair[0]) == room]
    inside = [each for each in pairs if not f"{each[1]}.".startswith("jaxmp._core._compat.")]
    assert [each for each in inside if each[1] != package] == []
    used = {name for _, module, name in pairs if module == package}
    used |= {
        node.attr
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == room != room_of(name)
    }
    listed = {pair[1] for pair in imports_of(trees[package], set(trees))}
    assert listed - used == set() and len(listed) > 50


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from flax.nnx import _graph",
        "import jax\njax._src.core.trace_state_clean()",
        "import flax.linen as nn\nnn.module._context.call_info_stack",
        "module._state.in_setup = True",
        "importlib.import_module('jax._src.core')",
    ],
)
def test_the_test_of_private_names_can_fail(source):
    assert private_uses(ast.parse(source), {"_state_of"})


def test_import_works_without_private_modules_of_jax():
    """Private modules that another version of JAX may move."""
    names = ("core", "pjit", "mesh", "interpreters.partial_eval", "cudnn.fused_attention_stablehlo")
    code = f"""
import importlib, jax
load = importlib.import_module
moved = {["jax._src." + name for name in names]!r}
def load_or_fail(name, *args):
    if name in moved:
        raise ImportError(name)
    return load(name, *args)
importlib.import_module = load_or_fail
import jaxmp, jax.numpy as jnp
print(jax.jit(jaxmp.autocast(lambda x: x @ x, "bf16"))(jnp.ones((2, 2))).dtype)
"""
    assert run_python(code) == "float32\n"


# ---------------------------------------------------------------------------
# Packaging
# ---------------------------------------------------------------------------


def project() -> dict:
    return tomllib.loads(text_of("pyproject.toml"))["project"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = ("-m", "hatchling", "build", "--target", "wheel", "--directory", out)
    done = run_script(*build, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_ships_code_policies_and_license(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith(f"jaxmp-{jaxmp.__version__}-")
    assert {f"jaxmp/policies/{file.name}" for file in (ROOT / "policies").iterdir()} <= names
    files = [*(ROOT / "jaxmp").rglob("*.py"), *(ROOT / "jaxmp").rglob("*.css")]
    sources = {file.relative_to(ROOT).as_posix() for file in files}
    assert sources <= names
    # Type checkers read the annotations of an installed package only if it contains this file.
    assert "jaxmp/py.typed" in names
    assert f"jaxmp-{jaxmp.__version__}.dist-info/licenses/LICENSE" in names
    strays = {name for name in names if not name.startswith(("jaxmp/", "jaxmp-"))}
    assert strays == set()


def test_wheel_finds_its_own_policies(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # A package `jaxmp.policies` would make the names of recipes mean policies without masters.
    code = """
import json, jaxmp
texts = {name: jaxmp.load_recipe(name).to_toml() for name in jaxmp.list_recipes()}
print(json.dumps([jaxmp.__file__, texts]))
"""
    file, texts = json.loads(run_python(code, path=tmp_path, cwd=tmp_path))
    assert Path(file).is_relative_to(tmp_path)
    assert set(texts) == {file.stem for file in (ROOT / "policies").glob("*.toml")}
    assert texts == {name: jaxmp.load_recipe(name).to_toml() for name in texts}


def test_changelog_has_this_version():
    assert f"\n## [{jaxmp.__version__}]" in text_of("CHANGELOG.md")


# ---------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------

# An absolute path on a specific machine.
MACHINE_PATH = re.compile(r"(?<![\w./~])/(?:work|root|home|tmp|opt|Users|mnt)/\w")
TEXT = {".md", ".py", ".toml", ".json", ".txt", ".cfg", ".yml", ""}
FOLDERS = (".ci", "benchmarks", "docs", "examples", "jaxmp", "policies", "tests")


def repository_texts() -> list[Path]:
    # In a worktree `.git` is a file, with the path of the repository.
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    generated = {ROOT / "docs/_build", ROOT / "docs/reference"}
    texts = [path for path in top + below if path.suffix in TEXT]
    return [path for path in texts if not generated & set(path.parents)]


def test_no_text_names_a_machine_path():
    texts = {
        # Saved checkpoints contain arrays, too.
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8", errors="replace")
        for path in repository_texts()
    }
    assert {"README.md", ".ci/run", "Makefile", "jaxmp/__init__.py", "policies/bf16.toml"} <= set(
        texts
    )
    assert [name for name, text in texts.items() if MACHINE_PATH.search(text)] == []


@pytest.mark.parametrize("folder", ["work/main", "root/x", "home/me", "tmp/a", "Users/me"])
def test_the_machine_path_test_can_fail(folder):
    assert MACHINE_PATH.search(f'open("/{folder}")')


def test_install_lines_have_the_address_of_the_project():
    address = runpy.run_path(str(ROOT / "docs" / "address.py"))
    pages = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in repository_texts()
        if path.suffix == ".md"
    }
    installing = {name for name, text in pages.items() if address["INSTALL"].search(text)}
    # The site has copies of some pages.
    assert installing - {"docs/readme.md"} == set(address["PAGES"])
    for name in address["PAGES"]:
        assert address["replace_address"](pages[name]) == pages[name], "run python docs/address.py"
    other = 'pip install "jaxmp @ git+https://else.example/jaxmp"'
    assert address["replace_address"](other) == other.replace(
        "https://else.example/jaxmp", project()["urls"]["Source"]
    )


# ---------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------


def make(*arguments: str) -> str:
    """Returns the commands that make would run, without the variables of an outer make."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    outer = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}
    outer |= {"VENV", "PYTHON", "JAX", "EXTRA", "ARGS"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_every_make_command_in_the_documents_is_a_target():
    texts = [text_of(name) for name in ("README.md", "CONTRIBUTING.md", "docs/get-started.md")]
    named = {
        target for text in texts for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    }
    assert {"demo", "test", "lint"} <= named
    for target in named:
        assert make(target)


def test_make_installs_the_jax_that_is_asked_for(tmp_path):
    lines = make("test", f"VENV={tmp_path}/venv", "PYTHON=python3.99", "JAX=0.10.2")
    assert f"python3.99 -m venv {tmp_path}/venv" in lines
    assert '".[dev]" jax==0.10.2 jaxlib==0.10.2' in lines
    assert '".[dev]" jax\n' in make("test", f"VENV={tmp_path}/venv")
    assert '".[dev,aot]" jax\n' in make("test", f"VENV={tmp_path}/venv", "EXTRA=aot")


def test_make_installs_once(tmp_path):
    stamp = tmp_path / "jaxmp-with-jax-latest" / "dev"
    for file in (tmp_path / "bin" / "python", stamp):
        file.parent.mkdir(parents=True)
        file.touch()
    assert "pip install" not in make("test", f"VENV={tmp_path}")
    os.utime(stamp, (0, 0))  # older than pyproject.toml
    assert "pip install" in make("test", f"VENV={tmp_path}")


def test_files_that_depend_on_versions_exist():
    assert {ROOT / "tests" / f"test_{name}.py" for name in VERSION_SENSITIVE} <= set(
        (ROOT / "tests").glob("test_*.py")
    )
    assert "-m versions" in make("test-versions", "VENV=nowhere")


# ---------------------------------------------------------------------------
# CI, with stubs for make and Python
# ---------------------------------------------------------------------------

OLD_PYTHON = '#!/bin/sh\ncase "$2" in *"(3, 12)"*) exit 1;; esac\n'
NEW_PYTHON = "#!/bin/sh\n"
BROKEN_PYTHON = "#!/bin/sh\nexit 127\n"
MAKE = '#!/bin/sh\necho "MAKE $*"\n'
FAILING_MAKE = '#!/bin/sh\necho "MAKE $*"\n[ "$1" != test ] && [ "$1" != test-versions ]\n'


def ci(tmp_path: Path, **stubs: str) -> tuple[int, str]:
    """Runs .ci/run with only `stubs` and a few system tools on PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    for name, script in stubs.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=ROOT,
        env={"PATH": str(tools), "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def made(output: str) -> list[str]:
    return re.findall(r"^MAKE (.*)", output, re.MULTILINE)


def test_ci_runs_both_legs_and_the_slow_tests_and_lint_once(tmp_path):
    stubs = {"python3": OLD_PYTHON, "python3.12": BROKEN_PYTHON, "python3.13": NEW_PYTHON}
    code, output = ci(tmp_path, make=MAKE, **stubs)
    oldest = re.search(r'"jax>=([\d.]+)"', str(project()["dependencies"]).replace("'", '"'))[1]
    first, slow, lowest, env, second, expensive, site, lint = made(output)
    assert code == 0
    assert re.fullmatch(rf"test-versions VENV=\S+ PYTHON=python3 JAX={re.escape(oldest)}", first)
    assert re.fullmatch(r"test VENV=\S+ PYTHON=python3\.13 JAX=latest EXTRA=aot", second)
    assert env == second.replace("test", "env", 1)
    assert slow == first.replace("test-versions", "test-slow", 1)
    assert expensive == second.replace("test", "test-expensive", 1)
    assert site == second.replace("test", "docs", 1)
    assert re.fullmatch(r"test-lowest VENV=\S+ PYTHON=python3", lowest)
    assert lint == first.replace("test-versions", "lint", 1)
    assert "SKIPPED" not in output


def test_ci_without_a_newer_python_runs_all_tests_on_the_oldest_jax(tmp_path):
    code, output = ci(tmp_path, make=MAKE, python3=OLD_PYTHON)
    assert code == 0
    assert re.search(r"^SKIPPED Python >= 3\.12", output, re.MULTILINE)
    commands = [line.split()[0] for line in made(output)]
    assert commands == ["test", "test-expensive", "test-slow", "test-lowest", "lint"]


def test_ci_finds_a_newer_python_among_those_of_pyenv(tmp_path):
    python = tmp_path / ".pyenv" / "versions" / "3.14.1" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(NEW_PYTHON)
    python.chmod(0o755)
    code, output = ci(tmp_path, make=MAKE, python3=OLD_PYTHON)
    assert code == 0
    assert f"PYTHON={python} JAX=latest" in output


def test_ci_without_any_python_fails(tmp_path):
    code, output = ci(tmp_path, make=MAKE)
    assert code == 1
    assert made(output) == []


def test_ci_fails_when_a_leg_fails_and_still_runs_the_rest(tmp_path):
    code, output = ci(tmp_path, make=FAILING_MAKE, python3=NEW_PYTHON)
    assert code == 1
    assert len(re.findall(r"^FAILED ", output, re.MULTILINE)) == 2
    commands = [line.split()[0] for line in made(output)]
    older, newer = commands[:3], commands[3:]
    assert older == ["test-versions", "test-slow", "test-lowest"]
    assert newer == ["env", "test", "test-expensive", "docs", "lint"]


NO_EXTRA_MAKE = '#!/bin/sh\necho "MAKE $*"\n[ "$1" != env ]\n'


def test_ci_says_so_where_the_gpu_compiler_cannot_be_installed(tmp_path):
    code, output = ci(tmp_path, make=NO_EXTRA_MAKE, python3=NEW_PYTHON)
    assert code == 0
    assert re.search(r"^SKIPPED tests that need the extra aot", output, re.MULTILINE)
    assert [line.partition("JAX=")[2] for line in made(output)[4:6]] == ["latest", "latest"]


# ---------------------------------------------------------------------------
# Annotations
# ---------------------------------------------------------------------------


NAMESPACES = ("checkpoint", "errors", "fp8", "functional", "losses", "nnx", "optim", "typing")


def public_callables() -> dict[str, object]:
    """Returns the functions, classes and methods that jaxmp defines and exports, by name."""
    modules = [jaxmp, *(importlib.import_module(f"jaxmp.{name}") for name in NAMESPACES)]
    exported = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in ((name, getattr(module, name)) for name in dir(module))
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__.startswith("jaxmp")
    }
    methods = {
        f"{name}.{attribute}": getattr(method, "__func__", getattr(method, "fget", method))
        for name, value in exported.items()
        if inspect.isclass(value)
        for attribute, method in vars(value).items()
        if attribute == "__init__" or not attribute.startswith("_")
    }
    return exported | {name: each for name, each in methods.items() if inspect.isfunction(each)}


def test_the_annotations_of_public_names_can_be_evaluated():
    failures = {}
    callables = public_callables()
    for name, value in callables.items():
        try:
            typing.get_type_hints(value)
        except NameError as error:
            failures[name] = error
    assert failures == {}
    assert len(callables) > 150 and "jaxmp.Recipe.replace" in callables
