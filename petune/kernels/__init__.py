"""Fused kernels: operations with a plain and a Triton form, blocks and the loss head made of them, and what
each block keeps in memory."""
