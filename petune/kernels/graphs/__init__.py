"""Stacks of fused blocks as CUDA graphs."""
