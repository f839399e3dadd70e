"""Trains a small model with another framework, as it is and through jaxmp, and compares the losses.

    python examples/integrations/compare.py tunix --checkout DIRECTORY
    python examples/integrations/compare.py maxtext --checkout DIRECTORY

The directory is a checkout of the framework, at the commit of `FRAMEWORKS` or a later one, whose
dependencies are installed. It is not changed: the patch next to this file is applied to a copy. The
model trains for 50 steps on the source code of Python's standard library. The script exits with 1
if one of the following is not true:

- the losses of the recipe `fp32` are within 1e-6 of the framework's;
- the last losses of `bf16` and `bf16_params` are, for the same seed, no farther from those of the
  framework in FP32 than the losses of three of its seeds from one another;
- a run of `bf16_params` that resumes from the framework's checkpoint after 25 steps ends with the
  same bits.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
STEPS, LAST = 50, 10
# The address, the commit, and the folder in the checkout that is on the path of Python.
FRAMEWORKS = {
    "tunix": ("google/tunix", "c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3", ""),
    "maxtext": ("AI-Hypercomputer/maxtext", "e591f30cbbf217ed67ef71263ec0538239f9c3b8", "src"),
}


def main() -> None:
    """Runs the trainings, and prints the comparison."""
    parser = argparse.ArgumentParser(
        description="Trains a small model with another framework, as it is and through jaxmp."
    )
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the framework")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that train")
    options = parser.parse_args()
    name, (_, _, subfolder) = options.framework, FRAMEWORKS[options.framework]

    def run(checkout: Path, seed: int, recipe: str, steps: int = STEPS, folder: str = "") -> tuple:
        """Returns the losses and the digest of a process that imports the framework."""
        here = [str(checkout / subfolder), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, HERE / f"{name}_run.py", str(seed), str(steps), recipe, folder],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(here)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        losses, digest = json.loads(done.stdout.splitlines()[-1])
        return np.array(losses), digest

    with tempfile.TemporaryDirectory() as temporary:
        patched, checkpoints = Path(temporary, "patched"), str(Path(temporary, "checkpoints"))
        package = Path(subfolder, name)
        shutil.copytree(options.checkout / package, patched / package)
        patch = (HERE / f"{name}.patch").resolve()
        subprocess.run(["patch", "-s", "-p1", "-i", patch], cwd=patched, check=True)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            theirs = [pool.submit(run, options.checkout, seed, "") for seed in range(3)]
            half = pool.submit(run, patched, 0, "bf16_params", STEPS // 2, checkpoints)
            recipes = ("bf16_params", "bf16", "fp32")
            ours = {recipe: pool.submit(run, patched, 0, recipe) for recipe in recipes}
            half.result()
            resumed = pool.submit(run, patched, 0, "bf16_params", STEPS, checkpoints).result()[1]
            theirs = [each.result()[0] for each in theirs]
            ours = {recipe: each.result() for recipe, each in ours.items()}
    last = np.array(theirs)[:, -LAST:].mean(1)
    spread = float(np.ptp(last))
    largest = float(np.abs(ours["fp32"][0] - theirs[0]).max())
    checks = {f"fp32: largest difference of {STEPS} losses {largest:.1e}": largest <= 1e-6}
    print(f"{name}: mean of the last {LAST} losses, three seeds: {last.round(4).tolist()}")
    for recipe in ("bf16", "bf16_params"):
        difference = float(ours[recipe][0][-LAST:].mean() - last[0])
        text = f"{recipe}: difference of the last losses {difference:+.4f}, spread {spread:.4f}"
        checks[text] = abs(difference) <= spread
    same = resumed == ours["bf16_params"][1]
    checks["bf16_params: resumed after 25 steps, the parameters are bit-identical"] = same
    for text, is_true in checks.items():
        print(f"{'ok    ' if is_true else 'FAILED'} {text}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
