"""The gateway, which serves programs with the SDK `tinker`."""
