"""The HTTP server of a peer: declarations of calls, pages, server-sent events, limits on connections."""
