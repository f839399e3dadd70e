"""Code that replaces an expression of the user, for the audit and for `locate`.

`_source` finds the expression of an operation, `_functions` is the table of the functions that can
be changed, `_rewrite` makes the new code, and `_trial` traces the user's functions with it.
"""
