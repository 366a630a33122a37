"""One running peer, put together from its parts."""
