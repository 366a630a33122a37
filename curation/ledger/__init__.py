"""The replicated state of curation and the transactions that change it."""
