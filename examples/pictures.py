"""What the pictures of the examples have in common."""

import os
from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any colour vision.
BLACK, BLUE, VERMILION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"


def save_png(figure: Figure, path: Path) -> Path:
    """Writes `figure` to `path`, whole or not at all, and returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_suffix(".png.tmp")
    figure.savefig(half_written, format="png")
    os.replace(half_written, path)
    return path
