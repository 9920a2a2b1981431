"""Whom a worker believes, and what it lets others do: the policies of clusters and federations, and what they need."""
