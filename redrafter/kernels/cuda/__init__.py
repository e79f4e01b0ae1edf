"""Kernels in CUDA C++, compiled for the GPU by NVRTC, which CUDA builds of torch ship."""

from redrafter.kernels.cuda import grouped_product  # noqa: F401 -- an attribute, by which callers name the kernel
