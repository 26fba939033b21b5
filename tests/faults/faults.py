"""All faults of the suite. docs/concepts/faults.md describes them by their ids."""

from __future__ import annotations

from tests.faults import daemons, disks, endings, hops, meetings, pauses, processes, swarms
from tests.faults.suite import Fault

FAULTS = (
    Fault("R1", "a peer, its node or its trainer is killed in a meeting", 2400, meetings.killed),
    Fault("R1k", "20 processes of real peers killed at any time", 10, processes.killed, "seconds until back at work"),
    Fault("R2", "a partner dies, hangs, or hangs up in a meeting", 1000, meetings.gone, "seconds past the deadline"),
    Fault("R3", "a frame is changed, doubled, swapped or lost", 5000, meetings.tampered),
    Fault("R4", "a peer's p2pd is killed, or hangs; real processes", 50, daemons.p2pd, "seconds until it answers again"),
    Fault("R5", "the swarm is cut in two or three, once or ten times", 500, swarms.cut, "seconds until all see all"),
    Fault("R6", "bootstrap nodes are dead at the start, die, or come back", 100, swarms.bootstraps_lost, "seconds until all see all"),
    Fault("R7", "30 % or 50 % of 20 peers are away in each round", 50, swarms.churn, "per cent of loss"),
    Fault("R8", "clocks wrong by up to an hour, and set meanwhile", 200, swarms.clocks, "seconds until all see all"),
    Fault("R9", "the disk is full, fails, tears, or flips a bit", 350, disks.refused),
    Fault("R9k", "a process is killed at a write", 150, disks.killed),
    Fault("R13", "10,000 meetings of two peers", 1, swarms.soak, "MiB grown"),
    Fault("R14", "kill -9 while training and saving, then on", 100, disks.killed_and_resumed),
    Fault("R15", "a caller of another version, run, codec or size", 40, swarms.other_builds),
    Fault("R16", "restarts, unlike texts and a malicious writer at the end", 300, endings.endings, "per cent of loss"),
    Fault(
        "R17",
        "peers of a swarm pause, or are away, for seconds or many gaps",
        300,
        pauses.pauses,
        "seconds until all meet again",
        "pauses and absences",
    ),
    Fault("R18", "a holder, its trainer or a lane dies at any event of a hop", 1000, hops.killed, "seconds until a driver goes on"),
    Fault("R18k", "4 processes of real holders killed at any time", 10, processes.holder_killed, "seconds until it carries hops"),
    Fault("R19", "frames of hops changed, cut, doubled, swapped or lost", 1000, hops.tampered, "seconds until a driver goes on"),
    Fault("R20", "a stage loses all holders, for a second or an hour", 1000, hops.lost, "seconds until a driver goes on"),
)
