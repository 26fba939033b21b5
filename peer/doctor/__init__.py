"""`peer doctor`: whether this machine can take part in a run, one check after another. A process of its own, which changes nothing."""
