"""Foundations without policies: JAX versions, dtypes, trees, jaxprs and compiled programs."""
