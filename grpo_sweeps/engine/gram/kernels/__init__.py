"""Triton kernels, one file each, imported only where they run (`forms.kernels`): Triton is no dependency of the
package, and its functions are written in its own dialect (tuples grown by +, no annotations)."""
