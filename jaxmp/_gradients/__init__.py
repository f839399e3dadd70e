"""`value_and_grad` and `grad` with loss scaling, microbatches, and results in FP32."""

from jaxmp._gradients._evaluate import unpair as unpair
from jaxmp._gradients._value_and_grad import as_tuple as as_tuple
from jaxmp._gradients._value_and_grad import check_argnums as check_argnums
from jaxmp._gradients._value_and_grad import grad as grad
from jaxmp._gradients._value_and_grad import value_and_grad as value_and_grad
