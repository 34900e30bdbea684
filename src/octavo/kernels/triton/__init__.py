"""The GPU backend: Triton kernels over torch tensors.  Nothing outside this package imports either."""
