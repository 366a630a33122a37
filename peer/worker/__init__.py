"""The process that computes, and its supervisor."""
