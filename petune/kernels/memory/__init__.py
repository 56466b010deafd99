"""The memory policy: costs and bytes of blocks, what they keep, offloading, and parameters in host memory."""
