"""What peers do for RLHF beside agreeing: derives preference sets, measures final models, prefetches blobs."""
