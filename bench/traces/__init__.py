"""Request traces in Mooncake's format: read, made, bounded, replayed."""
