"""Outer and inner optimizers and codecs: tensors in, tensors out; no network, no clock, no processes."""
