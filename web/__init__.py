"""The HTTP server: declarations of calls, pages, server-sent events, limits on connections."""
