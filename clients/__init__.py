"""Training loops of people's own programs, whose steps are rounds of the network."""
