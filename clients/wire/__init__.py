"""The messages that clients exchange with a gateway as protobuf: requests for gradients, their results, and samples."""
