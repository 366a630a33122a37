"""A run as files, and its replay by anybody."""
