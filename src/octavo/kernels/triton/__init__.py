"""GPU kernels in Triton over torch tensors.  Nothing else of Octavo imports torch or Triton: both are an extra.

On a machine without a GPU the same kernels run in Triton's interpreter, on the CPU and slowly: for tests.
"""
