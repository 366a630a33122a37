"""Files of other programs: models and tokenizers in the formats of `safetensors`, `tokenizers` and GGUF."""
