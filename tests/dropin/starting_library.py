"""A module that a fork server imports in advance."""

import os

import torch.distributed.rpc as rpc

os.write(1, f"preloaded: {rpc.__name__}\n".encode())
