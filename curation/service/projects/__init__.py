"""Projects of this peer: their pages, gold answers, imports and exports."""
