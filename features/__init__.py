"""What a package offers to take part in a network: its modules, and what people see of it. `peer.features` lists them."""
