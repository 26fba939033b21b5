"""Generated protobuf code for `peer.proto` (`make proto`). Only protocol/messages/ and protocol/run/ import it."""
