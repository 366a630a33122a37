"""The worker process and its supervisor."""
