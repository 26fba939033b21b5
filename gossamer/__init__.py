"""Gossamer: many machines train one model together over the internet, with no coordinator.

The subpackages are links to the folders of the same name at the top of the repository. They are private.
"""
