"""Devices: tensors on GPUs, how they go to a peer, and on which streams they are ready."""
