"""Which samples run together, when and on which ranks: pure functions of numbers."""
