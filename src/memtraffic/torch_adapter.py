"""Every private name of PyTorch that this package uses.

They are bound when this module is imported, so that a name that PyTorch has moved is found at once,
and a call costs no more than that of the name itself.
"""

from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = ["disable_current_modes"]
