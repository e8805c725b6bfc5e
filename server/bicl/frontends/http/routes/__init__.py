"""Routes of the embedded server."""
