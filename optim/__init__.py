"""The mathematics of a Gossamer peer: fragments, outer steps, codecs, inner optimizer.

Pure torch: no network, no processes, no clock. Start at `noloco.py` (the outer step) and `fragment_codec.py` (the bytes of a meeting).
Equations: docs/concepts/mathematics.md.
"""
