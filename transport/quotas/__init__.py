"""Limits on what one peer or host may take: connections, memory, processor time, upload."""
