"""Sets of preferences and responses: files of people, tokenized forms, statistics."""
