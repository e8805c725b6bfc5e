"""The doors: TGI overlay, transformers, embedded HTTP server."""
