"""Bytes on a link: frames, the Noise handshake, encrypted sessions."""
