"""Kernels by operation, and what they share: checks of operands, tilings, launches."""
