"""Whole swarms in one process and in virtual time: N replicas of the real model (`training`), or links and barriers alone (`network`).

The outer steps, codecs, countdowns and fragments are those of the real peers (`optim`); only the network is missing. Nothing here imports
hivemind or grpc, so it runs wherever torch and transformers do.
"""
