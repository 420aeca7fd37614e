"""Attention over a paged KV cache: formats, Triton kernels, their torch twin and a float64 oracle.

This package knows blocks, slots and tensors, and nothing of requests. Importing it does not import torch:
`kernels.formats` is pure Python, `kernels.attention` is the entry point that needs torch.
"""
