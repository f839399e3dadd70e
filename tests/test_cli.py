"""The command line: output, and one message and exit code for each mistake."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import jaxmp
from grids import fast_cases
from jaxmp._policies._recipe import list_recipes, load_recipe
from jaxmp._tools.cli._app import app
from processes import run_script
from sources import ROOT, text_of

MODEL = """
def make(): ...
def alone():
    return 3
def broken():
    raise KeyError("gone")
number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Changes to a directory that contains only a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "my_model.py").write_text(MODEL)
    yield tmp_path
    for name in ("my_model", "my_step"):
        sys.modules.pop(name, None)


def test_version(command):
    code, out, _ = command("--version")
    assert code == 0
    assert re.fullmatch(rf"jaxmp {re.escape(jaxmp.__version__)} \(jax \S+, Python \S+\)\n", out)


@pytest.mark.parametrize("columns", ["100", "60"])
def test_recipes_lists_every_recipe_whole(command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = command("recipes")
    assert code == 0
    for name in list_recipes():
        dtypes = ",".join(str(load_recipe(name).policies.default).split(",")[:3])
        assert re.search(rf"^ {name} +{dtypes} ", out, re.MULTILINE)
    assert "matmul=highest" in out
    assert max(map(len, out.splitlines())) <= int(columns)


@pytest.mark.parametrize("name", list_recipes())
def test_show_prints_the_file_of_a_recipe(command, folder, name):
    code, out, _ = command("show", name)
    recipe = load_recipe(name)
    assert code == 0 and out == recipe.to_toml()
    (folder / "copy.toml").write_text(out)
    assert load_recipe("copy.toml") == recipe
    for rule in recipe.policies.rules:
        assert f'why = "{rule.why}"' in out


def test_user_text_is_shown_and_not_obeyed(command, folder):
    (folder / "my.toml").write_text(
        'extends = "bf16"\n[[rules]]\npath = "[bold]a[/bold]"\nc = "f32"\nwhy = "\\u001b[2J[red]x"'
    )
    out = command("show", "my.toml")[1]
    assert "[bold]a[/bold]" in out and r"\u001b[2J[red]x" in out and "\x1b" not in out


# ---------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------

STEP = """
import jax.numpy as jnp


def make_step(recipe):
    return jnp.dot, jnp.ones((2, 2)), jnp.ones((2, 2))
"""


COMMANDS = [
    "recipes",
    "show fp16",
    "audit my_step.py:make_step --recipe fp32",
    "doctor",
    "locate my_step.py:make_step",
    "memory my_step.py:make_step --recipe fp32",
    "plan my_step.py:make_step --recipes fp16 --targets v100 --cache ''",
    "validate test_validate:make_run --recipes bf16 --seeds 1 --steps 2",
]


def test_without_a_checkpoint_a_function_keeps_its_defaults(command, folder):
    lines = 'def make_step(recipe="bf16"):\n    assert recipe == "bf16"'
    (folder / "default.py").write_text(STEP.replace("def make_step(recipe):", lines))
    assert command("locate", "default.py:make_step")[0] == 0


@pytest.mark.usefixtures("standard_promotion", "rank_promotion")
def test_every_command_writes_json(command, folder):
    (folder / "my_step.py").write_text(STEP)
    lines = {line.split()[0]: shlex.split(line) for line in COMMANDS}
    assert sorted(lines) == sorted(command.name for command in app.registered_commands)
    for name, arguments in lines.items():
        code, text, error = command(*arguments)
        assert (code, error) == (0, "")
        _, printed, _ = command(*arguments, "--json", "-")
        assert command(*arguments, "--json", f"{name}.json")[1] == text
        saved = (folder / f"{name}.json").read_text()
        without_time = lambda text: json.loads(re.sub(r'"seconds": [^,}]+', '"seconds": 0', text))
        assert without_time(printed) == without_time(saved)


def test_the_json_of_recipes_and_settings(command):
    recipes = {row["name"]: row for row in json.loads(command("recipes", "--json", "-")[1])}
    assert list(recipes) == list_recipes()
    assert recipes["fp16"]["policy"] == "p=f32,c=f16,o=f32"
    assert recipes["fp16"]["loss_scale"] == "dynamic"
    recipe = load_recipe("fp16")
    settings = json.loads(command("show", "fp16", "--json", "-")[1])
    assert settings == tomllib.loads(recipe.to_toml())
    ops = json.loads(command("show", "fp16", "--ops", "--json", "-")[1])["ops"]
    assert ops == {op.name: op.category for op in jaxmp._policies._op_table.DEFAULT_OPS.values()}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("show bf61", "Error: 'bf61' is not a recipe or a policy. Did you mean 'bf16'?"),
        ("show p=f99", "Error: Unknown dtype 'f99' in 'p=f99'."),
        ("show none.toml", "Error: There is no file 'none.toml'"),
        ("memory my_model --recipe bf16", "'my_model' does not name a function"),
        ("memory my_model: --recipe bf16", "'my_model:' does not name a function"),
        ("memory my_model:nothing", "'my_model' does not define a function 'nothing'"),
        ("memory my_model:number", "'my_model' does not define a function 'number'"),
        ("memory my_model:alone", "my_model:alone returned int, not a function and"),
        ("memory my_model:broken", "raised KeyError: 'gone' (my_model.py, line 6)"),
        (
            "validate my_model.py:make_rum",
            "function 'make_rum'. Did you mean 'make'? Write it in this form:\n"
            "    def make_rum(recipe, seed):",
        ),
        (
            "validate my_model:make",
            "my_model:make has the parameters (). Write it in this form:\n"
            "    def make(recipe, seed):",
        ),
        (
            "memory my_model:brokem --recipe bf16",
            "a function 'brokem'. Did you mean 'broken'? Write it in this form:\n    def brokem():",
        ),
        ("memory f:make --exact --estimate", "--estimate and --exact exclude each other"),
        ("memory my_model --targets h300", "target='h300' is not a chip"),
        ("validate no_file.py:make_run", "The file 'no_file.py' does not exist in "),
        ("validate my_model", "such as:\n    jaxmp validate run.py:make_run"),
        ("plan my_model --target h100", "such as:\n    jaxmp plan run.py:make_step"),
        ("memory no_model:make", "importing 'no_model' raised ModuleNotFoundError"),
        ("checkpoint show my_model.py", "Name the directory of a run."),
        ("checkpoint verify my_model.py", "my_model.py has no manifest"),
        ("audit --script absent.py", "the script 'absent.py' does not exist"),
        ("audit --script -m", "-m requires a module"),
        ("audit --script my_model.py --recipe bf61", "Did you mean 'bf16'"),
        ("audit --script my_model.py --target H200", "lower case"),
        ("audit --function step", "--function requires --script"),
        ("audit a:make --no-tri", "unknown option --no-tri. Did you mean '--no-try'?"),
        ("audit a:make b:make", "2 arguments instead of 1"),
        ("audit steps/a.py", "'steps/a.py' does not name a function"),
        ("audit steps/a.py 5", "jaxmp audit --script steps/a.py"),
        ("audit", "0 arguments instead of 1"),
    ],
)
def test_a_mistake_is_one_message(command, line, expected):
    code, out, err = command(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("Error: ") and expected in err and "Traceback" not in err


@pytest.mark.parametrize("arguments", [["nothing"], ["show"], ["--nothing"]])
def test_a_wrong_command_is_refused_with_the_usage(command, arguments):
    code, _, err = command(*arguments)
    assert code == 2 and "Usage: jaxmp" in err


def test_no_command_prints_the_help(command):
    _, out, err = command()
    assert all(name in out + err for name in ("recipes", "show", "audit", "--version"))


def test_every_argument_of_a_command_has_help():
    commands = get_command(app).commands
    for name, command in (commands | commands.pop("checkpoint").commands).items():
        assert all(each.help for each in command.params if each.name != "help"), name


def test_errors_are_red(command, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert command("show", "bf61")[2].startswith("\x1b[31mError: ")


@pytest.mark.parametrize("package", ["typer", "rich"])
@fast_cases("typer")
def test_without_the_extra_it_says_what_to_install(package):
    code = f"import sys; sys.modules[{package!r}] = None; from jaxmp.__main__ import main; main()"
    done = run_script("-c", code, "--help")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"jaxmp: {package} is not installed; jaxmp requires it for the jaxmp command. Install it "
        'with:\n    pip install "jaxmp[cli]"\n'
    )


def test_a_variable_that_jax_refuses_is_one_sentence():
    done = run_script("-m", "jaxmp", "recipes", JAX_ENABLE_X64="maybe")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'" in done.stderr


def test_a_deleted_directory_is_one_sentence(tmp_path):
    done = subprocess.run(
        f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m jaxmp recipes",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "directory was deleted" in done.stderr


def test_the_command_and_the_module_are_one():
    scripts = tomllib.loads(text_of("pyproject.toml"))["project"]["scripts"]
    assert scripts == {"jaxmp": "jaxmp.__main__:main"}
    done = run_script("-X", "importtime", "-m", "jaxmp", "--help")
    assert done.returncode == 0 and "show" in done.stdout
    loaded = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "jaxmp._tools.cli._steps" in loaded
    tools = {f"jaxmp._tools.{name}" for name in ("audit", "nonfinite", "plan", "validate")}
    assert loaded.isdisjoint({"flax", "jaxmp._flax", *tools})


# ---------------------------------------------------------------------------
# Files that are written, and arguments that are wrong
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("has_gpu", [False, True])
def test_commands_are_silent_about_a_plugin_without_a_gpu(tmp_path, has_gpu):
    if has_gpu:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    code = (
        "import contextlib, logging, jaxmp.__main__\n"
        "with contextlib.suppress(SystemExit): jaxmp.__main__.main()\n"
        "log = logging.getLogger('jax._src.xla_bridge')\n"
        "log.error('Jax plugin configuration error: Unable to load cuFFT')\n"
        "log.error('another error')\n"
    )
    done = run_script("-c", code, "--version", PATH=str(tmp_path))
    assert done.returncode == 0 and "another error" in done.stderr
    assert ("plugin" in done.stderr) == has_gpu


def test_links_are_followed_and_devices_are_not_replaced(command, folder):
    (folder / "real.json").write_text('{"policy": {}, "rules": []}')
    (folder / "link.json").symlink_to("real.json")
    assert command("show", "bf16", "--json", "link.json")[0] == 0
    assert (folder / "link.json").is_symlink()
    assert json.loads((folder / "real.json").read_text())["name"] == "bf16"
    assert command("show", "bf16", "--json", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()
    code, _, error = command("show", "bf16", "--json", "/dev/full")
    assert code == 2 and "'/dev/full' cannot be written: No space left on device." in error
    assert Path("/dev/full").is_char_device()
    assert sorted(path.name for path in folder.iterdir() if "partial" in path.name) == []


def test_a_fifo_is_written_if_a_process_reads_it(command, folder):
    os.mkfifo(folder / "fifo")
    code, _, error = command("show", "bf16", "--json", "fifo")
    assert code == 2 and "'fifo' cannot be written" in error
    reader = subprocess.Popen(["cat", "fifo"], cwd=folder, stdout=subprocess.PIPE)
    while command("show", "bf16", "--json", "fifo")[0] != 0:
        time.sleep(0.05)
    assert json.loads(reader.communicate()[0])["name"] == "bf16"
