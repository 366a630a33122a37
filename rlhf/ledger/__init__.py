"""The replicated state of tuning plans and preference sets, and the transactions that change it."""
