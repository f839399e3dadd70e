"""Loss scales, gradients in FP32, and `value_and_grad` with microbatches."""
