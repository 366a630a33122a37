"""Bytes on a link: frames, encrypted Noise sessions, failure detection, measurements."""
