"""The definition of a run: the manifest and its sections, the invite and its credential."""
