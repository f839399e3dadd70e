"""Trains a small Qwen3 with Tunix's trainer, as it is and through jaxmp, and compares the losses.

    python examples/integrations/tunix_training.py --checkout DIRECTORY

The directory is a checkout of https://github.com/google/tunix, at the commit that COMMIT names or a
later one, whose dependencies are installed. It is not changed: `tunix.patch`, which is next to this
file, is applied to a copy. The model trains for 50 steps on the source code of Python's standard
library. The script exits with 1 if one of the following is not true:

- the losses of the recipe `fp32` are within 1e-6 of Tunix's;
- the last losses of `bf16` and `bf16_params` are, for the same seed, no farther from those of Tunix
  in FP32 than the losses of three of its seeds from one another;
- a run of `bf16_params` that Tunix's checkpoint resumes after 25 steps ends with the same bits.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
COMMIT = "c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3"
STEPS, LAST = 50, 10


def run(checkout: Path, seed: int, recipe: str, steps: int = STEPS, folder: str = "") -> dict:
    """Returns the results of `tunix_run.py` in a process that imports Tunix from a checkout."""
    path = os.pathsep.join([str(checkout), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    job = [str(seed), str(steps), recipe or "none", *([folder] if folder else [])]
    done = subprocess.run(
        [sys.executable, HERE / "tunix_run.py", *job],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the trainings, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of Tunix")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        patched = Path(folder, "patched")
        shutil.copytree(options.checkout / "tunix", patched / "tunix")
        patch = HERE / "tunix.patch"
        subprocess.run(["patch", "-s", "-p1", "-i", patch.resolve()], cwd=patched, check=True)
        tunix = [run(options.checkout, seed, "") for seed in range(3)]
        through = {name: run(patched, 0, name) for name in ("fp32", "bf16", "bf16_params")}
        checkpoints = str(Path(folder, "checkpoints"))
        run(patched, 0, "bf16_params", STEPS // 2, checkpoints)
        resumed = run(patched, 0, "bf16_params", STEPS, checkpoints)
    theirs = np.array([each["losses"] for each in tunix])
    ours = {name: np.array(each["losses"]) for name, each in through.items()}
    last = theirs[:, -LAST:].mean(1)
    spread = float(np.ptp(last))
    largest = float(np.abs(ours["fp32"] - theirs[0]).max())
    checks = {f"fp32: largest difference of {STEPS} losses {largest:.1e}": largest <= 1e-6}
    print(f"Tunix: mean of the last {LAST} losses, three seeds: {last.round(4).tolist()}")
    for name in ("bf16", "bf16_params"):
        difference = float(ours[name][-LAST:].mean() - last[0])
        text = f"{name}: difference of the last losses {difference:+.4f}, spread {spread:.4f}"
        checks[text] = abs(difference) <= spread
    same = resumed["digest"] == through["bf16_params"]["digest"]
    checks["bf16_params: resumed after 25 steps, the parameters are bit-identical"] = same
    for text, is_true in checks.items():
        print(f"{'ok    ' if is_true else 'FAILED'} {text}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
