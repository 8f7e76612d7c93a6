"""The network and where its parts go: sizes, families, chunks, ranks."""
