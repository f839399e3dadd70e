"""Losses that compute in FP32 and keep 16-bit operands in 16 bits.

They compute in float64 if the operands are float64. No array of the size of the logits is stored in
FP32. `softmax_cross_entropy` takes logits, and `linear_cross_entropy` takes the input and the
kernel of the layer that computes them. Both have the arguments `weights` and `reduction`:

- `"mean"`: the sum of weighted losses, divided by the sum of weights (without weights: by the
  number of rows that are not ignored); 0 if the divisor is 0, as in a batch of padding only.
- `"sum"`: the sum of weighted losses.
- `"none"`: the loss of each row times its weight, 0 for ignored rows.
- `"sum_and_weight"`: numerator and denominator of "mean". `jaxmp.value_and_grad(fn, weighted=True)`
  accepts this pair instead of the loss, so that means over microbatches or devices of unequal
  weight are correct.

A row of weight 0 has loss 0 and a gradient of exactly 0, even if it contains inf or NaN.

Shape suffixes: ... any dimensions, V classes, D features, N rows, C rows of one chunk.
"""

from jaxmp.losses._linear import linear_cross_entropy
from jaxmp.losses._softmax import softmax_cross_entropy

__all__ = ["linear_cross_entropy", "softmax_cross_entropy"]
