"""Code that replaces an expression of the user, for the audit and for `locate_nonfinite`.

`_source` finds the expression of an operation, `_functions` is the table of the functions that can
be changed, `_rewrite` changes dtypes and `_domains` operands, and `_trial` traces the user's
functions with the new code.
"""
