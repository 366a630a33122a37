"""Content-addressed blobs: the store, the server, the upload queue, and the downloads."""
