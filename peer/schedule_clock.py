"""The schedule clock: how far the run is, in inner steps, as one peer sees it. Learning rate and the end of the run follow it."""

from __future__ import annotations

CLOCK_FACTOR = 4  # a peer's schedule clock never runs faster than this many times its own steps


def follow_clock(own_steps: int, partner_steps: int, slack_steps: int, own_trained: int, total_steps: int) -> int:
    """Return the schedule clock after a meeting: no more than `slack_steps` behind the partner's, and less towards the end; never back.

    A clock never runs faster than `CLOCK_FACTOR` times the steps that its peer has trained itself. The slack lets equal peers run at their
    own steps: taking the larger clock outright is a ratchet, for whoever is ahead by chance at some meeting moves everybody, and the
    shared clock runs faster than any peer steps.
    """
    slack_steps = min(slack_steps, max(0, total_steps - partner_steps))
    return max(own_steps, min(partner_steps - slack_steps, CLOCK_FACTOR * own_trained, total_steps))
