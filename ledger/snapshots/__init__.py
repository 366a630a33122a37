"""Snapshots of the certified state: served, downloaded, and checked part by part."""
