"""Text to batches of tokens: tokenizer, documents, corpora on disk or streamed. No process of its own; the trainer reads it."""
