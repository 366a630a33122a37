"""The one inbox that changes a peer's mind, and what runs beside it."""
