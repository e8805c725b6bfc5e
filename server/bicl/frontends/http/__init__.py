"""The embedded server: TGI's wire format on our core."""
