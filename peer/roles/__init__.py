"""What a peer does beside taking part, as plug-ins behind one narrow context."""
