"""Whole swarms in one process and in virtual time: replicas of the model (`training`), real nodes (`swarm`), or links alone (`network`).

In `training` outer steps, codecs, countdowns and fragments are those of the real peers (`optim`), and the network is missing; in `swarm`
nodes, directory, records and meetings are, and the trainers are stand-ins.
"""
