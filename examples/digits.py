"""Real handwritten digits that need no download: 1797 images of 8x8 pixels, in scikit-learn.

They are the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits",
UCI Machine Learning Repository, 1998: pixels are counts from 0 to 16.

Shape suffixes: N images, H and W their pixels, a last axis of one channel.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """A quarter of each digit's images is to test on; the split is the same in every run."""

    train_images: np.ndarray  # (1347, 8, 8, 1) float32 in [0, 1]
    train_labels: np.ndarray  # (1347,) int32
    test_images: np.ndarray  # (450, 8, 8, 1)
    test_labels: np.ndarray  # (450,)


@functools.cache
def handwritten_digits() -> Digits:
    """Reads and splits the images."""
    found = load_digits()
    images_NHW1 = (found.images[..., None] / 16).astype(np.float32)
    labels_N = found.target.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(
        images_NHW1, labels_N, test_size=0.25, stratify=labels_N, random_state=0
    )
    return Digits(train, train_labels, test, test_labels)


def shuffled_batches(
    images_NHW1: np.ndarray, labels_N: np.ndarray, batch_size: int, rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    """One epoch of whole batches, every image moved by up to one pixel in each direction."""
    order = rng.permutation(len(images_NHW1))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield {"image": _moved(images_NHW1[chosen], rng), "label": labels_N[chosen]}


def _moved(images_NHW1: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    count, height, width, _ = images_NHW1.shape
    padded = np.pad(images_NHW1, ((0, 0), (1, 1), (1, 1), (0, 0)))
    top, left = rng.integers(0, 3, (2, count, 1, 1))
    rows, columns = top + np.arange(height)[:, None], left + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows, columns]
