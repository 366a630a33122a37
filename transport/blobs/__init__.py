"""Transfers of content-addressed blobs: downloads, uploads, and the interface of the store."""
