"""The mathematics of a Gossamer peer: fragments, outer steps, codecs, inner optimizer.

Pure torch: no network, no processes, no clock. Start at `optim.noloco` (the outer step) and `optim.fragment_codec` (what a meeting
sends). Equations: docs/concepts/mathematics.md.
"""
