"""The operations of `petune.kernels.reference` in Triton, for CUDA devices of compute capability 8.0 and
later.

One module per kind of operation, each with the signatures of the reference. Importing a module needs Triton,
so it is done where a device that can run it has been found. Meta-parameters are functions of shape and dtype,
never tuned at run time: a run starts at once and repeats itself. What is launched for the shapes that
matter is said in tests/kernels/variants, so that all of it can be compiled without a device.
"""
