"""Batches and results of the trainings that `compare.py` starts."""

import hashlib
import json
from collections.abc import Iterable

import jax
import numpy as np

from byte_gpt import standard_library_text

STEPS, BATCH, LENGTH = 50, 8, 64


def batches(seed: int, length: int = LENGTH) -> np.ndarray:
    """Returns the tokens of a run: `int32[STEPS, BATCH, length]`."""
    text = standard_library_text()[0]
    starts = np.random.default_rng(seed).integers(0, len(text) - length, (STEPS, BATCH, 1))
    return text[starts + np.arange(length)].astype(np.int32)


def print_result(losses: Iterable[float], params: object) -> None:
    """Prints the losses and a digest of the parameters as one line of JSON."""
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    digest = hashlib.sha256(b"".join(leaves)).hexdigest()
    print(json.dumps([[float(loss) for loss in losses], digest]))
