"""What has been decided: genesis, transactions, state modules, the state root. No I/O: `storage` writes it down."""
