"""Runs traced programs again: the one interpreter of jaxprs, and its readers of equations.

Read the modules in this order:

1. `_constructs` lists the equations that contain jaxprs, such as loops, branches and calls, and
   reads their parameters. No other list of them exists in the package.
2. `_bind` runs one equation again, with other operands.
3. `_interpreter` runs a jaxpr: a loop over its equations, and one rule per construct. A client is a
   subclass that changes the values of variables, or single equations.
"""
