"""From text to batches of tokens: tokenizers, documents, and corpora on disk or streamed. The trainer uses it."""
