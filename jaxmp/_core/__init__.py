"""Foundations without policies: JAX versions, dtypes, trees, messages, and the table of chips."""
