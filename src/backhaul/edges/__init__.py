"""Edges: transforms of tensors and gradients before they leave this worker for a peer."""
