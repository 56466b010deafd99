"""Fused transformer blocks: one autograd node each, of packed linears, norms, attention and an MLP."""
