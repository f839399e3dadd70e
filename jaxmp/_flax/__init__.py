"""Policies of Flax models, and training states.

`_method_call` casts the inputs of a call and `_casts` its results; `_linen_interceptor` and
`_nnx_subclass` call them. `_linen_model` and `_nnx_model` wrap models, with the layers of
`_linen_fields` and `_nnx_layers`. `_train_state` and `_nnx_optimizer` update parameters through
`optim._apply`.
"""
