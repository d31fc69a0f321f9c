"""RMS norm: a second operation, on what the softmax kernels share."""
