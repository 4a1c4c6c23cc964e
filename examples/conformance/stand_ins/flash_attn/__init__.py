"""A stand-in for the package flash-attn on CPUs, written from its documentation, so that the distributed part of packages that call
its kernels can be judged without a GPU. On a machine with a GPU leave this folder off PYTHONPATH.

It has the functions of flash-attn 2.8 that such packages import, for every dtype: dense attention in fp32, causal masks and windows
aligned at the bottom right, out rounded to the dtype of q, and lse in fp32. Dropout, ALiBi, soft caps and paged keys are refused.
"""

from .flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__version__ = "2.8.3"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
