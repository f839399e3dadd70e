"""Optax transformations (masters, rounding), and averages of 16-bit parameters."""

from jaxmp.optim._assign import set_master_params
from jaxmp.optim._average import fp32_copy, incremental_update
from jaxmp.optim._master import master_params
from jaxmp.optim._moments import moment_dtype
from jaxmp.optim._rounding import stochastic_rounding

__all__ = [
    "fp32_copy",
    "incremental_update",
    "master_params",
    "moment_dtype",
    "set_master_params",
    "stochastic_rounding",
]
