"""Runs plans: weights, stores, a backend.  A function of (weights, stores, plan)."""
