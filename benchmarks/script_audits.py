"""`jaxmp audit --script` on training scripts of other projects, unedited.

    python benchmarks/script_audits.py ~/src                        # ~/src/flax, ~/src/nanodo
    python benchmarks/script_audits.py ~/src --target h200 --out audits.json
    python benchmarks/script_audits.py ~/src --only nanodo --show

Needs absl-py and ml_collections. Packages for input pipelines and logging (TensorFlow, clu, ...)
and the data have stand-ins in `stand_ins/sitecustomize.py`. The scripts and their configurations
are their authors', but for a small batch of ImageNet and no checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jaxmp
from result_file import parser_of, write_result

ROOT = Path(__file__).parents[1]
STAND_INS = Path(__file__).with_name("stand_ins")
_CONFIG = "--config=configs/default.py"


class Script(NamedTuple):
    """A script of a checkout, and its arguments.

    folder: the directory that it runs in.
    command: what follows `jaxmp audit --script`; `{workdir}` is an empty folder.
    recipe: what its author means it to compute in.
    devices: how many CPU devices it gets.
    """

    folder: str
    command: list[str]
    recipe: str
    devices: int = 1


SCRIPTS = {
    "mnist": Script("flax/examples/mnist", ["main.py", _CONFIG, "--workdir={workdir}/new"], "fp32"),
    "lm1b": Script(
        "flax/examples/lm1b",
        ["main.py", _CONFIG, "--workdir={workdir}/new", "--config.restore_checkpoints=False"],
        "bf16",
    ),
    "imagenet": Script(
        "flax/examples/imagenet",
        ["main.py", _CONFIG, "--workdir={workdir}/new", "--config.batch_size=8"],
        "fp32",
        devices=2,
    ),
    "nanodo": Script(
        "nanodo",
        [
            "-m",
            "nanodo.main",
            "--config=nanodo/configs/default.py",
            "--config.checkpoint=False",
            "--config.workdir={workdir}/new",
        ],
        "bf16",
    ),
}


def audit(script: Script, checkouts: Path, target: str | None) -> dict[str, Any]:
    """Returns the output and the counts of one script."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "jaxmp", "audit", "--script"]
        command += [part.format(workdir=folder) for part in script.command]
        command += ["--recipe", script.recipe, "--json", str(report), "--fail-on", "none"]
        command += ["--target", target] if target else []
        paths = [str(STAND_INS), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "80"}
        env |= {"JAX_PLATFORMS": "cpu"} if target is None else {}
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={script.devices}"
        start = time.monotonic()
        cwd = checkouts / script.folder
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        seconds = round(time.monotonic() - start)
        if done.returncode:
            return {"error": done.stderr[-3000:], "seconds": seconds}
        result = jaxmp.typing.AuditReport.from_json(report.read_text("utf-8"))
        return {
            "output": done.stdout,
            "seconds": seconds,
            "function": done.stdout.splitlines()[0].removeprefix("Function "),
            "flops": result.flops,
            "errors": result.counts(),
            "low_precision_share": round(result.low_precision_share, 4),
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--target", help="compile for a100, h100, h200 or b200 too")
    parser.add_argument("--only", choices=SCRIPTS, help="one of the scripts")
    parser.add_argument("--show", action="store_true", help="print the reports")
    arguments = parser.parse_args()
    rows = {}
    for name in [arguments.only] if arguments.only else SCRIPTS:
        row = audit(SCRIPTS[name], arguments.checkouts, arguments.target)
        output = row.pop("output", row.get("error", ""))
        print(f"{name}: {json.dumps(row)}", flush=True)
        if arguments.show or "error" in row:
            print(output)
        rows[name] = {key: value for key, value in row.items() if key != "seconds"}
    write_result(arguments.out, target=arguments.target, scripts=rows)
    sys.exit(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    main()
