"""Inspection: what a worker reports about itself, as plain data, to people and tools."""
