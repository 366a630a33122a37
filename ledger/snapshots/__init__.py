"""Snapshots of the certified state: serving them, downloading them, and checking each part."""
