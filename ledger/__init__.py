"""What has been decided: genesis, transactions, state modules, the state root, and how all of it is stored."""
