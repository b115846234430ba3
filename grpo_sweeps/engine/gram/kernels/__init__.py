"""Kernels, one file each, imported only where they run (`linear.kernels`), and `launch`, which they share.

Triton is no dependency of the package. Its functions are written in its dialect: tuples grow by +, without annotations.
"""
