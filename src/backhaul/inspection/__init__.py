"""Inspection: what a worker tells about itself, as plain data, to people and tools that look at it."""
