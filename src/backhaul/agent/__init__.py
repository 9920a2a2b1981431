"""Calls and futures: who reads, who runs, who waits."""
