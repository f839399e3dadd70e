"""Measures the coverage of the interval of `jaxmp.validate`, and how often it errs at the budget.

    python benchmarks/validate_coverage.py                    # 20,000 samples for each row
    python benchmarks/validate_coverage.py --samples 2000

Each sample has paired differences of some seeds, from a distribution with a known mean. "coverage"
is the share of the samples whose 95 % interval contains it, "passes" the share that passes although
the mean exceeds the budget slightly, with a standard deviation of 0.6 budgets. Requires no device.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxmp._tools.validate._compare import judge_interval, paired_interval

SEEDS = (2, 3, 4, 5, 8, 20)
_DEVIATION = 0.6
Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def lognormal(sigma: float, sign: int) -> Sampler:
    """Returns a sampler of lognormal numbers with a mean of 0 and a variance of 1."""
    mean, variance = math.exp(sigma**2 / 2), math.expm1(sigma**2) * math.exp(sigma**2)
    return lambda rng, shape: sign * (rng.lognormal(0, sigma, shape) - mean) / math.sqrt(variance)


DISTRIBUTIONS: dict[str, Sampler] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "lognormal, sigma 0.25": lognormal(0.25, 1),
    "lognormal, sigma 0.5": lognormal(0.5, 1),
    "minus lognormal, sigma 0.5": lognormal(0.5, -1),
    "lognormal, sigma 1": lognormal(1.0, 1),
}


def measure(sampler: Sampler, seeds: int, samples: int) -> tuple[float, float]:
    """Returns the coverage, and the share of passes of a mean at the budget."""
    rows = sampler(np.random.default_rng(0), (samples, seeds))
    intervals = [paired_interval(row) for row in rows]
    covered = [each.low is not None and each.low <= 0 <= (each.high or 0) for each in intervals]
    at_budget = [judge_interval(paired_interval(1 + _DEVIATION * row), 1.0) for row in rows]
    return float(np.mean(covered)), at_budget.count("pass") / samples


def table(samples: int, counts: Sequence[int] = SEEDS) -> str:
    """Returns the measurements as a Markdown table, for docs/validate.md."""
    heads = [f"{count} seeds" for count in counts]
    lines = ["| differences | figure | " + " | ".join(heads) + " |"]
    lines.append("|---|---|" + "---:|" * len(counts))
    for name, sampler in DISTRIBUTIONS.items():
        columns = [measure(sampler, count, samples) for count in counts]
        for index, figure in enumerate(("coverage", "passes at the budget")):
            cells = " | ".join(f"{100 * column[index]:.1f} %" for column in columns)
            lines.append(f"| {name} | {figure} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    print(table(parser.parse_args().samples))


if __name__ == "__main__":
    main()
