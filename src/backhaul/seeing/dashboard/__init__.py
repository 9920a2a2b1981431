"""Dashboard: a running cluster as a web page on this machine. ``backhaul dashboard`` serves it; see `server`."""
