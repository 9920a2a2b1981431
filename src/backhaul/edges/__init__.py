"""Edges: what happens to tensors and gradients that leave this worker for a peer, before they leave it."""
