"""References to values on other workers: which workers hold them, and when a value is freed."""
