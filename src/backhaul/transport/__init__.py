"""Moves frames between workers; knows nothing of calls."""
