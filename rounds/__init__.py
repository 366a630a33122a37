"""Rounds without I/O: the ballots and vouches on a round's proposals, its timeouts, and the certificate that closes it."""
