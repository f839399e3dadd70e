"""Optax transformations (masters, loss scale, skipped steps, rounding), and averages."""

from jaxmp.optim._average import fp32_copy as fp32_copy
from jaxmp.optim._average import incremental_update as incremental_update
from jaxmp.optim._master import MasterParamsState as MasterParamsState
from jaxmp.optim._master import master_params as master_params
from jaxmp.optim._mixed_precision import mixed_precision as mixed_precision
from jaxmp.optim._rounding import StochasticRoundingState as StochasticRoundingState
from jaxmp.optim._rounding import stochastic_rounding as stochastic_rounding
from jaxmp.optim._skip import SkipNonfiniteState as SkipNonfiniteState
from jaxmp.optim._skip import SkipStats as SkipStats
from jaxmp.optim._skip import skip_nonfinite as skip_nonfinite
from jaxmp.optim._storage import cast_params as cast_params
