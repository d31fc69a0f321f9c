"""Row softmax: the rungs of the ladder, one module each, and `memtraffic.softmax`, the op."""
