"""Random numbers: where in the global batch a tensor is, dropout by index, and the state of generators."""
