"""References to values on other workers: who holds them, and when a value may go."""
