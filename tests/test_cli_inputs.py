"""The command with bad arguments and files: one message each, and nothing is overwritten."""

import dataclasses
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from grids import EXPENSIVE
from jaxmp._tools.cli import _arguments, _outputs
from jaxmp.checkpoint import Checkpointer
from sources import ROOT

LONG = "x" * 300
MAKE = """
import jax, jax.numpy as jnp
def dot(recipe=None):
    return jnp.dot, jnp.ones((2, 2)), jnp.ones((2, 2))
def make_step(recipe=None):
    open("started", "w").close()
def make_run(recipe, seed):
    open("started", "w").close()
    return 3
def empty():
    return ()
def leaves():
    raise SystemExit(7)
def batches():
    return jnp.dot, jnp.ones(2), iter([jnp.ones(3)])
def shapes():
    return jnp.dot, jax.ShapeDtypeStruct((2,), "float32"), jnp.ones(2)
"""
FILES = {
    "good.py": MAKE,
    "syntax.py": "def make(:\n",
    "raises.py": "raise RuntimeError('x' * 100000)\n",
    "leaves.py": "import sys; sys.exit(5)\n",
    "surrogate.py": b"s = '\xff'\n",
    "binary.py": bytes(range(256)),
    "binary.toml": bytes(range(256)),
    "binary.json": bytes(range(256)),
    "list.json": "[1, 2]",
    "deep.json": "[" * 100_000,
    "text.toml": "[policy\n",
    "other.toml": "[nothing]\na = 1\n",
    "self.toml": 'extends = "self.toml"\n',
    "file": "old",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with files, links, a FIFO and a checkpoint."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in FILES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in ("dir", "dir.py", "dir.toml", "dir.json", "7"):
        (folder / name).mkdir()
    for name in ("loop", "loop.py", "loop.toml", "loop.json"):
        (folder / name).symlink_to(folder / name)
    for name in ("broken.py", "broken.toml", "broken.json"):
        (folder / name).symlink_to("gone/gone")
    os.mkfifo(folder / "fifo")
    for name in ("run", "damaged"):
        with Checkpointer(folder / name) as checkpointer:
            checkpointer.save(1, {"w": jnp.ones(2)}, recipe="fp32")
    (folder / "damaged" / "1" / "state" / "jaxmp_manifest.json").write_text("{")
    return folder


SHOW = ["", " ", "bf61", "p=", "=,=", "🦄", "‮abc", "\udcff", LONG, f"{LONG}.toml", "-1", "a\nb"]
SHOW += ["dir.toml", "loop.toml", "broken.toml", "binary.toml", "text.toml", "other.toml"]
SHOW += ["self.toml", "file/x.toml", ".toml", "/.toml"]
FUNCTIONS = ["", ":", "good.py", "good.py:", "good.py:1", "good.py:gone", "good.py:empty"]
FUNCTIONS += ["good.py:leaves", "syntax.py:make", "raises.py:make", "leaves.py:make", "dir:make"]
FUNCTIONS += ["surrogate.py:make", "binary.py:make", "dir.py:make", "loop.py:make", "no.é:make"]
FUNCTIONS += ["broken.py:make", "file/x.py:make", f"{LONG}.py:make", "..:make", "🦄.py:make"]
OUTPUTS = ["", ".", "dir", "loop", "file/x", "gone/x", "broken.json", "fifo", "/dev/full", LONG]
VALIDATE = [
    *(["--seeds", x] for x in ("0", "-1", "1.5", "x", "")),
    *(["--steps", x] for x in ("0", "-1", "1e3", "nan")),
    *(["--budget", x] for x in ("nan", "-1", "x")),
    *(["--metrics", x] for x in ("reward=up", "=", "reward", "a=b=c")),
    *(["--recipes", x] for x in ("", ",", "bf61", "bf16,bf61", "🦄")),
    *(["--reference-recipe", x] for x in ("", "bf61", "dir.toml")),
    *(["--baseline", x] for x in ("", "dir", "gone", "binary.json", "list.json", "deep.json")),
    ["--nothing"],
]
AUDIT = [
    *(["--max-seconds", x] for x in ("0", "-1", "inf", "nan", "x")),
    *(["--fail-on", x] for x in ("fp32", "🦄", "any,none")),
    *(["--baseline", x] for x in ("dir", "gone", "binary.json", "list.json", "deep.json")),
    ["--target", "h300"],
    ["--recipe", "bf61"],
    ["--recipe", "text.toml"],
    ["--function", "step"],
    ["more"],
]
SCRIPTS = ["", "dir.py", "gone.py", "loop.py", "broken.py", "fifo", "-m", "file/x.py", LONG]
CHECKPOINTS = ["", "dir", "gone", "file", "fifo", "loop", "damaged", "7", "/dev/null", LONG, "*"]
COMMANDS = [
    *(["show", name] for name in SHOW),
    *(["memory", name, "--recipe", "bf16"] for name in FUNCTIONS),
    *(["audit", name] for name in FUNCTIONS),
    *(["show", "bf16", "--json", name] for name in OUTPUTS),
    *(["audit", "good.py:dot", "--html", name] for name in OUTPUTS),
    *(["validate", "good.py:make_run", *options] for options in VALIDATE),
    *(["audit", "good.py:make_step", *options] for options in AUDIT),
    *(["validate", "good.py:make_run", "--json", name] for name in ("gone/x", "fifo", LONG[:250])),
    ["validate", "good.py:make_run", "--html", "."],
    *(["audit", "--script", name] for name in SCRIPTS),
    *(["checkpoint", "show", name] for name in CHECKPOINTS),
    *(["checkpoint", "verify", "run", "--step", step] for step in ("-1", "9", "x")),
    ["locate", "good.py:batches"],
    ["locate", "good.py:shapes"],
    ["checkpoint"],
    ["checkpoint", "🦄"],
    ["🦄"],
]


MESSAGES = {
    "--json .": "'.' cannot be written: Is a directory. Name a file in a directory that exists",
    "--json gone/x": "'gone/x' cannot be written",
    "--json ": "'' cannot be written",
    "--html .": "'.' cannot be written",
    "--fail-on fp32": "fail_on='fp32' is not a check",
    "--baseline gone": "gone' cannot be read",
    "--baseline binary.json": "binary.json' cannot be read",
    "--max-seconds nan": "not a positive number of seconds",
}


def contents(folder):
    """Returns the type, and the bytes or the target, of all that a directory contains."""
    rows = {}
    for path in sorted(folder.rglob("*")):
        value = b""
        if path.is_symlink():
            value = os.readlink(path)
        elif path.is_file():
            value = path.read_bytes()
        if "__pycache__" not in str(path):
            rows[str(path)] = path.lstat().st_mode, value
    return rows


@pytest.fixture
def folder(inputs, monkeypatch):
    """Changes to the directory with the inputs, and forgets those that a command imports."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("COLUMNS", "60")
    yield inputs
    for name, module in list(sys.modules.items()):
        if str(inputs) in str(getattr(module, "__spec__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda row: " ".join(row)[:80])
def test_a_bad_input_is_one_message_and_overwrites_nothing(arguments, folder, command):
    assert len(COMMANDS) >= 100
    before = contents(folder)
    code, out, error = command(*arguments)
    assert code in (1, 2) and error, (code, out)
    assert "Traceback" not in out + error and "\x1b" not in out + error
    assert len(error) < 4000 and MESSAGES.get(" ".join(arguments[-2:]), "") in error
    assert contents(folder) == before
    assert Path("/dev/full").is_char_device() and Path("/dev/null").is_char_device()


def test_policies_among_recipes_stay_whole():
    text = "bf16, p=f32,c=bf16,p=f32, c=f16,o=f32,,my.toml,bf16"
    split = ["bf16", "p=f32,c=bf16", "p=f32,c=f16,o=f32", "my.toml"]
    assert _arguments.split_recipes(text) == split


OLD = '{"candidates": [], "compare_steps": []}'
SLEEP = "import time; print('started', flush=True); time.sleep(600)\n"
MOMENTS = {
    # A script that prints "started" -> the command that runs it.
    "import": (SLEEP, ["audit", "slow.py:make"]),
    "make": ("def make():\n    " + SLEEP, ["memory", "slow.py:make", "--recipe", "bf16"]),
    "trace": (
        "import jax.numpy as jnp\ndef make():\n    return step, jnp.ones(2)\n"
        "def step(x):\n    " + SLEEP,
        ["audit", "slow.py:make"],
    ),
    "script": (SLEEP, ["audit", "--script", "slow.py"]),
    "validation": (
        "def make(recipe, seed):\n    " + SLEEP,
        ["validate", "slow.py:make", "--json", "old.json"],
    ),
}


# A shell starts jobs in the background with SIGINT ignored, which children inherit.
COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "jaxmp", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[EXPENSIVE] * (name != "script")) for name in MOMENTS]
)
def test_an_interrupt_is_one_line(moment, tmp_path):
    script, arguments = MOMENTS[moment]
    (tmp_path / "slow.py").write_text(script)
    (tmp_path / "old.json").write_text(OLD)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert any(line == "started\n" for line in process.stdout)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=600)
    assert (process.returncode, rest.split("\n")[-2]) == (130, "Interrupted.")
    assert "Traceback" not in rest and rest.count("\n") == 1
    assert (tmp_path / "old.json").read_text() == OLD


STEP = """
import jax.numpy as jnp
def make_step(recipe=None):
    return lambda w: w @ w, jnp.ones((2, 2))
"""


def test_what_the_user_prints_is_not_in_the_result(command, write):
    write(STEP.replace("    return", "    print('the data')\n    return"), "prints.py")
    code, out, error = command("memory", "prints.py:make_step", "--json", "-")
    assert code == 0 and "the data" in error
    assert json.loads(out)["kinds"]["parameters"] >= 0


def test_a_parser_in_a_module_is_told_from_other_errors(command, write):
    parser = "import argparse\nparser = argparse.ArgumentParser()\n"
    parser += 'parser.add_argument("--data", required=True)\n'
    write(f"{parser}args = parser.parse_args()\n{STEP}", "parses.py")
    code, _, error = command("memory", "parses.py:make_step")
    assert code == 2 and "raised SystemExit: 2 (parses.py, line 4). The command passes no" in error
    lines = error.partition("alone:\n")[2].replace("\n    ", "\n")
    write(f"{parser}{lines.lstrip()}{STEP}", "guarded.py")
    assert command("memory", "guarded.py:make_step")[0] == 0


def test_a_file_that_is_no_report_is_named_and_not_quoted(command, write):
    write(STEP, "step.py")
    for name in ("audit", "validate"):
        code, _, error = command(name, "step.py:make_step", "--baseline", "step.py")
        assert code == 2 and "'step.py' cannot be read (Expecting value" in error
        assert f"    jaxmp {name} " in error and "import" not in error


def test_a_platform_that_does_not_start_is_named(command, write, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'nonsense'")

    write(STEP.replace("    return", "    __import__('jax').devices()\n    return"), "starts.py")
    monkeypatch.setattr(jax, "devices", fail)
    code, _, error = command("memory", "starts.py:make_step")
    assert code == 2 and error.startswith("Error: JAX finds no device: Unable to initialize")
    assert "starts.py" not in error and "    unset JAX_PLATFORMS" in error


class FullDisk(io.StringIO):
    """Output for which there is no space."""

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_message(command, write, tmp_path, monkeypatch):
    write(STEP, "step.py")
    monkeypatch.setattr(Path, "replace", FullDisk.write)
    code, out, error = command("memory", "step.py:make_step", "--json", "new")
    assert code == 2 and "'new' cannot be written: No space left on device." in error
    assert "Memory of" in out and not list(tmp_path.glob("new*"))
    monkeypatch.setattr(sys, "stdout", FullDisk())
    code, _, error = command("recipes")
    assert code == 2 and error == "Error: [Errno 28] No space left on device\n"


def test_results_do_not_replace_inputs_or_each_other(command, write, tmp_path):
    write(STEP, "step.py")
    write('extends = "bf16"\n')
    (tmp_path / "link.py").symlink_to("step.py")
    memory = ["memory", "step.py:make_step"]
    for result in ("step.py", "link.py", "./step.py", "my.toml"):
        code, _, error = command(*memory, "--recipe", "my.toml", "--json", result)
        assert code == 2 and "is an input of this command" in error
    code, _, error = command(*memory, "--json", "new", "--html", "./new")
    assert code == 2 and "is the --json of this command" in error
    code, _, error = command(*memory, "--html", "-")
    assert code == 2 and "'-' cannot be written" in error
    assert command("show", "my.toml", "--json", "my.toml")[0] == 2
    assert not (tmp_path / "new").exists() and (tmp_path / "step.py").read_text() == STEP


def test_results_replace_earlier_ones_alone(command, write, tmp_path):
    files = {
        "step.py": STEP,
        "own.json": '{"name": "package"}',
        "rows.json": "[]",
        "own.html": "<p>",
        "__init__.py": "",
        "answer.json": '{"choices": []}',
    }
    for name, text in files.items():
        write(text, name)
    write("", "empty.json")
    memory = ["memory", "step.py:make_step"]
    for _ in range(2):  # the second time, earlier results are replaced
        assert command(*memory, "--json", "old.json", "--html", "old.html")[0] == 0
    assert command(*memory, "--json", "empty.json")[0] == 0
    assert "parameters" in (tmp_path / "empty.json").read_text()
    before = (tmp_path / "old.json").read_text()
    refused = [[*memory, "--json", name] for name in ("own.json", "rows.json", "__init__.py")]
    refused += [[*memory, "--html", name] for name in ("own.html", "own.json")]
    refused += [["recipes", "--json", name] for name in ("step.py", "old.json", "own.html")]
    refused += [["show", "bf16", "--json", "old.json"], ["doctor", "--json", "own.json"]]
    plan = ["plan", "step.py:make_step", "--targets", "v100"]
    refused += [[*plan, "--json", "answer.json"], [*plan, "--html", "old.html"]]
    for arguments in refused:
        code, _, error = command(*arguments)
        assert code == 2 and "Remove it, or write another file: --" in error, arguments
    assert (tmp_path / "old.json").read_text() == before
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_each_result_has_the_key_by_which_it_is_recognized(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        for arguments in (["recipes"], ["show", "fp16"], ["doctor"]):
            command(*arguments, "--json", f"{arguments[0]}.json")
    typing = jaxmp.typing
    reports = {
        "audit": typing.AuditReport,
        "memory": typing.MemoryEstimate,
        "plan": typing.PlanReport,
        "validate": typing.ValidationReport,
        "locate": typing.NonfiniteReport,
    }
    fields = {
        name: {each.name for each in dataclasses.fields(cls)} for name, cls in reports.items()
    }
    fields |= {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("show", "doctor")
    }
    fields["recipes"] = json.loads((tmp_path / "recipes.json").read_text())[0]
    for name, known in fields.items():
        assert set(_outputs._KEYS[name].split()) <= set(known), name
    assert {name: cls._title for name, cls in reports.items()} == _outputs._TITLES


PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("types.py", STEP),
        ("time.py", STEP),
        ("jax.py", STEP),
        # A module that no one has imported yet.
        ("zipapp.py", f"import zipapp\nzipapp.create_archive\n{STEP}"),
        ("step.v2.py", STEP),
        ("parser.py", PARSER + STEP),
        (
            "my_package/inner/train.py",
            "from ..shapes import W\n" + STEP.replace("jnp.ones((2, 2))", "W"),
        ),
    ],
)
def test_a_file_is_loaded_by_its_path(file, text, command, write, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jaxmp", "memory"])
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    write(text, file)
    if "/" in file:
        for name in ("my_package", "my_package/inner"):
            write("", f"{name}/__init__.py")
        write("import jax.numpy as jnp\nW = jnp.ones((2, 2))\n", "my_package/shapes.py")
    code, out, _ = command("memory", f"{file}:make_step")
    assert code == 0 and "Memory of" in out


def test_a_file_imports_its_neighbours_first(command, write, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "run").mkdir()
    for name in ("trained_by_us.py", "shaped_by_us.py"):
        write("raise ValueError('the file of the current directory')\n", name)
    write("import jax.numpy as jnp\nW = jnp.ones((2, 2))\n", "run/shaped_by_us.py")
    text = "from shaped_by_us import W\n" + STEP.replace("jnp.ones((2, 2))", "W")
    write(text, "run/trained_by_us.py")
    code, out, _ = command("memory", "run/trained_by_us.py:make_step")
    assert code == 0 and "Memory of" in out
