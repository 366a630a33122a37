"""What a peer answers to people and programs, and the socket over which they ask."""
