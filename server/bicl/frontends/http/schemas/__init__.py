"""Wire types of the embedded server: TGI 3.3.7's JSON, field for field and in its order."""
