"""People see a peer by this: an HTTP API for annotators and their programs, and pages. Handlers only: `peer/serving` answers."""
