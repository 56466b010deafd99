"""Tensor and Galaxy parallelism: sharded parameters, hooks around regions, a sharded vocabulary, overlapped
communication."""
