"""Blobs and disk space of jobs: pins, quotas, and the models that jobs start from."""
