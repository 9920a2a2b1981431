"""Devices: tensors on GPUs, which way they go to a peer, and on which streams they are ready."""
