"""Genesis, transactions, and the interface of state modules."""
