"""Executors without a model: tokens from a script, or from a hash of the prefix, for tests and simulations."""
