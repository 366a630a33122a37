"""The certified state as a newcomer gets it: from several peers, each part checked on its own."""
