"""What people see of a peer: an HTTP API for annotators and their programs, and pages. Handlers only: `peer/serving` answers."""
