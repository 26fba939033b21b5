"""The generated form of `peer.proto` (`make proto`). Only `frames`, `records`, `invite` and `manifest` touch it."""
