"""Ballots and vouches on a round's proposals: when they are enough, and what its closing must hold."""
