"""Serving annotators: what they say is kept, gathered into batches, and decided; tasks are drawn for them and shown."""
