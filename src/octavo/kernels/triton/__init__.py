"""The GPU backend: Triton kernels over torch tensors.  Nothing outside this package imports either.

On a machine without a GPU the same kernels run in Triton's interpreter, on the CPU and slowly: for tests.
"""
