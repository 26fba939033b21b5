"""Simulated swarms in one process and virtual time: training replicas (`training`), real nodes (`swarm`), or links alone (`network`).

`training` uses the outer steps, codecs, countdowns and fragments of real peers (`optim`), without a network. `swarm` uses real nodes,
directory, records and meetings, with stand-in trainers. Of the product, only the verb `simulate` imports this package.
"""
