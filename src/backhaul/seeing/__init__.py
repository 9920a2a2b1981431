"""Seeing: looking at the workers of a running cluster from inside or outside of it."""
