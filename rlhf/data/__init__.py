"""Sets of preferences and responses: parsing, tokenization, statistics."""
