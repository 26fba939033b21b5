"""`peer doctor`: whether this machine can take part in a run, one check after another. It runs in its own process and changes nothing."""
